# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def word_tokenizer():
    """One word for each of the 96 tokens of the tiny targets."""
    words = {f"w{i:02d}": i for i in range(96)}
    # `StopStringCriteria` finds the text of a token by putting it behind this word.
    words["abcdef"] = words.pop("w04")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w03"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w00", bos_token="w01", eos_token="w02")
