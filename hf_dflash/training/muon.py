# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Muon for matrices, AdamW for the rest, as one optimizer."""

import torch
from torch import nn


# Five steps of a quintic iteration (https://kellerjordan.github.io/posts/muon) bring singular values near 1.
_NUM_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest matrix whose singular values are about 1 (0.7 to 1.2).

    Args:
        matrix (`torch.Tensor` of shape `[M, N]`): what the momentum wants.
        dtype (`torch.dtype`): in which it is computed and returned.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    # Never in place: without a change of type this would be the caller's matrix.
    result = (matrix.T if is_tall else matrix).to(dtype)
    result = result / result.norm().clamp(min=_EPS)
    for _ in range(_NUM_STEPS):
        gram = result @ result.T
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.T if is_tall else result


class Muon(torch.optim.Optimizer):
    """
    Momentum, orthogonalized; updates as large as AdamW's would be (0.2 a weight), so that both take one learning rate.

    The same as `torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`, which computes in bf16 everywhere: a CPU without bf16
    instructions takes 20 times longer for that. Here a CPU computes in fp32.

    Args:
        params: matrices.
        lr (`float`): learning rate.
        weight_decay (`float`, *optional*, defaults to 0.0): decoupled.
        momentum (`float`, *optional*, defaults to 0.95): of Nesterov's kind.
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad, memory_format=torch.preserve_format)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                wanted = matrix.grad.lerp(momentum, group["momentum"])
                update = orthogonalize(wanted, torch.bfloat16 if matrix.is_cuda else matrix.dtype)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)
        return loss


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
            self.parts.append(torch.optim.AdamW(vectors, lr=lr, weight_decay=0.0, betas=betas, eps=eps))
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dicts of the parts, so that a schedule that changes a group reaches the part.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

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
