# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Muon for matrices, AdamW for the rest, as one optimizer."""

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` on the matrices of a model and AdamW on its vectors, behind one schedule and one state.

    Muon's update is scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.

    Args:
        model (`nn.Module`): whose trainable parameters are optimized.
        lr (`float`): learning rate.
        weight_decay (`float`): of the matrices.
        betas (`tuple[float, float]`), eps (`float`): of AdamW.

    Raises:
        `ImportError`: if this torch has no Muon.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float], eps: float):
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"torch {torch.__version__} has no Muon: install torch 2.9 or newer.")
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trainable if parameter.dim() == 2]
        vectors = [parameter for parameter in trainable if parameter.dim() != 2]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        ]
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
