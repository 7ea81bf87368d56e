# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The gated-delta-net mixer of Qwen3.5 and Qwen3.6 for whole sequences, around `fla`'s kernel, in two compiled stages.

transformers' own form runs the causal convolution as its reference where `causal_conv1d` is not installed, transposes there
and back, repeats queries and keys for each value head, and leaves gates and norms to single operations. Here the convolution
is a sum of shifted products, which `torch.compile` turns into one Triton kernel together with SiLU and the norms of queries
and keys; `fla` reads one key head for several value heads by itself.

Shapes: R rows, L positions, H hidden size.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ..drafter.compilation import compile_function
from .measured_kernels import use_measured_kernels


_PARTS = "in_proj_qkv in_proj_z in_proj_b in_proj_a conv1d A_log dt_bias norm out_proj".split()
# Not the gate's: `fla`'s norm would copy a piece of a wider tensor.
_JOINED = "in_proj_qkv in_proj_b in_proj_a".split()


def is_gated_delta_net(module: nn.Module) -> bool:
    """Whether a module has the parts of Qwen3.5's gated delta net, under their names there."""
    return all(hasattr(module, part) for part in _PARTS)


def join_projections(module: nn.Module) -> None:
    """Lays the weights of three of a frozen mixer's input projections behind one another, so that one product does for them: a
    product with 48 outputs takes long to read its input. The projections keep their weights, as views; where they get others
    (`model.to(device)`), the next call of [`mix`] joins those.

    Args:
        module (`nn.Module`): the mixer; left as it is where a projection is no plain `nn.Linear` without a bias.
    """
    linears = [getattr(module, name) for name in _JOINED]
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return
    if len({(linear.weight.dtype, linear.weight.device) for linear in linears}) > 1:
        return
    # No buffer: `model.to(device)` would move it too, and hold the weights twice.
    module.joined_projections = torch.cat([linear.weight.detach() for linear in linears])
    parts = module.joined_projections.split([linear.out_features for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.weight.data = part


def separate_projections(module: nn.Module) -> None:
    """Undoes [`join_projections`], before a projection is replaced; the others would keep the memory of all."""
    if getattr(module, "joined_projections", None) is not None:
        del module.joined_projections
        for name in _JOINED:
            linear = getattr(module, name)
            linear.weight.data = linear.weight.data.clone()


# Addresses are for the host alone: compiled around them, it would be in pieces, with code of its own for a module that was moved.
@torch.compiler.disable
def _follow_projections(module: nn.Module) -> None:
    """Joins the projections anew if their weights are no longer those that were joined: on another device, say."""
    joined = getattr(module, "joined_projections", None)
    if joined is None:
        return
    # Addresses say it all: memory that is still held is nobody else's.
    address = joined.data_ptr()
    for name in _JOINED:
        weight = getattr(module, name).weight
        if weight.data_ptr() != address:
            del module.joined_projections, joined
            return join_projections(module)
        address += weight.nbytes


def load_delta_rule():
    """`fla`'s chunked gated delta rule, or `None` where `fla` is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    use_measured_kernels()
    return chunk_gated_delta_rule


def causal_convolution(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A depthwise convolution that looks back only: `[R, L, D]` with weights `[D, W]` -> `[R, L, D]` in fp32 or better."""
    length, width = states.shape[1], weight.shape[1]
    precise = torch.promote_types(states.dtype, torch.float32)
    padded = F.pad(states, (0, 0, width - 1, 0))
    out = sum(padded[:, i : i + length].to(precise) * weight[:, i].to(precise) for i in range(width))
    return out if bias is None else out + bias.to(precise)


def prepare_delta_rule(module: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Args:
        module (`nn.Module`): the mixer.
        hidden_states (`torch.Tensor` of shape `[R, L, H]`): normed input of the layer.

    Returns:
        `(query, key, value, decay, beta, gate)`: queries and keys `[R, L, key heads, D]` of norm 1, values and gates
        `[R, L, value heads, D]`, the logarithm of the decay and beta `[R, L, value heads]`.
    """
    rows, length, _ = hidden_states.shape
    dtype = hidden_states.dtype
    activation = F.silu if module.activation in ("silu", "swish") else ACT2FN[module.activation]
    widths = (module.key_dim, module.key_dim, module.value_dim)
    joined = getattr(module, "joined_projections", None)
    if joined is None:
        projected, beta, step = (getattr(module, name)(hidden_states) for name in _JOINED)
    else:
        widths_of_joined = [getattr(module, name).out_features for name in _JOINED]
        projected, beta, step = F.linear(hidden_states, joined).split(widths_of_joined, dim=-1)
    projected = projected.split(widths, dim=-1)
    weights = module.conv1d.weight.squeeze(1).split(widths)
    biases = [None] * 3 if module.conv1d.bias is None else module.conv1d.bias.split(widths)
    query, key, value = (
        activation(causal_convolution(states, weight, bias))
        for states, weight, bias in zip(projected, weights, biases, strict=True)
    )

    def normalize(states):
        states = states.reshape(rows, length, module.num_k_heads, module.head_k_dim)
        return (states * torch.rsqrt((states * states).sum(-1, keepdim=True) + 1e-6)).to(dtype)

    decay_step = F.softplus(step.float() + module.dt_bias.float())
    return (
        normalize(query),
        normalize(key),
        value.to(dtype).reshape(rows, length, module.num_v_heads, module.head_v_dim),
        -module.A_log.float().exp() * decay_step,
        beta.sigmoid(),
        module.in_proj_z(hidden_states).reshape(rows, length, module.num_v_heads, module.head_v_dim),
    )


def finish_delta_rule(module: nn.Module, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The gated norm and the output projection: `[R, L, value heads, D]` twice -> `[R, L, H]`."""
    rows, length = states.shape[:2]
    normed = module.norm(states.reshape(-1, module.head_v_dim), gate.reshape(-1, module.head_v_dim))
    return module.out_proj(normed.reshape(rows, length, -1))


@lru_cache(maxsize=4)
def _compiled_stages(dynamic: bool, backend: str):
    # Compiled once for all layers: modules are arguments.
    return tuple(
        compile_function(stage, dynamic=dynamic, backend=backend) for stage in (prepare_delta_rule, finish_delta_rule)
    )


@torch.compiler.disable(recursive=False)
def mix(module: nn.Module, hidden_states: torch.Tensor, delta_rule, dynamic: bool, backend: str) -> torch.Tensor:
    """What `module(hidden_states)` returns for whole sequences without a cache or a mask.

    Args:
        module (`nn.Module`): the mixer, see [`is_gated_delta_net`].
        hidden_states (`torch.Tensor` of shape `[R, L, H]`): normed input of the layer.
        delta_rule (`Callable`): of [`load_delta_rule`], or with the same arguments.
        dynamic (`bool`), backend (`str`): of `torch.compile`.

    Returns:
        `torch.Tensor` of shape `[R, L, H]`.
    """
    _follow_projections(module)
    prepare, finish = _compiled_stages(dynamic, backend)
    query, key, value, decay, beta, gate = prepare(module, hidden_states)
    states, _ = delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=False)
    return finish(module, states, gate)
