# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Targets onto the devices that the plan gives them."""

import copy

from ..target.frozen_target import FrozenTarget
from .adapters import apply_target_adapter


def load_targets(
    target,
    layer_ids: list[int],
    places: list[str],
    *,
    dtype="auto",
    adapter: str | None = None,
    merge_adapter: bool = True,
) -> list[FrozenTarget]:
    """Puts one copy of the target on each place.

    Args:
        target (`PreTrainedModel` or `str`): the target, or where it is loaded from.
        layer_ids (`list[int]`): layers to capture.
        places (`list[str]`): of [`place_targets`]: a device, or several joined by `+` over which the target is sharded.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`): of the weights, if the target is loaded here.
        adapter (`str`, *optional*): a PEFT adapter that the target is served with.
        merge_adapter (`bool`, *optional*, defaults to `True`): see [`apply_target_adapter`].

    Raises:
        `ValueError`: if a model that is loaded already shall be sharded.
    """
    return [
        FrozenTarget(_place(target, place, dtype, adapter, merge_adapter, is_copy=number > 0), layer_ids)
        for number, place in enumerate(places)
    ]


def _place(target, place: str, dtype, adapter, merge_adapter, is_copy: bool):
    devices = place.split("+")
    if isinstance(target, str):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, **_placement(devices))
    elif len(devices) > 1:
        raise ValueError(f"A target that is loaded already cannot be sharded over {place}: pass its name instead.")
    else:
        model = (copy.deepcopy(target) if is_copy else target).to(devices[0])
    return model if adapter is None else apply_target_adapter(model, adapter, merge_adapter)


def _placement(devices: list[str]) -> dict:
    """Straight to its devices: a 27B target would not fit twice into the host's memory."""
    if len(devices) == 1:
        return {"device_map": {"": devices[0]}}
    import torch

    # Every other device is closed; what is free on these is shared evenly by "balanced".
    wanted = {torch.device(device).index for device in devices}
    memory = {i: torch.cuda.mem_get_info(i)[0] if i in wanted else 0 for i in range(torch.cuda.device_count())}
    return {"device_map": "balanced", "max_memory": memory}
