# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import inspect
from dataclasses import fields

import pytest

from hf_dflash.data.tokenization import tokenize_completions
from hf_dflash.data.tokenization_options import TokenizationOptions
from hf_dflash.data.tokenize_command import _parser
from hf_dflash.training.run import parse_job


pytestmark = pytest.mark.compat


def read_by_tokenize(options, tmp_path):
    arguments = _parser().parse_args(["--target", "t", "--output", "o", *options, "a.jsonl"])
    assert arguments.sources == ["a.jsonl"]
    return TokenizationOptions.from_arguments(arguments)


def read_by_train(options, tmp_path):
    needed = ["--target", "t", "--completions", "a.jsonl", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    return parse_job([*needed, *options])[0]


@pytest.mark.parametrize("read", [read_by_tokenize, read_by_train])
def test_train_and_tokenize_read_each_option_alike(read, tmp_path):
    (tmp_path / "a.jinja").write_text("a template")
    options = ["--max-length", "9", "--min_supervised_tokens", "3", "--no-enable-thinking"]
    options += ["--chat-template", str(tmp_path / "a.jinja"), "--chat-template-kwargs", '{"effort": "low"}']
    options += ["--map-role", "critic=assistant", "--map_role", "judge=user", "--split", "test", "--num-workers", "2"]
    given = read(options, tmp_path).for_tokenizing()
    assert given == {
        "max_length": 9,
        "min_supervised_tokens": 3,
        "enable_thinking": False,
        "chat_template": "a template",
        "chat_template_kwargs": {"effort": "low"},
        "extra_roles": {"critic": "assistant", "judge": "user"},
        "split": "test",
        "num_workers": 2,
    }
    assert len(given) == len(fields(TokenizationOptions))
    assert read(["--enable-thinking"], tmp_path).enable_thinking is True


@pytest.mark.parametrize("read", [read_by_tokenize, read_by_train])
def test_an_option_that_is_not_given_means_what_it_does_in_python(read, tmp_path):
    defaults = {name: p.default for name, p in inspect.signature(tokenize_completions).parameters.items()}
    for name, value in read([], tmp_path).for_tokenizing().items():
        assert (value or None) == defaults[name]


@pytest.mark.parametrize("read", [read_by_tokenize, read_by_train])
@pytest.mark.parametrize(
    "options, message",
    [
        (["--map-role", "critic"], "`--map_role critic` is not of the form NAME=ROLE"),
        (["--map-role", "critic="], "`--map_role critic=` is not"),
        (["--chat-template-kwargs", "{effort"], "`--chat_template_kwargs {effort` is not JSON"),
        (["--chat-template-kwargs", "[1]"], r"`--chat_template_kwargs \[1\]`: give a JSON object"),
    ],
)
def test_an_option_of_another_form_is_named(read, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(options, tmp_path)
