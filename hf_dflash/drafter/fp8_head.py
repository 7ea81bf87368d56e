# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The target's language head in FP8, for the two products of the drafter's cross-entropy.

FP8 products on Hopper read both operands along the summed dimension, so there are two copies of the weights in e4m3: `W`
with a scale for each token, and `W^T` with a scale for each hidden column. Together they take what the head takes in bf16.

The gradient by the logits is softmax minus one-hot. Its label's entry is by far the largest, so rounding it costs more than
rounding all others: it is kept apart, and its row of the head is added as it is. The others are probabilities, in e4m3 with a
scale for each slot. `benchmarks/fp8_head.py` measures what is left of the error, and e5m2 next to it.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..target.fp8 import check_fp8_device, multiply_in_fp8, round_to_fp8
from ..target.language_head import LanguageHead


_PIECE_ELEMENTS = 1 << 26


class Fp8Gradient(NamedTuple):
    """
    The gradient by [`~LanguageHead.project`] of R slots.

    Args:
        values (`torch.Tensor` of shape `[R, V]`, e4m3): 0 at the labels.
        scales (`torch.Tensor` of shape `[R, 1]`): what `values` are multiplied by.
        labels (`torch.Tensor` of shape `[R]`, int64): the tokens that are kept apart.
        at_labels (`torch.Tensor` of shape `[R]`): their entries.
    """

    values: torch.Tensor
    scales: torch.Tensor
    labels: torch.Tensor
    at_labels: torch.Tensor

    @classmethod
    def empty(cls, labels: torch.Tensor, vocab_size: int) -> "Fp8Gradient":
        """For a kernel to write into."""
        rows, device = labels.shape[0], labels.device
        return cls(
            torch.empty(rows, vocab_size, device=device, dtype=torch.float8_e4m3fn),
            torch.empty(rows, 1, device=device, dtype=torch.float32),
            labels,
            torch.empty(rows, device=device, dtype=torch.float32),
        )

    @classmethod
    def round(cls, gradient: torch.Tensor, labels: torch.Tensor) -> "Fp8Gradient":
        """Of a whole gradient, `[R, V]`."""
        at_labels = gradient.gather(1, labels[:, None])
        values, scales = round_to_fp8(gradient.scatter(1, labels[:, None], 0.0))
        return cls(values, scales, labels, at_labels.squeeze(1).float())


@dataclass
class Fp8Head(LanguageHead):
    """
    A [`LanguageHead`] whose products run in FP8, on a CPU with the same numbers and no FP8 arithmetic. Logits come out in
    bf16; bias, scale and soft-cap are applied as ever. It takes cross-entropy only.

    Raises:
        `ValueError`: if the device has no FP8 arithmetic, or takes no products of these sizes.
    """

    is_fp8: ClassVar[bool] = True

    def __post_init__(self):
        check_fp8_device(self.weight.device)
        if self.weight.is_cuda and any(size % 16 for size in self.weight.shape):
            raise ValueError(
                f"A head of shape {list(self.weight.shape)} has no products in FP8: both must be multiples of 16."
            )
        self.by_token = _round_in_pieces(self.weight)
        self.by_column = _round_in_pieces(self.weight.t())

    @classmethod
    def from_head(cls, head: LanguageHead) -> "Fp8Head":
        """Shares the weights of a head, whose rows at the labels are still needed."""
        return cls(head.weight, head.bias, head.scale, head.softcap)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> h W^T + b, `[R, V]` in bf16."""
        projected = multiply_in_fp8(*round_to_fp8(hidden_states), *self.by_token, torch.bfloat16)
        return projected if self.bias is None else projected.add_(self.bias)

    def unfinish(self, logits: torch.Tensor, grad_logits: torch.Tensor, labels: torch.Tensor) -> Fp8Gradient:
        return Fp8Gradient.round(super().unfinish(logits, grad_logits, labels), labels)

    def multiply_gradient(self, gradient: Fp8Gradient) -> torch.Tensor:
        """g W, `[R, H]` in fp32."""
        # A sum over the whole vocabulary: not in the tensor cores' own registers, which hold about 14 bits.
        product = multiply_in_fp8(
            gradient.values, gradient.scales, *self.by_column, torch.bfloat16, use_fast_accum=False
        )
        return product.float().addcmul_(gradient.at_labels[:, None], self.weight[gradient.labels].float())


def _round_in_pieces(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[`round_to_fp8`] without a copy of the whole matrix in fp32."""
    values = torch.empty(matrix.shape, device=matrix.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(matrix.shape[0], 1, device=matrix.device, dtype=torch.float32)
    height = max(1, _PIECE_ELEMENTS // matrix.shape[1])
    for start in range(0, matrix.shape[0], height):
        rows = slice(start, start + height)
        values[rows], scales[rows] = round_to_fp8(matrix[rows])
    return values, scales
