# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from mixture_examples import write_mixture


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{"id": 2}', "is not YAML: (.|\n)*line 2"),
        ("sauces: []", "there is no 'sauces'"),
        ("sources: []", "needs sources"),
        ("sources: [{name: a, path: x}]", "source a of .* has no mapping"),
        ("sources: [{name: a, path: x, mapping: {promt: y}}]", "has 'promt'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, weight: 1}]", "both or neither"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, rows: 1, filters: {min: 1}}]", "there is no 'min'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y, messages: z}}]", "one of prompt, messages"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        write_mixture(tmp_path, text)
