# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Roll-back of a cache to the last accepted token, row by row.

Verifying a block writes all its tokens into the target's cache; the rejected ones must leave no trace. Attention layers
forget keys from the end. Recurrent layers (gated delta net) cannot: their states are copied before the block and, after a
rejection, restored and advanced over the accepted tokens. Only the recurrent mixers run again, on the inputs that they had
in the verify pass: these depend on earlier tokens alone, so they are right for every accepted one.

Rows of a batch accept different numbers of tokens. They stay aligned on the right, with padding on the left, because
recurrent layers and sliding windows read positions off the order of keys.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)


# Recurrent mixers that continue from a cached state over several tokens at once, as verifying needs. Others start anew
# when they see more than one token, or have no torch form to test against.
_REPLAYABLE_MIXERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")


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
        self._mixers = _find_mixers(model, self.recurrent_layers) if self.recurrent_layers else {}
        self._mixer_inputs: dict[int, tuple] = {}
        self._snapshot: dict[int, tuple] = {}
        self._handles: list = []

    def record(self) -> None:
        """From now on every forward is followed by [`keep`]: windows hold what a roll-back may need.

        Called after the prompt, which would otherwise be stored whole in every sliding layer.
        """
        for layer in self.attention_layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()

    def __enter__(self) -> "RollbackCache":
        """Watches what the recurrent mixers are given. Once for a whole generation: compiled code would be compiled anew if
        hooks came and went."""
        for index, mixer in self._mixers.items():
            self._handles.append(mixer.register_forward_pre_hook(self._make_hook(index), with_kwargs=True))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._mixer_inputs.clear()

    def _make_hook(self, index: int):
        def hook(module, arguments, keywords):
            self._mixer_inputs[index] = (arguments, keywords)

        return hook

    def snapshot(self) -> None:
        """Copies the recurrent states, so that [`keep`] can go back to them."""
        self._snapshot = {
            index: (_clone(layer.conv_states), _clone(layer.recurrent_states))
            for index, layer in self.recurrent_layers.items()
        }

    def keep(self, num_new: int, kept: list[int], num_behind: int = 0) -> None:
        """
        Forgets what the last forward added beyond the kept tokens of each row.

        Args:
            num_new (`int`): tokens that the forward added to each row, those behind not counted.
            kept (`list[int]`): leading ones of them to keep, for each row, at least one.
            num_behind (`int`, *optional*, defaults to 0): further tokens behind them that every row forgets (a drafter's
                slots behind its context).
        """
        self._restore_recurrent_layers(num_new, kept)
        self.row_lengths = [length + count for length, count in zip(self.row_lengths, kept, strict=True)]
        if len(kept) == 1:
            for layer in self.attention_layers:
                layer.crop(-(num_new - kept[0] + num_behind))
        else:
            surplus = torch.tensor([num_new - count + num_behind for count in kept])
            for layer in self.attention_layers:
                _align_right(layer, surplus, max(self.row_lengths))

    def keep_path(self, num_new: int, path: list[int]) -> None:
        """
        Keeps some of the tokens that the last forward added, as a tree of drafts needs it. One row, full attention only.

        Args:
            num_new (`int`): tokens that were added.
            path (`list[int]`): places of those to keep, rising.
        """
        for layer in self.attention_layers:
            start = layer.keys.shape[2] - num_new
            index = upload([*range(start), *(start + place for place in path)], layer.keys.device)
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

    def _restore_recurrent_layers(self, num_new: int, kept: list[int]) -> None:
        # Rows that keep everything have the right state already.
        groups = {count: [r for r, c in enumerate(kept) if c == count] for count in set(kept) if count < num_new}
        for index, layer in self.recurrent_layers.items():
            inputs = self._mixer_inputs.pop(index)
            for count, rows in groups.items():
                self._replay(index, layer, inputs, count, rows if len(rows) < len(kept) else None)
        self._snapshot.clear()
        self._mixer_inputs.clear()

    def _replay(
        self, index: int, layer: LinearAttentionLayer, inputs: tuple, count: int, rows: list[int] | None
    ) -> None:
        arguments, keywords = inputs
        held = (layer.conv_states, layer.recurrent_states)
        picked = tuple(_pick(states, rows) for states in self._snapshot[index])
        layer.conv_states, layer.recurrent_states = picked
        # The mixer finds its states through the cache, so it works on the picked rows without knowing.
        self._mixers[index](
            *(_cut(argument, count, rows) for argument in arguments),
            **{name: _cut(value, count, rows) for name, value in keywords.items()},
        )
        # Copied and not assigned: compiled code and CUDA graphs hold on to the addresses.
        for states, replayed in zip(held, picked, strict=True):
            for key, state in states.items():
                if state is not None and rows is None:
                    state.copy_(replayed[key])
                elif state is not None:
                    state[upload(rows, state.device)] = replayed[key]
        layer.conv_states, layer.recurrent_states = held

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
        """The 2-D mask, `[B, cached + num_new]`, of a forward that adds `num_new` tokens; `None` where nothing is padding."""
        longest = max(self.row_lengths)
        if min(self.row_lengths) == longest:
            return None
        padding = longest - torch.tensor(self.row_lengths)
        return upload((torch.arange(longest + num_new) >= padding[:, None]).long(), device)

    def next_positions(self, num_new: int, device: torch.device) -> torch.Tensor:
        """Positions, `[B, num_new]`, of the tokens that a forward adds."""
        return upload(torch.tensor(self.row_lengths)[:, None] + torch.arange(num_new), device)


def upload(values: torch.Tensor | list[int], device: torch.device) -> torch.Tensor:
    """Host values on a device. The host goes on: a plain copy would wait for everything that the device has still to do."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def _sort_layers(cache: Cache, num_rows: int) -> tuple[list[DynamicLayer], dict[int, LinearAttentionLayer]]:
    attention_layers, recurrent_layers = [], {}
    for index, layer in enumerate(cache.layers):
        # Exact classes: subclasses (quantized, indexed) keep more than keys and values.
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            attention_layers.append(layer)
        # A static layer overwrites what it forgets. Rows of different lengths it cannot line up; 5.17 cannot crop it.
        elif type(layer) is StaticLayer and num_rows == 1 and hasattr(layer, "crop"):
            attention_layers.append(layer)
        elif type(layer) is LinearAttentionLayer:
            recurrent_layers[index] = layer
        elif type(layer).__name__ != "DummyLayer":
            raise ValueError(
                f"Layer {index} of the cache is a {type(layer).__name__}, which cannot be rolled back to an accepted token: "
                "use the default dynamic cache (no `cache_implementation`, no cache of your own)."
            )
    return attention_layers, recurrent_layers


def _find_mixers(model, recurrent_layers: dict[int, LinearAttentionLayer]) -> dict[int, torch.nn.Module]:
    mixers = {}
    for index in recurrent_layers:
        layer = model.get_decoder().layers[index]
        named = [m for m in layer.children() if type(m).__name__ in _REPLAYABLE_MIXERS]
        if len(named) != 1:
            kinds = [type(m).__name__ for m in layer.children() if hasattr(m, "layer_idx")] or [type(layer).__name__]
            raise ValueError(
                f"Layer {index} of {type(model).__name__} ({', '.join(kinds)}) keeps a recurrent state that is not known to "
                f"continue over several tokens. Known ones: {', '.join(_REPLAYABLE_MIXERS)}."
            )
        mixers[index] = named[0]
    return mixers


def _clone(states: dict) -> dict:
    return {key: None if state is None else state.clone() for key, state in states.items()}


def _pick(states: dict, rows: list[int] | None) -> dict:
    if rows is None:
        return states
    return {key: None if state is None else state[upload(rows, state.device)] for key, state in states.items()}


def _cut(value, count: int, rows: list[int] | None):
    """The first `count` tokens of the chosen rows of a mixer's `[B, length, ...]` argument."""
    if not isinstance(value, torch.Tensor):
        return value
    return value[:, :count] if rows is None else value[upload(rows, value.device), :count]


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
