# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


TEMPLATE = (
    "{% for m in messages %}{{ 'user' if m.role == 'user' else 'assistant' }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking %}think {% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    words = ["pad", "begin", "stop", "user", "assistant", "end", "think"] + [f"w{i}" for i in range(7, 96)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w7"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, pad_token="pad", eos_token="stop")
