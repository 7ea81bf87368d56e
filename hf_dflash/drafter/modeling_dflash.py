# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The DFlash drafter (arXiv 2602.06036): slots of a block attend to target features and to one another.

Shapes: B batch (rows), Q slots, C context positions, K target layers, H hidden size, D head dimension.
The layers are our own, for the signatures of transformers' layers change between releases; weight names are those of
published drafters. This file is shipped to the Hub beside the weights: it imports torch, transformers and its siblings only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput

from .compilation import compile_function
from .configuration_dflash import DFlashConfig


@dataclass
class DFlashOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`torch.Tensor` of shape `[B, Q, H]`):
            Normed hidden states of the slots; the target's head turns them into logits.
    """

    last_hidden_state: torch.Tensor | None = None


class CompilableModule(nn.Module):
    """
    A module that computes in `compute`, and on request compiled. That is a mark on the module, so that hooks stay outside,
    names of weights stay as they are, and a copy runs its own weights.
    """

    compile_options: tuple[bool, str] | None = None

    def call(self, *arguments):
        # Not `is_compiling`, which is true in all threads while one of them compiles.
        if self.compile_options is None or torch.compiler.is_dynamo_compiling():
            return self.compute(*arguments)
        return _compiled_call(*self.compile_options)(self, *arguments)


class DFlashRMSNorm(CompilableModule):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.call(hidden_states)

    def compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Statistics in fp32 (fp64 stays fp64, where exactness is tested).
        dtype = hidden_states.dtype
        states = hidden_states.to(torch.promote_types(dtype, torch.float32))
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * states.to(dtype)


class DFlashMLP(nn.Module):
    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def compute_rotary_embedding(
    position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of shape `[B, 1, length, D]`.

    Frequencies are made here in fp32 and never stored: a buffer would be rounded by `.to(bfloat16)` (NeMo issue 2859) and
    come back as garbage from a load on the meta device.
    """
    precise = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=precise) / head_dim
    angles = position_ids.to(precise)[:, None, :, None] * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding to `[B, heads, length, D]`, halves paired as Qwen and Llama do."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


# Flex attention checks bounds at each load unless lengths are known to be multiples of its tiles, which it does not find out
# of dynamic ones. Not `ROWS_GUARANTEED_SAFE`: each slot sees a key, but not in the first tile that its row of tiles reads, and
# that is what flex attention means by it; elsewhere it makes NaN.
#
# Fewer than 128 slots would go to the kernels of decoding, and none of them takes such a mask.
ANY_TILES = {"FORCE_USE_FLEX_ATTENTION": True}
FILLED_TILES = {**ANY_TILES, "IS_DIVISIBLE": True}


@lru_cache(maxsize=1)
def _compiled_flex_attention():
    return compile_function(_flex_attention_compiled_only)


def _flex_attention_compiled_only(*arguments, **options):
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "Flex attention was about to run uncompiled, where it holds every score: more than 64 variants of it were compiled, "
            "or compilation is disabled (TORCH_COMPILE_DISABLE, `torch.compiler.set_stance`)."
        )
    return flex_attention(*arguments, **options)


@lru_cache(maxsize=4)
def _compiled_call(dynamic: bool, backend: str) -> Callable:
    """One compiled function for all modules, which hands them in: equal ones share their code, and copies stay copies."""
    return compile_function(lambda module, *arguments: module.compute(*arguments), dynamic=dynamic, backend=backend)


class DFlashAttention(nn.Module):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        width, key_value_width = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        # Training pads anchors to multiples of 16 (see `pad_to_bucket`): other block sizes fill tiles of 128 by chance only, and
        # each of the two cases would have code of its own.
        self.is_padded_to_tiles = config.block_size % 8 == 0
        self.q_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotary_embedding: tuple[torch.Tensor, torch.Tensor],
        attention_mask,
        cache=None,
    ) -> torch.Tensor:
        batch, q_len, _ = hidden_states.shape
        cos, sin = rotary_embedding

        def heads(states, norm=None):
            states = states.view(batch, states.shape[1], -1, self.head_dim)
            return (states if norm is None else norm(states)).transpose(1, 2)

        key_value_input = torch.cat([context, hidden_states], dim=1)
        queries = rotate(heads(self.q_proj(hidden_states), self.q_norm), cos[:, :, -q_len:], sin[:, :, -q_len:])
        keys = rotate(heads(self.k_proj(key_value_input), self.k_norm), cos, sin)
        values = heads(self.v_proj(key_value_input))
        # Under autocast queries and keys leave their norms in fp32, in which attention would run several times slower.
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)

        # A mask of decoding depends on how many keys the cache hands out, which sliding layers limit.
        if isinstance(attention_mask, DecodingMask):
            attention_mask = attention_mask.for_keys(keys.shape[2], queries.dtype)
        if attention_mask is None or isinstance(attention_mask, torch.Tensor):
            if attention_mask is not None:
                attention_mask = attention_mask.to(queries.dtype)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attention_mask, enable_gqa=True)
        else:
            # Uncompiled flex attention materialises every score. It is the forward-only reference on a CPU, where it has no
            # backward: training there uses dense masks.
            is_compiled = queries.is_cuda and not torch.compiler.is_dynamo_compiling()
            flex = _compiled_flex_attention() if is_compiled else flex_attention
            are_filled = self.is_padded_to_tiles and q_len % 128 == 0 and keys.shape[2] % 128 == 0
            options = (FILLED_TILES if are_filled else ANY_TILES) if queries.is_cuda else None
            out = flex(queries, keys, values, block_mask=attention_mask, enable_gqa=True, kernel_options=options)
        return self.o_proj(out.transpose(1, 2).reshape(batch, q_len, -1))


class DFlashDecoderLayer(CompilableModule):
    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, context, rotary_embedding, attention_mask, cache=None) -> torch.Tensor:
        if cache is not None or isinstance(attention_mask, DecodingMask):
            # Decoding: other shapes at each call, and too short to be worth it.
            return self.compute(hidden_states, context, rotary_embedding, attention_mask, cache)
        return self.call(hidden_states, context, rotary_embedding, attention_mask)

    def compute(self, hidden_states, context, rotary_embedding, attention_mask, cache=None) -> torch.Tensor:
        # The context enters each layer's keys and values as it is: only the slots are normed.
        attended = self.self_attn(
            self.input_layernorm(hidden_states), context, rotary_embedding, attention_mask, cache
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DecodingMask:
    """The mask of one block behind its context, built for whatever number of keys a layer's cache hands out.

    Keys are counted back from the last slot, and positions from the 2-D mask of real keys, so that neither padding nor a
    cache that drops old keys shifts the window. transformers' own mask functions are not used: their bidirectional window
    holds one key more than ours.
    """

    def __init__(self, key_mask: torch.Tensor | None, q_len: int, sliding_window: int | None, is_causal: bool, device):
        self.key_mask = None if key_mask is None else key_mask.bool()
        self.q_len, self.sliding_window, self.is_causal, self.device = q_len, sliding_window, is_causal, device

    def for_keys(self, num_keys: int, dtype: torch.dtype) -> torch.Tensor | None:
        """An additive mask of shape `[B or 1, 1, Q, num_keys]`, or `None` where every slot sees every key."""
        if self.key_mask is None and self.sliding_window is None and not self.is_causal:
            return None
        if self.key_mask is None:
            real = torch.ones(1, num_keys, dtype=torch.bool, device=self.device)
        else:
            real = self.key_mask[:, -num_keys:]
        key_positions = real.long().cumsum(-1)[:, None, None, :]
        query_positions = key_positions[..., -self.q_len :].transpose(-1, -2)
        visible = real[:, None, None, :].expand(-1, 1, self.q_len, -1)
        if self.sliding_window is not None:
            visible = visible & ((query_positions - key_positions).abs() < self.sliding_window)
        if self.is_causal:
            visible = visible & (key_positions <= query_positions)
        return torch.zeros(visible.shape, dtype=dtype, device=self.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )


class DFlashForSpeculation(PreTrainedModel):
    """
    The drafter: one forward pass proposes a whole block. It holds neither embedding nor head, both are the target's.

    Args:
        config ([`DFlashConfig`]): with `target_layer_ids` set.

    Raises:
        `ValueError`: if the config names no target layers.
    """

    config_class = DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_sdpa = True

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        if not config.target_layer_ids:
            raise ValueError("The drafter's config has no `target_layer_ids`: make it with `create_drafter_config`.")
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def compile_layers(self, dynamic: bool = True, backend: str = "inductor") -> "DFlashForSpeculation":
        """
        Compiles decoder layers and norms, each by itself, for training; decoding goes on uncompiled. A whole model takes
        minutes to compile, and gains nothing.

        Args:
            dynamic (`bool`, *optional*, defaults to `True`): one code for all widths; `False` for one code for each.
            backend (`str`, *optional*, defaults to `"inductor"`): of `torch.compile`.

        Returns:
            [`DFlashForSpeculation`]: itself.
        """
        for module in (*self.layers, self.norm, self.hidden_norm):
            module.compile_options = (dynamic, backend)
        return self

    def is_causal_layer(self, layer_type: str) -> bool:
        """Whether slots of a block see only earlier slots in layers of this type (see `is_causal` of [`DFlashConfig`])."""
        if self.config.is_causal is None:
            return layer_type == "sliding_attention"
        return self.config.is_causal

    def window_of(self, layer_type: str) -> int | None:
        """The window W of layers of this type, `None` for full attention."""
        return self.config.sliding_window if layer_type == "sliding_attention" else None

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | dict | None = None,
        past_key_values=None,
        **kwargs,
    ) -> DFlashOutput:
        r"""
        Args:
            noise_embeds (`torch.Tensor` of shape `[B, Q, H]`):
                The target's embeddings of the slots: an anchor token and mask tokens, block after block.
            context_hidden_states (`torch.Tensor` of shape `[B, C, K * H]`):
                Target features of the context, concatenated in the order of `target_layer_ids`. With a cache, only those of
                tokens that it does not hold yet.
            position_ids (`torch.Tensor` of shape `[B, C + Q]`):
                Positions of context and slots.
            attention_mask (`torch.Tensor` of shape `[B, keys]` or `dict`, *optional*):
                Decoding, one block: `None`, or 1 on real keys and 0 on padding, cached keys included. Training, many blocks:
                a `BlockMask` or an additive tensor `[B, 1, Q, C + Q]` for each layer type.
            past_key_values (`Cache`, *optional*):
                Keys and values of earlier context; `cache=` is the newer spelling. Slots are appended too: crop them off.

        Raises:
            `ValueError`: if several blocks come without a mask for each layer type (they would see one another), or a shape
                does not fit.
        """
        cache = kwargs.pop("cache", None) if past_key_values is None else past_key_values
        context_length, q_len = context_hidden_states.shape[1], noise_embeds.shape[1]
        if position_ids.shape[-1] != context_length + q_len:
            raise ValueError(
                f"`position_ids` has {position_ids.shape[-1]} positions for {context_length} context positions and {q_len} slots."
            )
        if context_hidden_states.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"`context_hidden_states` is {context_hidden_states.shape[-1]} wide, `target_layer_ids` "
                f"{self.config.target_layer_ids} of a target of width {self.config.hidden_size} make {self.fc.in_features}."
            )
        if isinstance(attention_mask, dict):
            masks = attention_mask
        elif q_len != self.config.block_size:
            raise ValueError(
                f"{q_len} slots with block_size {self.config.block_size} need a mask for each layer type: without one, blocks "
                "would see one another and the features that they predict."
            )
        elif attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"`attention_mask` has {attention_mask.dim()} dimensions: pass a 2-D mask of real keys, or a `dict` with a mask for "
                "each layer type."
            )
        else:
            masks = {
                layer_type: DecodingMask(
                    attention_mask,
                    q_len,
                    self.window_of(layer_type),
                    self.is_causal_layer(layer_type),
                    noise_embeds.device,
                )
                for layer_type in set(self.config.layer_types)
            }

        hidden_states = noise_embeds
        context = self.hidden_norm(self.fc(context_hidden_states))
        rotary_embedding = compute_rotary_embedding(
            position_ids, self.config.head_dim, self.config.rope_parameters["rope_theta"], hidden_states.dtype
        )
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            arguments = (hidden_states, context, rotary_embedding, masks[layer_type], cache)
            if self.gradient_checkpointing and self.training:
                hidden_states = self._gradient_checkpointing_func(layer.__call__, *arguments)
            else:
                hidden_states = layer(*arguments)
        return DFlashOutput(last_hidden_state=self.norm(hidden_states))


def create_training_masks(model: DFlashForSpeculation, create_mask: Callable) -> dict:
    """One mask for each kind of layer that the drafter has.

    Args:
        model ([`DFlashForSpeculation`]): the drafter.
        create_mask (`Callable`): takes `sliding_window` and `is_causal` and returns a mask.

    Returns:
        `dict[str, BlockMask | torch.Tensor]`: by layer type.
    """
    return {
        layer_type: create_mask(
            sliding_window=model.window_of(layer_type), is_causal=model.is_causal_layer(layer_type)
        )
        for layer_type in set(model.config.layer_types)
    }


DFlashForSpeculation.register_for_auto_class("AutoModel")
