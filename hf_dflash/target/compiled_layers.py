# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Decoder layers of a frozen target, compiled one by one.

Their `forward` is replaced, not the module: hooks stay outside of what is compiled. A call with a cache (decoding) goes to the
layer's own `forward` as before. Equal layers share their code.

What takes the place of `forward` is a method: one function for all modules of a class, which gets the module handed in. So a
deep copy of a module runs its own layers, with the code that is compiled already.
"""

import functools
import logging
from collections.abc import Callable
from functools import lru_cache
from types import MethodType

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
        move tensors about, and one that is compiled already too, here or elsewhere.
    """
    norm = getattr(decoder, "norm", None)
    compiled = [*decoder.layers, *([norm] if isinstance(norm, nn.Module) else [])]
    mixers = [module for layer in decoder.layers for module in layer.modules() if _is_any_gated_delta_net(module)]
    if any(hasattr(module, "_hf_hook") or not isinstance(module.forward, MethodType) for module in compiled + mixers):
        logger.warning(
            "A target that is spread over several devices, or with a `forward` of its own in a layer, runs as it is."
        )
        return False
    if any(hasattr(layer.forward, "uncompiled") for layer in decoder.layers):
        return False
    delta_rule = delta_rule or load_delta_rule()
    for mixer in mixers:
        if is_gated_delta_net(mixer):
            if delta_rule is not None:
                join_projections(mixer)
            _replace_forward(mixer, _mixing, delta_rule, dynamic, backend)
        else:
            _replace_forward(mixer, _uncompiled)
    for module in compiled:
        _replace_forward(module, _compiled_without_cache, dynamic, backend)
    return True


def _is_any_gated_delta_net(module: nn.Module) -> bool:
    return is_gated_delta_net(module) or "gateddeltanet" in type(module).__name__.lower()


def _replace_forward(module: nn.Module, make_function: Callable, *options) -> None:
    module.forward = MethodType(make_function(module.forward.__func__, *options), module)


@lru_cache(maxsize=32)
def _compiled_without_cache(forward: Callable, dynamic: bool, backend: str) -> Callable:
    compiled = compile_function(forward, dynamic=dynamic, backend=backend)

    @functools.wraps(forward)
    def call(module, *args, **kwargs):
        return (forward if _has_cache(kwargs) else compiled)(module, *args, **kwargs)

    call.uncompiled = forward
    return call


@lru_cache(maxsize=32)
def _mixing(forward: Callable, delta_rule, dynamic: bool, backend: str) -> Callable:
    @functools.wraps(forward)
    def call(module, hidden_states, **kwargs):
        if delta_rule is None or kwargs.get("attention_mask") is not None or _has_cache(kwargs):
            return forward(module, hidden_states, **kwargs)
        return mix(module, hidden_states, delta_rule, dynamic, backend)

    # What is compiled around it stops here; the stages inside are compiled by themselves.
    return torch.compiler.disable(call, recursive=delta_rule is None)


@lru_cache(maxsize=32)
def _uncompiled(forward: Callable) -> Callable:
    return torch.compiler.disable(forward)


def _has_cache(kwargs: dict) -> bool:
    return any(kwargs.get(name) is not None for name in _CACHES)
