# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Random target models, small enough that a test can afford float64 and brute force."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)


VOCAB_SIZE = 96
HIDDEN_SIZE = 32
NUM_LAYERS = 6

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Ten times transformers' default: greedy decoding of such a model wanders instead of repeating one token.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    # The first layers see everything, the others only the last 8 keys.
    "qwen3_sliding": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    # The reference architecture: gated-delta-net layers, every third one full attention, partial rotary embedding.
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            # mrope, as the published Qwen3.5 and Qwen3.6 configs have it, over the 4 rotated of 8 dimensions.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
        },
    ),
}

KINDS = tuple(_KINDS)


def make_target(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> PreTrainedModel:
    """
    A frozen random target in evaluation mode.

    Args:
        kind (`str`):
            One of `KINDS`: `"llama"`, `"qwen3"`, `"qwen3_sliding"` (full and sliding attention) or `"qwen3_5"`
            (gated delta net and full attention).
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the weights. The weights are drawn in float32, so that every `dtype` gives the same model.
        seed (`int`, *optional*, defaults to 0):
            The caller's random state is left as it was.
        overrides:
            Fields of the model's config.
    """
    model_class, config_class, fields = _KINDS[kind]
    # A copy of the nested values: a config may write into what it is given.
    fields = {key: value.copy() if hasattr(value, "copy") else value for key, value in fields.items()}
    config = config_class(**{**COMMON, **fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(dtype).eval().requires_grad_(False)
