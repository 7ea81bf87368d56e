# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where a drafter starts from: any drafter, or layers of its own target."""

import torch
from torch import nn

from ..drafter.modeling_dflash import DFlashForSpeculation
from ..hub.foreign_layouts import read_drafter


# Names of a drafter's layer that a Llama or Qwen layer has too.
_MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def load_drafter(name_or_path: str, target: str | None = None) -> DFlashForSpeculation:
    """A drafter to go on from: ours (an adapter on one is merged), or in a layout that `hf-dflash import` reads. In fp32: bf16
    masters lose small updates.

    Args:
        name_or_path (`str`): Hub id or folder.
        target (`str`, *optional*): the target's, for layouts that do not name it.

    Raises:
        `ValueError`: if it is no drafter that can be read, or not a whole one.
    """
    return read_drafter(name_or_path, target=target).float()


@torch.no_grad()
def initialize_from_target(drafter: DFlashForSpeculation, target) -> list[str]:
    """Copies the target's last layers into the drafter, whatever has the same shape, and its final norm.

    The target's last layers turn features into predictions, which is the drafter's task too. Of a hybrid target, whose
    attention has other shapes, it is MLPs and norms.

    Args:
        drafter ([`DFlashForSpeculation`]): changed in place.
        target (`PreTrainedModel`): the model behind the frozen target.

    Returns:
        `list[str]`: names of the drafter's parameters that were copied.

    Raises:
        `ValueError`: if nothing agrees, or the target has fewer layers.
    """
    decoder = target.get_decoder()
    if len(drafter.layers) > len(decoder.layers):
        raise ValueError(
            f"The drafter has {len(drafter.layers)} layers to be started from {type(target).__name__}, which has "
            f"{len(decoder.layers)}: give it fewer, or do without `init_from_target`."
        )
    copied = []
    for index, (layer, source) in enumerate(zip(drafter.layers, decoder.layers[-len(drafter.layers) :], strict=True)):
        for name in (*_MATRICES, *_MLP):
            if _copy(layer, source, name, lambda module: module.weight):
                copied.append(f"layers.{index}.{name}.weight")
        for name in _NORMS:
            if _copy(layer, source, name, _norm_scale):
                copied.append(f"layers.{index}.{name}.weight")
    if _copy(drafter, decoder, "norm", _norm_scale):
        copied.append("norm.weight")
    if not any("proj" in name for name in copied):
        raise ValueError(
            f"No matrix of {type(target).__name__}'s last layers has the drafter's shape: leave `intermediate_size` and the "
            "number of heads to the target, or do without `init_from_target`."
        )
    return copied


def _copy(drafter_module: nn.Module, target_module: nn.Module, name: str, read) -> bool:
    try:
        ours, theirs = drafter_module.get_submodule(name), target_module.get_submodule(name)
    except AttributeError:
        return False
    value = read(theirs)
    if value.shape != ours.weight.shape:
        return False
    ours.weight.copy_(value)
    return True


def _norm_scale(norm: nn.Module) -> torch.Tensor:
    """What an RMS norm multiplies by, whether it stores that or that minus one (Gemma, Qwen3.5)."""
    ones = torch.ones_like(norm.weight, dtype=torch.float32)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 0.0)
    return norm(ones).float() * (1 + eps) ** 0.5
