# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""FP8 for a frozen target: its layers' matrices in e4m3, a scale for each output; inputs are rounded as they come, a scale for
each token. The products run at about twice the rate of bf16 on Hopper, and the matrices take half the memory.

Features and labels change a little; `benchmarks/target_forward.py` measures how many labels.
"""

import torch
from torch import nn

from .gated_delta_net import separate_projections


_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def round_to_fp8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[M, K]` -> `(e4m3 of shape [M, K], scales of shape [M, 1] in fp32)`, so that each row's largest value is the largest
    of e4m3."""
    # A product: where a GPU divides by a number it takes the product with its inverse, and a CPU would round otherwise.
    scales = states.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) * (1 / _LARGEST)
    return (states.float() / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def multiply_in_fp8(
    states: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """The product of what [`round_to_fp8`] made of two matrices, `[M, K]` and `[N, K]`.

    Args:
        states (`torch.Tensor` of shape `[M, K]`), scales (`torch.Tensor` of shape `[M, 1]`): the one.
        weight (`torch.Tensor` of shape `[N, K]`), weight_scales (`torch.Tensor` of shape `[N, 1]`): the other.
        dtype (`torch.dtype`): of the product.
        use_fast_accum (`bool`, *optional*, defaults to `True`): whether long sums may stay in the tensor cores, which hold
            fewer bits than fp32.

    Returns:
        `torch.Tensor` of shape `[M, N]`.
    """
    if states.is_cuda:
        return torch._scaled_mm(
            states,
            weight.t(),
            scale_a=scales,
            scale_b=weight_scales.t(),
            out_dtype=dtype,
            use_fast_accum=use_fast_accum,
        )
    # The same numbers where there is no FP8 arithmetic; what autocast rounds to bf16 is exact in it.
    return ((states.float() @ weight.float().t()) * scales * weight_scales.t()).to(dtype)


def check_fp8_device(device: torch.device) -> None:
    """
    Raises:
        `ValueError`: if the device is a GPU without FP8 arithmetic.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has no FP8 arithmetic, which takes compute capability 8.9: leave out "
            "`head_fp8` and `target_fp8`."
        )


class Fp8Linear(nn.Module):
    """
    A frozen `nn.Linear` in FP8.

    Args:
        linear (`nn.Linear`): its weights are rounded, and not kept.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scales = round_to_fp8(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` -> `[..., out_features]` in the same dtype."""
        dtype = hidden_states.dtype
        states, scales = round_to_fp8(hidden_states.reshape(-1, self.in_features))
        out = multiply_in_fp8(states, scales, self.weight, self.scales, dtype)
        if self.bias is not None:
            out = out + self.bias.to(dtype)
        return out.view(*hidden_states.shape[:-1], self.out_features)


def quantize_to_fp8(decoder: nn.Module, smallest: int = 1024) -> int:
    """Puts the large matrices of a decoder's layers into FP8, in place.

    Args:
        decoder (`nn.Module`): with `layers`; of a frozen model.
        smallest (`int`, *optional*, defaults to 1024): narrower matrices (gates, say) stay as they are: they cost little.

    Returns:
        `int`: how many matrices were changed.

    Raises:
        `ValueError`: if the device has no FP8 arithmetic.
    """
    check_fp8_device(next(decoder.parameters()).device)
    changed = 0
    for module in list(decoder.layers.modules()):
        separate_projections(module)
        for name, child in list(module.named_children()):
            shape = (getattr(child, "in_features", 0), getattr(child, "out_features", 0))
            if type(child) is nn.Linear and min(shape) >= smallest and not any(size % 16 for size in shape):
                setattr(module, name, Fp8Linear(child))
                changed += 1
    return changed
