# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A gated delta net reads a block of drafts and can then be put into the state after any of its tokens.

The gated delta rule turns a state S into `exp(g) S`, then writes: `S + k u^T`, `u = beta (v - S^T k)`. Over a block that starts
in S the writes u solve one small triangular system, and u of a token depends on earlier tokens alone. So one pass finds
them all, and the state after the first c tokens is S, decayed, plus the decayed sum of their `k u^T`: nothing is run again
after a rejection and no state is copied before the block.

transformers' own rule for several tokens works in chunks of 64, most of it padding for a block, and keeps no u.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache


class DeltaNetBlock:
    """
    Stands in for the forward of one mixer while drafts are verified.

    Args:
        mixer (`nn.Module`): a gated delta net of one of `KNOWN_MIXERS`.
        cache (`Cache`): with a `LinearAttentionLayer` of states for the mixer. A forward reads these, only [`keep`] writes
            them. Forwards with another cache are the mixer's own.

    Raises:
        `ValueError`: if the mixer's weights are offloaded.
    """

    def __init__(self, mixer: nn.Module, cache: Cache):
        if any(parameter.is_meta for parameter in mixer.parameters()):
            raise ValueError(
                f"Layer {mixer.layer_idx} of the target is offloaded: load a target with recurrent layers onto devices "
                "that hold all of it."
            )
        self.mixer, self.cache, self.layer = mixer, cache, cache.layers[mixer.layer_idx]
        self.project = KNOWN_MIXERS[type(mixer).__name__]
        self.activation = ACT2FN[mixer.activation]
        # accelerate moves inputs to the mixer's device in a forward of its own, which calls the original one by this name.
        self.name = "_old_forward" if hasattr(mixer, "_hf_hook") else "forward"

    def install(self) -> None:
        self.replaced, self.own_forward = self.mixer.__dict__.get(self.name), getattr(self.mixer, self.name)
        setattr(self.mixer, self.name, self.forward)

    def remove(self) -> None:
        if self.replaced is None:
            delattr(self.mixer, self.name)
        else:
            setattr(self.mixer, self.name, self.replaced)

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """`[B, length, H]` to the same shape. A block has no padding in it, so masks are not looked at."""
        if not any(argument is self.cache for argument in (*args, *kwargs.values())):
            return self.own_forward(hidden_states, *args, **kwargs)
        mixer = self.mixer
        batch, length, _ = hidden_states.shape
        mixed, gate, b, a = self.project(mixer, hidden_states)
        self.conv_inputs = torch.cat([self.layer.conv_states[0].transpose(1, 2), mixed], dim=1)
        mixed = self._convolve(length)
        query, key, value = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        decay = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
        out = self._read_and_write(
            query.view(batch, length, mixer.num_k_heads, -1),
            key.view(batch, length, mixer.num_k_heads, -1),
            value.view(batch, length, mixer.num_v_heads, -1),
            decay,
            b.sigmoid(),
        )
        out = out.to(hidden_states.dtype).reshape(-1, mixer.head_v_dim)
        out = mixer.norm(out, gate.reshape(-1, mixer.head_v_dim))
        return mixer.out_proj(out.view(batch, length, -1))

    def _convolve(self, length: int) -> torch.Tensor:
        """The short causal convolution over the last `length` inputs, `[B, length, channels]`."""
        convolution = self.mixer.conv1d
        width = convolution.kernel_size[0]
        windows = self.conv_inputs[:, 1 - width - length :].unfold(1, width, 1)
        precise = torch.promote_types(windows.dtype, torch.float32)
        mixed = (windows.to(precise) * convolution.weight[:, 0].to(precise)).sum(dim=-1)
        if convolution.bias is not None:
            mixed = mixed + convolution.bias
        return self.activation(mixed.to(windows.dtype))

    def _read_and_write(self, query, key, value, decay, beta) -> torch.Tensor:
        """What queries read, `[B, length, value heads, D]`; queries and keys come by key head, the rest by value head."""
        precise = torch.promote_types(query.dtype, torch.float32)
        length, group = query.shape[1], value.shape[2] // query.shape[2]
        # Keys and queries side by side: each product below is one product for both. [B, heads, 2 length, D]
        keys_and_queries = torch.cat([key, query], dim=1).transpose(1, 2).to(precise)
        keys_and_queries = keys_and_queries * torch.rsqrt(keys_and_queries.square().sum(-1, keepdim=True) + 1e-6)
        if group > 1:
            keys_and_queries = keys_and_queries.repeat_interleave(group, dim=1)
        value, beta = value.transpose(1, 2).to(precise), beta.transpose(1, 2).to(precise)[..., None]
        # Logarithms of the decay from the start of the block to each token, [B, heads, length].
        decay = decay.transpose(1, 2).to(precise).cumsum(dim=-1)
        state = self.layer.recurrent_states[0].to(precise)

        keys = keys_and_queries[:, :, :length]
        later = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1)
        between = (decay[..., None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
        among_tokens = (keys_and_queries @ keys.transpose(-1, -2)).unflatten(2, (2, length)) * between[:, :, None]
        from_state = (keys_and_queries @ state).unflatten(2, (2, length)) * decay.exp()[:, :, None, :, None]
        # The system's diagonal is 1 and what is above it is not looked at.
        writes = torch.linalg.solve_triangular(
            beta * among_tokens[:, :, 0], beta * (value - from_state[:, :, 0]), upper=False, unitriangular=True
        )
        self.keys, self.writes, self.decay = keys, writes, decay
        reads = from_state[:, :, 1] + among_tokens[:, :, 1] @ writes
        return (reads * self.mixer.head_k_dim**-0.5).transpose(1, 2)

    def keep(self, kept: torch.LongTensor) -> None:
        """Puts the states behind the first `kept` tokens, `[B]` and at least one, of the last block."""
        conv_state, state = self.layer.conv_states[0], self.layer.recurrent_states[0]
        kept = kept.to(state.device)
        places = kept[:, None] + torch.arange(conv_state.shape[-1], device=kept.device)
        # Copied and not assigned: compiled code and CUDA graphs hold on to the addresses.
        conv_state.copy_(_take(self.conv_inputs, places).transpose(1, 2))

        is_dropped = torch.arange(self.decay.shape[-1], device=kept.device) >= kept[:, None]
        decay = self.decay.gather(-1, (kept - 1)[:, None, None].expand(-1, self.decay.shape[1], 1))
        remaining = (decay - self.decay).masked_fill(is_dropped[:, None], -torch.inf).exp()
        written = (self.keys * remaining[..., None]).transpose(-1, -2) @ self.writes
        state.copy_(state * decay.exp()[..., None] + written)


def _take(states: torch.Tensor, places: torch.LongTensor) -> torch.Tensor:
    """`[B, n, width]`: the places `[B, n]` of each row of `[B, length, width]`."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))


def _project_apart(mixer: nn.Module, hidden_states: torch.Tensor) -> tuple:
    gate, b, a = mixer.in_proj_z(hidden_states), mixer.in_proj_b(hidden_states), mixer.in_proj_a(hidden_states)
    return mixer.in_proj_qkv(hidden_states), gate, b, a


def _project_by_key_head(mixer: nn.Module, hidden_states: torch.Tensor) -> tuple:
    """Each key head's query, key, values and gates lie together, and so do its b and a."""
    batch, length, _ = hidden_states.shape
    group = mixer.num_v_heads // mixer.num_k_heads
    heads = mixer.in_proj_qkvz(hidden_states).view(batch, length, mixer.num_k_heads, -1)
    values = group * mixer.head_v_dim
    *mixed, gate = heads.split([mixer.head_k_dim, mixer.head_k_dim, values, values], dim=-1)
    b, a = mixer.in_proj_ba(hidden_states).view(batch, length, mixer.num_k_heads, -1).chunk(2, dim=-1)
    return torch.cat([part.flatten(2) for part in mixed], dim=-1), gate, b.flatten(2), a.flatten(2)


# The mixers whose arithmetic is known, and how each makes its inputs: queries, keys and values before the convolution,
# `[B, length, channels]`, the gate of the output, and b and a, `[B, length, value heads]`, of which beta and the decay are made.
KNOWN_MIXERS = {
    "Qwen3_5GatedDeltaNet": _project_apart,
    "Qwen3_5MoeGatedDeltaNet": _project_apart,
    "Qwen3NextGatedDeltaNet": _project_by_key_head,
}
