# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Cross-entropy over a large vocabulary in one Triton kernel: loss, most likely token and gradient, in place.

One program takes one row: it reads the row once for the largest logit, its token and the sum of exponentials (kept online,
in fp32), and once more to put the gradient where the logits were. In PyTorch the same takes about ten passes, most of them
over fp32 copies. The plain form is `_score` in losses.py.
"""

import torch
import triton
import triton.language as tl


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
    row_stride,
    vocab_size,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    projected += row * row_stride
    label = tl.load(labels + row)
    label_logit = _finish(tl.load(projected + label).to(tl.float32), scale, softcap, HAS_SOFTCAP)

    largest = -float("inf")
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
    log_normalizer = largest + tl.log(total)
    tl.store(losses + row, log_normalizer - label_logit)
    tl.store(predictions + row, token.to(tl.int64))

    if WRITE_GRADIENT:
        for start in range(0, vocab_size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            inside = index < vocab_size
            x = tl.load(projected + index, mask=inside, other=0.0).to(tl.float32)
            x = _finish(x, scale, softcap, HAS_SOFTCAP)
            gradient = tl.exp(x - log_normalizer) - tl.where(index == label, 1.0, 0.0)
            if HAS_SOFTCAP:
                gradient = gradient * (1 - (x / softcap) * (x / softcap))
            gradient = gradient * scale
            tl.store(projected + index, gradient.to(projected.dtype.element_ty), mask=inside)


def cross_entropy_in_place(
    projected: torch.Tensor,
    labels: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
    write_gradient: bool = True,
    *,
    block: int = 8192,
    num_warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and predictions of some slots; their logits become the gradient by the projected hidden states.

    Args:
        projected (`torch.Tensor` of shape `[R, V]`, bf16, fp16 or fp32): of `LanguageHead.project`; overwritten.
        labels (`torch.Tensor` of shape `[R]`, int64): tokens of the vocabulary.
        scale (`float`, *optional*, defaults to 1.0), softcap (`float`, *optional*): of the head.
        write_gradient (`bool`, *optional*, defaults to `True`): whether `projected` is overwritten.
        block (`int`, *optional*, defaults to 8192), num_warps (`int`, *optional*, defaults to 16): of the kernel.

    Returns:
        `(losses, predictions)`: `[R]` in fp32, and `[R]` in int64, the lowest of equally likely tokens.
    """
    rows, vocab_size = projected.shape
    losses = torch.empty(rows, device=projected.device, dtype=torch.float32)
    predictions = torch.empty(rows, device=projected.device, dtype=torch.long)
    if rows:
        _cross_entropy_kernel[(rows,)](
            projected,
            labels,
            losses,
            predictions,
            projected.stride(0),
            vocab_size,
            scale,
            softcap or 1.0,
            HAS_SOFTCAP=softcap is not None,
            WRITE_GRADIENT=write_gradient,
            BLOCK=min(block, triton.next_power_of_2(vocab_size)),
            num_warps=num_warps,
        )
    return losses, predictions
