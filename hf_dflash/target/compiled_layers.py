# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Decoder layers of a frozen target, compiled one by one.

Their `forward` is replaced, not the module: hooks stay outside of what is compiled. A call with a cache (decoding) goes to the
layer's own `forward` as before. Equal layers share their code.
"""

import functools
import logging

import torch
from torch import nn

from ..drafter.compilation import compile_function
from .gated_delta_net import is_gated_delta_net, join_projections, load_delta_rule, mix


logger = logging.getLogger(__name__)

_CACHES = ("past_key_values", "cache", "cache_params")


def compile_decoder(decoder: nn.Module, *, dynamic: bool = True, backend: str = "inductor", delta_rule=None) -> bool:
    """Compiles layers and the final norm of a decoder.

    Gated-delta-net mixers run as in gated_delta_net.py where `fla` is installed, else as they are, uncompiled: their loop over
    the sequence has no end that a compiler would find.

    Args:
        decoder (`nn.Module`): with `layers` and perhaps a `norm`; of a frozen model.
        dynamic (`bool`, *optional*, defaults to `True`): one code for all lengths.
        backend (`str`, *optional*, defaults to `"inductor"`): of `torch.compile`.
        delta_rule (`Callable`, *optional*): instead of `fla`'s.

    Returns:
        `bool`: whether anything was compiled: a model that is spread over several devices is left as it is, for its layers
        move tensors about, and one that is compiled already too.
    """
    if any(hasattr(layer, "_hf_hook") for layer in decoder.layers):
        logger.warning("A target that is spread over several devices runs uncompiled.")
        return False
    if any(hasattr(layer.forward, "uncompiled") for layer in decoder.layers):
        return False
    delta_rule = delta_rule or load_delta_rule()
    for layer in decoder.layers:
        for module in layer.modules():
            if is_gated_delta_net(module):
                if delta_rule is not None:
                    join_projections(module)
                _replace_mixer(module, delta_rule, dynamic, backend)
            elif "gateddeltanet" in type(module).__name__.lower():
                module.forward = torch.compiler.disable(module.forward)
        compiled = compile_function(layer.forward, dynamic=dynamic, backend=backend)
        layer.forward = _without_cache(compiled, layer.forward)
    if isinstance(getattr(decoder, "norm", None), nn.Module):
        decoder.norm.forward = compile_function(decoder.norm.forward, dynamic=dynamic, backend=backend)
    return True


def _replace_mixer(module: nn.Module, delta_rule, dynamic: bool, backend: str) -> None:
    original = module.forward

    @functools.wraps(original)
    def forward(hidden_states, **kwargs):
        if delta_rule is None or kwargs.get("attention_mask") is not None or _has_cache(kwargs):
            return original(hidden_states, **kwargs)
        return mix(module, hidden_states, delta_rule, dynamic, backend)

    # What is compiled around it stops here; the stages inside are compiled by themselves.
    module.forward = torch.compiler.disable(forward, recursive=delta_rule is None)


def _without_cache(compiled, original):
    @functools.wraps(original)
    def forward(*args, **kwargs):
        return (original if _has_cache(kwargs) else compiled)(*args, **kwargs)

    forward.uncompiled = original
    return forward


def _has_cache(kwargs: dict) -> bool:
    return any(kwargs.get(name) is not None for name in _CACHES)
