# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Roll-back of a cache to the last accepted token, row by row.

Verifying a block writes all its tokens into the target's cache; the rejected ones must leave no trace. Attention layers
forget keys from the end. Recurrent layers (gated delta net) cannot: [`DeltaNetBlock`] reads the block in their place and
makes the state after the accepted tokens.

Rows of a batch accept different numbers of tokens. They stay aligned on the right, with padding on the left, because
recurrent layers and sliding windows read positions off the order of keys.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import inspect

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from .delta_net_block import KNOWN_MIXERS, DeltaNetBlock


class RollbackCache:
    """
    A transformers cache that can be put back, each row by itself.

    Args:
        cache (`Cache`): a fresh dynamic cache, made from the model's config so that each layer has its own kind.
        row_lengths (`list[int]`): tokens of each row, without padding: those that the cache will hold after the prompt.
        model (`PreTrainedModel`, *optional*): the target, needed where the cache has recurrent layers.

    Raises:
        `ValueError`: if a layer's cache cannot be rolled back, naming it.
    """

    def __init__(self, cache: Cache, row_lengths: list[int], model=None):
        self.cache = cache
        self.row_lengths = list(row_lengths)
        self.attention_layers, self.recurrent_layers = _sort_layers(cache, len(row_lengths))
        self._blocks = [DeltaNetBlock(mixer, cache) for mixer in _find_mixers(model, self.recurrent_layers)]
        self._takes_causal_mask = model is not None and _takes_causal_mask(model, cache)
        self._is_recording = False

    def record(self) -> None:
        """From now on every forward is followed by [`keep`]: layers hold what a roll-back may need.

        Called after the prompt, which would otherwise be stored whole in every sliding layer and is too long to be a block.
        """
        for layer in self.attention_layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        for block in self._blocks:
            block.install()
        self._is_recording = True

    def __enter__(self) -> "RollbackCache":
        """The model is as it was after leaving."""
        return self

    def __exit__(self, *exception) -> None:
        if self._is_recording:
            for block in self._blocks:
                block.remove()
            self._is_recording = False

    def keep(self, num_new: int, kept: list[int], num_behind: int = 0) -> None:
        """
        Forgets what the last forward added beyond the kept tokens of each row.

        Args:
            num_new (`int`): tokens that the forward added to each row, those behind not counted.
            kept (`list[int]`): leading ones of them to keep, for each row, at least one.
            num_behind (`int`, *optional*, defaults to 0): further tokens behind them that every row forgets (a drafter's
                slots behind its context).
        """
        if self._blocks:
            places = upload(kept, self._blocks[0].layer.device)
            for block in self._blocks:
                block.keep(places)
        self.row_lengths = [length + count for length, count in zip(self.row_lengths, kept, strict=True)]
        if len(kept) == 1:
            for layer in self.attention_layers:
                _forget(layer, num_new - kept[0] + num_behind)
        else:
            surplus = torch.tensor([num_new - count + num_behind for count in kept])
            for layer in self.attention_layers:
                _align_right(layer, surplus, max(self.row_lengths))

    def keep_path(self, path: list[int]) -> None:
        """
        Keeps some of the tokens that the last forward added, as a tree of drafts needs it. One row, full attention only.

        Args:
            path (`list[int]`): places of those to keep, rising.
        """
        start = self.row_lengths[0]
        places = torch.tensor([*range(start), *(start + place for place in path)])
        on_device = {
            device: upload(places, device) for device in {layer.keys.device for layer in self.attention_layers}
        }
        for layer in self.attention_layers:
            index = on_device[layer.keys.device]
            layer.keys, layer.values = layer.keys.index_select(2, index), layer.values.index_select(2, index)
        self.row_lengths[0] += len(path)

    def check_full_attention(self) -> None:
        """
        Raises:
            `ValueError`: if a layer is not full attention, naming what it is.
        """
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is not DynamicLayer:
                raise ValueError(
                    f"Tree verification needs full attention in every layer of the target; layer {index} of its cache is a "
                    f"{type(layer).__name__}. Leave `tree_budget` out."
                )

    def select_rows(self, rows: list[int]) -> None:
        """Drops every row of the batch but these, and the padding that none of them needs."""
        self.row_lengths = [self.row_lengths[row] for row in rows]
        longest = max(self.row_lengths)
        for layer in self.attention_layers:
            stored = _stored_keys(layer, longest)
            index = upload(rows, layer.keys.device)
            layer.keys, layer.values = layer.keys[index, :, -stored:], layer.values[index, :, -stored:]
        for layer in self.recurrent_layers.values():
            layer.reorder_cache(torch.tensor(rows))

    def attention_mask(self, num_new: int, device: torch.device) -> torch.Tensor | None:
        """
        The mask of a forward that adds `num_new` tokens: 2-D, `[B, cached + num_new]`, where something is padding; else the
        one that attention adds to its scores, where the model takes it, or `None`.
        """
        longest = max(self.row_lengths)
        if min(self.row_lengths) == longest:
            if num_new == 1 or not self._takes_causal_mask:
                return None
            dtype = self.attention_layers[0].keys.dtype
            shape = (1, 1, num_new, round_up(longest + num_new))
            hidden = torch.full(shape, torch.finfo(dtype).min, dtype=dtype, device=device).triu(longest + 1)
            return hidden[..., : longest + num_new]
        padding = longest - torch.tensor(self.row_lengths)
        return upload((torch.arange(longest + num_new) >= padding[:, None]).long(), device)

    def next_positions(self, num_new: int, device: torch.device) -> torch.Tensor:
        """Positions, `[B, num_new]`, of the tokens that a forward adds."""
        if len(self.row_lengths) == 1:
            return torch.arange(self.row_lengths[0], self.row_lengths[0] + num_new, device=device)[None]
        return upload(torch.tensor(self.row_lengths)[:, None] + torch.arange(num_new), device)


def name_of_cache(model) -> str:
    """The argument of `model` that takes its cache: transformers 5.18 renamed `past_key_values`, model by model."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def upload(values: torch.Tensor | list[int], device: torch.device) -> torch.Tensor:
    """Host values on a device. The host goes on: a plain copy would wait for everything that the device has still to do."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def round_up(length: int) -> int:
    """The width to give a mask of so many keys: kernels copy one whose rows do not begin at multiples of 16, at every layer."""
    return -(-length // 16) * 16


def _takes_causal_mask(model, cache: Cache) -> bool:
    """
    Whether one additive mask serves all attention layers. The mask that the model would make is boolean, and every layer
    would turn it into the additive one anew.
    """
    config = model.config.get_text_config(decoder=True)
    return (
        config._attn_implementation == "sdpa"
        and {type(layer) for layer in cache.layers} in ({DynamicLayer}, {DynamicLayer, LinearAttentionLayer})
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "linear_attention"}
        # Falcon makes position biases out of a 2-D mask.
        and not getattr(config, "alibi", False)
    )


def _sort_layers(cache: Cache, num_rows: int) -> tuple[list[DynamicLayer], dict[int, LinearAttentionLayer]]:
    attention_layers, recurrent_layers = [], {}
    for index, layer in enumerate(cache.layers):
        # Exact classes: subclasses (quantized, indexed) keep more than keys and values.
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            attention_layers.append(layer)
        # Rows of different lengths a static layer cannot line up.
        elif type(layer) is StaticLayer and num_rows == 1:
            attention_layers.append(layer)
        elif type(layer) is LinearAttentionLayer:
            recurrent_layers[index] = layer
        elif type(layer).__name__ != "DummyLayer":
            raise ValueError(
                f"Layer {index} of the cache is a {type(layer).__name__}, which cannot be rolled back to an accepted token: "
                "use the default dynamic cache (no `cache_implementation`, no cache of your own)."
            )
    return attention_layers, recurrent_layers


def _find_mixers(model, recurrent_layers: dict[int, LinearAttentionLayer]) -> list[torch.nn.Module]:
    mixers = []
    for index in recurrent_layers:
        layer = model.get_decoder().layers[index]
        named = [m for m in layer.children() if type(m).__name__ in KNOWN_MIXERS]
        if len(named) != 1:
            kinds = [type(m).__name__ for m in layer.children() if hasattr(m, "layer_idx")] or [type(layer).__name__]
            raise ValueError(
                f"Layer {index} of {type(model).__name__} ({', '.join(kinds)}) keeps a recurrent state that is not known to "
                f"continue over several tokens. Known ones: {', '.join(KNOWN_MIXERS)}."
            )
        mixers.append(named[0])
    return mixers


def _forget(layer: DynamicLayer | StaticLayer, count: int) -> None:
    """Drops the last `count` keys of a layer with one row."""
    if isinstance(layer, StaticLayer):
        # It overwrites what it forgets. transformers 5.17 has no `crop` for it.
        layer.cumulative_length.sub_(count)
    else:
        layer.crop(-count)


def _align_right(layer: DynamicLayer, surplus: torch.Tensor, length: int) -> None:
    """Drops the last `surplus` keys of each row and lines the rows up at their ends; the longest has `length` tokens."""
    stored = _stored_keys(layer, length)
    ends = layer.keys.shape[2] - surplus
    index = (ends[:, None] - stored + torch.arange(stored)).clamp(min=0)
    index = upload(index, layer.keys.device)[:, None, :, None]
    layer.keys = layer.keys.gather(2, index.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
    layer.values = layer.values.gather(2, index.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))


def _stored_keys(layer: DynamicLayer, length: int) -> int:
    """How many keys a layer holds between forwards after `length` tokens, which is noted where the layer counts them."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return length
    layer.cumulative_length = length
    return min(length, layer.sliding_window - 1)
