# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from tiny_models import make_target
from tiny_tokenizers import CHATML_TEMPLATE, THINKING_TEMPLATE, make_tokenizer


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A tiny target with its tokenizer on disk. Several ids end its replies, so some end by themselves."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    target = make_target("qwen3", vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(30, 44)]
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def thinking_target(tmp_path_factory):
    """Tokenizer and template alone: whoever loads a model from here fails."""
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer(THINKING_TEMPLATE).save_pretrained(folder)
    return folder
