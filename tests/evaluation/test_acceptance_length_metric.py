# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
from pathlib import Path

import pytest

import hf_dflash


evaluate = pytest.importorskip("evaluate")


@pytest.fixture(scope="module")
def metric():
    return evaluate.load(str(Path(hf_dflash.__file__).parent / "evaluation" / "acceptance_length"))


def test_micro_is_tokens_over_blocks_and_macro_the_mean_of_prompts(metric):
    result = metric.compute(predictions=[[4, 1, 3], [2], []])
    assert result["acceptance_length_micro"] == 10 / 4
    assert result["acceptance_length_macro"] == (8 / 3 + 2) / 2
    assert result["acceptance_by_slot"] == [3 / 4, 2 / 4, 1 / 4]
    assert 1 + sum(result["acceptance_by_slot"]) == result["acceptance_length_micro"]
    assert (result["num_blocks"], result["num_prompts"]) == (4, 3)


@pytest.mark.parametrize("predictions", [[[]], [[0, 2]]])
def test_no_block_and_lengths_without_the_bonus_token_are_refused(metric, predictions):
    with pytest.raises(ValueError, match="acceptance lengths"):
        metric.compute(predictions=predictions)
