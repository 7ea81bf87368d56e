# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Cross-entropy over a large vocabulary in one Triton kernel: loss, most likely token and gradient, in place.

One program takes one row: it reads the row once for the largest logit, its token and the sum of exponentials (kept online,
in fp32), and once more to put the gradient where the logits were. In PyTorch the same takes about ten passes, most of them
over fp32 copies. The plain form is `_score` in losses.py.

For a head in FP8 the gradient goes into a second matrix, in e4m3. What the first reading finds is enough to scale it by: the
largest of the probabilities other than the label's, whose entry is kept apart.
"""

import torch
import triton
import triton.language as tl

from .fp8_head import Fp8Gradient


# Logits that a program reads at once, and its warps.
_BLOCK, _NUM_WARPS = 8192, 16
_LARGEST_FP8 = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


@triton.jit
def _finish(x, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    x = x * scale
    if HAS_SOFTCAP:
        # tanh, which Triton has no portable form of.
        x = softcap * (1 - 2 / (tl.exp(2 * x / softcap) + 1))
    return x


@triton.jit
def _cross_entropy_kernel(
    projected,
    labels,
    losses,
    predictions,
    gradients,
    gradient_scales,
    at_labels,
    row_stride,
    gradient_stride,
    vocab_size,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    IN_FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    projected += row * row_stride
    gradients += row * gradient_stride
    label = tl.load(labels + row)
    label_logit = _finish(tl.load(projected + label).to(tl.float32), scale, softcap, HAS_SOFTCAP)

    largest = -float("inf")
    largest_other = -float("inf")
    total = 0.0
    token = 0
    for start in range(0, vocab_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab_size
        x = _finish(tl.load(projected + index, mask=inside, other=0.0).to(tl.float32), scale, softcap, HAS_SOFTCAP)
        x = tl.where(inside, x, -float("inf"))
        block_largest, block_token = tl.max(x, axis=0, return_indices=True)
        token = tl.where(block_largest > largest, start + block_token, token)
        new_largest = tl.maximum(largest, block_largest)
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), axis=0)
        largest = new_largest
        if IN_FP8:
            largest_other = tl.maximum(largest_other, tl.max(tl.where(index == label, -float("inf"), x), axis=0))
    log_normalizer = largest + tl.log(total)
    tl.store(losses + row, log_normalizer - label_logit)
    tl.store(predictions + row, token.to(tl.int64))

    if WRITE_GRADIENT:
        if IN_FP8:
            at_label = tl.exp(label_logit - log_normalizer) - 1
            if HAS_SOFTCAP:
                at_label = at_label * (1 - (label_logit / softcap) * (label_logit / softcap))
            tl.store(at_labels + row, at_label * scale)
            tl.store(gradient_scales + row, tl.exp(largest_other - log_normalizer) / _LARGEST_FP8 * scale)
        for start in range(0, vocab_size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < vocab_size
            x = tl.load(projected + index, mask=inside, other=0.0).to(tl.float32)
            x = _finish(x, scale, softcap, HAS_SOFTCAP)
            if IN_FP8:
                gradient = tl.where(index == label, 0.0, _LARGEST_FP8 * tl.exp(x - largest_other))
            else:
                gradient = tl.exp(x - log_normalizer) - tl.where(index == label, 1.0, 0.0)
            if HAS_SOFTCAP:
                gradient = gradient * (1 - (x / softcap) * (x / softcap))
            if not IN_FP8:
                gradient = gradient * scale
            tl.store(gradients + index, gradient.to(gradients.dtype.element_ty), mask=inside)


def cross_entropy_in_place(
    projected: torch.Tensor,
    labels: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    write_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and predictions of some slots; their logits become the gradient by the projected hidden states.

    Args:
        projected (`torch.Tensor` of shape `[R, V]`, bf16, fp16 or fp32): of `LanguageHead.project`; overwritten.
        labels (`torch.Tensor` of shape `[R]`, int64): tokens of the vocabulary.
        scale (`float`, *optional*, defaults to 1.0), softcap (`float`, *optional*): of the head.
        write_gradient (`bool`, *optional*, defaults to `True`): whether `projected` is overwritten.

    Returns:
        `(losses, predictions)`: `[R]` in fp32, and `[R]` in int64, the lowest of equally likely tokens.
    """
    return _launch(projected, labels, scale, softcap, write_gradient, None)


def cross_entropy_to_fp8(
    projected: torch.Tensor,
    labels: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    write_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, Fp8Gradient | None]:
    """Losses, predictions and the gradient of some slots, see [`cross_entropy_in_place`]; `projected` stays as it is.

    Returns:
        `(losses, predictions, gradient)`: the gradient as [`Fp8Head`] takes it, if it is asked for.
    """
    gradient = Fp8Gradient.empty(labels, projected.shape[1]) if write_gradient else None
    losses, predictions = _launch(projected, labels, scale, softcap, write_gradient, gradient)
    return losses, predictions, gradient


def _launch(projected, labels, scale, softcap, write_gradient, fp8_gradient):
    rows, vocab_size = projected.shape
    losses = torch.empty(rows, device=projected.device, dtype=torch.float32)
    predictions = torch.empty(rows, device=projected.device, dtype=torch.long)
    gradients = projected if fp8_gradient is None else fp8_gradient.values
    if rows:
        _cross_entropy_kernel[(rows,)](
            projected,
            labels,
            losses,
            predictions,
            gradients,
            # Not read without FP8.
            losses if fp8_gradient is None else fp8_gradient.scales,
            losses if fp8_gradient is None else fp8_gradient.at_labels,
            projected.stride(0),
            gradients.stride(0),
            vocab_size,
            scale,
            softcap or 1.0,
            HAS_SOFTCAP=softcap is not None,
            WRITE_GRADIENT=write_gradient,
            IN_FP8=fp8_gradient is not None,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=_NUM_WARPS,
        )
    return losses, predictions
