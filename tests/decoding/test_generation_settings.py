# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from transformers import GenerationConfig

from hf_dflash.decoding.generation_settings import settings_that_decide


@pytest.mark.compat
def test_settings_that_change_nothing_are_left_out_and_those_of_sampling_where_tokens_are_not_drawn():
    config = GenerationConfig(temperature=0.7, top_k=20, typical_p=1.0, repetition_penalty=1.0, min_new_tokens=2)
    assert settings_that_decide(config, do_sample=False) == {"min_new_tokens": 2}
    assert settings_that_decide(config, do_sample=True) == {"min_new_tokens": 2, "temperature": 0.7, "top_k": 20}


def test_what_generate_itself_fills_in_decides_nothing_but_the_sampling():
    config = GenerationConfig(**GenerationConfig._get_default_generation_params())
    assert settings_that_decide(config, do_sample=False) == {}
    assert settings_that_decide(config, do_sample=True).keys() == {"temperature", "top_k", "top_p"}
