# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which settings of `generate` decide what is written. Many come from the target's generation config, where nobody sees them."""

from transformers import GenerationConfig


# With the values, beside `None`, that change nothing.
_ALWAYS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "sequence_bias": {},
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
}
# Temperature, `top_k` and `top_p` are always said: without them in the generation config, `generate` has a `top_k` of its own.
_WHERE_TOKENS_ARE_DRAWN = {
    "temperature": None,
    "top_k": None,
    "top_p": None,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}


def settings_that_decide(config: GenerationConfig, do_sample: bool) -> dict:
    """
    The settings of a generation config that change which tokens are written.

    Args:
        config (`GenerationConfig`): of a target, or as `generate` has prepared it.
        do_sample (`bool`): whether tokens are drawn.

    Returns:
        `dict`: name -> value.
    """
    neutral = {**_ALWAYS, **(_WHERE_TOKENS_ARE_DRAWN if do_sample else {})}
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in values.items() if value is not None and value != neutral[name]}
