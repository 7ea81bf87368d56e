# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Muon for matrices, AdamW for the rest, as one optimizer."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn


# Five steps of a quintic iteration (https://kellerjordan.github.io/posts/muon) bring singular values near 1.
_NUM_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# Small matrices leave a GPU waiting for launches. Large ones keep it busy one by one: a batch of so many elements
# takes about as much memory as one matrix of 17408 x 5120, the largest of a drafter for a target of 27B.
_MAX_BATCH_ELEMENTS = 2**26


def orthogonalize(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest matrices whose singular values are about 1 (0.7 to 1.2).

    Args:
        matrices (`torch.Tensor` of shape `[M, N]` or `[num_matrices, M, N]`): what the momentum wants.
        dtype (`torch.dtype`): in which it is computed and returned.
    """
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # Never in place: without a change of type these would be the caller's matrices.
    result = (matrices.mT if is_tall else matrices).to(dtype)
    result = result / torch.linalg.vector_norm(result, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_NUM_STEPS):
        gram = result @ result.mT
        result = add_product(result, add_product(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if is_tall else result


def _orthogonalize_together(matrices: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """[`orthogonalize`] of matrices of shape `[M, N]` or `[N, M]`, as one batch."""
    if len(matrices) == 1:
        return [orthogonalize(matrices[0], dtype)]
    are_tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    batch = torch.stack([matrix.mT if is_tall else matrix for matrix, is_tall in zip(matrices, are_tall, strict=True)])
    # Back in the weights' type at once: foreach operations on mixed types go matrix by matrix.
    results = orthogonalize(batch, dtype).to(batch.dtype).unbind()
    return [result.mT if is_tall else result for result, is_tall in zip(results, are_tall, strict=True)]


def _num_together(matrix: torch.Tensor) -> int:
    # A CPU gains nothing from batches (six of 576 x 1536: 1.27 s one by one, 1.30 s together) and rounds otherwise in
    # them: in fp32 with matrices of one row, and with tall ones, which a batch copies transposed.
    return 1 if matrix.is_cpu else max(1, _MAX_BATCH_ELEMENTS // matrix.numel())


def _batches(matrices: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Matrices of one shape or its transpose, as many together as pays."""
    alike = defaultdict(list)
    for matrix in matrices:
        alike[matrix.device, matrix.dtype, *sorted(matrix.shape)].append(matrix)
    for members in alike.values():
        size = _num_together(members[0])
        for start in range(0, len(members), size):
            yield members[start : start + size]


class Muon(torch.optim.Optimizer):
    """
    Momentum, orthogonalized; updates as large as AdamW's would be (0.2 a weight), so that both take one learning rate.

    The same as `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`, which computes in bf16 everywhere: a CPU
    without bf16 instructions takes 20 times longer for that. Here a CPU computes in the weights' own type, and a GPU
    takes matrices of one shape together.

    Args:
        params: matrices.
        lr (`float`): learning rate.
        weight_decay (`float`, *optional*, defaults to 0.0): decoupled.
        momentum (`float`, *optional*, defaults to 0.95): of Nesterov's kind.
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.is_lost: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for matrices in _batches(matrix for matrix in group["params"] if matrix.grad is not None):
                self._update(matrices, group["lr"], group["weight_decay"], group["momentum"])
        return loss

    def _update(self, matrices: list[torch.Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        gradients = [matrix.grad for matrix in matrices]
        buffers = [self._momentum_buffer(matrix) for matrix in matrices]
        if self.is_lost is not None:
            # Momentum goes on as it is if it is given itself.
            pairs = zip(buffers, gradients, strict=True)
            gradients = [torch.where(self.is_lost, buffer, gradient) for buffer, gradient in pairs]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        wanted = torch._foreach_lerp(gradients, buffers, momentum)
        first = matrices[0]
        updates = _orthogonalize_together(wanted, torch.bfloat16 if first.is_cuda else first.dtype)
        decay = 1 - lr * weight_decay
        if self.is_lost is not None:
            decay = torch.where(self.is_lost, 1.0, decay).to(first.dtype)
            torch._foreach_mul_(updates, (~self.is_lost).to(updates[0].dtype))
        torch._foreach_mul_(matrices, decay)
        torch._foreach_add_(matrices, updates, alpha=-lr * 0.2 * max(first.shape) ** 0.5)

    def _momentum_buffer(self, matrix: torch.Tensor) -> torch.Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
        return state["momentum_buffer"]


class MuonWithAdamW(torch.optim.Optimizer):
    """
    [`Muon`] on the matrices of a model and AdamW on its vectors, behind one schedule and one state.

    Args:
        model (`nn.Module`): whose trainable parameters are optimized.
        lr (`float`): learning rate.
        weight_decay (`float`): of the matrices.
        betas (`tuple[float, float]`), eps (`float`): of AdamW.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float], eps: float):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trainable if parameter.dim() == 2]
        vectors = [parameter for parameter in trainable if parameter.dim() != 2]
        self.parts: list[torch.optim.Optimizer] = [Muon(matrices, lr=lr, weight_decay=weight_decay)]
        if vectors:
            # Fused, it can be told on the device that a step is lost.
            self.parts.append(torch.optim.AdamW(vectors, lr=lr, weight_decay=0.0, betas=betas, eps=eps, fused=True))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dicts of the parts, so that a schedule that changes a group reaches the part.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def pass_over(self, is_lost: torch.Tensor) -> None:
        """The next step leaves weights and state as they are where `is_lost` holds; the host does not learn of it.

        Args:
            is_lost (`torch.Tensor` of one element, bool): on the device of the weights.
        """
        muon, *adamw = self.parts
        muon.is_lost = is_lost
        for part in adamw:
            part.found_inf = is_lost.float()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
