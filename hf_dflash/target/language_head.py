# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The target's language head, as the drafter borrows it: weight, bias, scale and soft-cap."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F


@dataclass
class LanguageHead:
    """
    What turns final normed hidden states into logits: softcap * tanh(scale * (h W^T + b) / softcap).

    Args:
        weight (`torch.Tensor` of shape `[V, H]`): the matrix.
        bias (`torch.Tensor` of shape `[V]`, *optional*): added before the scale.
        scale (`float`, *optional*, defaults to 1.0): Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`.
        softcap (`float`, *optional*): Gemma's `final_logit_softcapping`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    is_fp8: ClassVar[bool] = False

    @classmethod
    def from_model(cls, model) -> "LanguageHead":
        """Reads the head of a causal language model.

        Raises:
            `ValueError`: if the model has no output embedding.
        """
        linear = model.get_output_embeddings()
        if linear is None:
            raise ValueError(
                f"{type(model).__name__} has no language head: load the target with AutoModelForCausalLM, not AutoModel."
            )
        config = model.config.get_text_config(decoder=True)
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(linear.weight.detach(), getattr(linear, "bias", None), float(scale), softcap)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "LanguageHead":
        """A copy on another device; the same tensors where nothing changes."""
        bias = None if self.bias is None else self.bias.detach().to(device, dtype)
        return replace(self, weight=self.weight.to(device, dtype), bias=bias)

    def project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> h W^T + b, `[..., V]` in the weights' dtype: what [`~LanguageHead.finish`] takes."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)

    def finish(self, projected: torch.Tensor) -> torch.Tensor:
        """Scale and soft-cap, in fp32 (fp64 for fp64 weights): softmax in bf16 costs 7% of acceptance (speculators pull
        request 788)."""
        logits = projected.to(torch.promote_types(projected.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> logits `[..., V]` in fp32 (fp64 for fp64 weights)."""
        return self.finish(self.project(hidden_states))

    def unfinish(
        self, logits: torch.Tensor, grad_logits: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient by [`~LanguageHead.project`] of a loss whose gradient by logits is given, as
        [`~LanguageHead.multiply_gradient`] takes it: in the weights' dtype. Only heads in FP8 look at `labels`."""
        if self.softcap is not None:
            grad_logits = grad_logits * (1 - (logits / self.softcap) ** 2)
        if self.scale != 1.0:
            grad_logits = grad_logits * self.scale
        return grad_logits.to(self.weight.dtype)

    def multiply_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient by the hidden states, `[..., H]`, where that by [`~LanguageHead.project`] is given."""
        return gradient @ self.weight

    def predict(self, hidden_states: torch.Tensor, max_elements: int = 1 << 28) -> torch.Tensor:
        """The most likely token of each row, without holding more than `max_elements` logits.

        Args:
            hidden_states (`torch.Tensor` of shape `[R, H]`): final normed hidden states.
            max_elements (`int`, *optional*, defaults to 2^28): logits that stand in memory at once (1 GiB in fp32).

        Returns:
            `torch.Tensor` of shape `[R]`, int64.
        """
        # Conversion to fp32 keeps order and ties, so a plain head needs none; scale and soft-cap can make new ties.
        is_plain = self.scale == 1.0 and self.softcap is None
        score = self.project if is_plain else self.logits
        tokens = [score(chunk).argmax(-1) for chunk in split_rows(hidden_states, max_elements // self.vocab_size)]
        return torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.long, device=hidden_states.device)


def split_rows(states: torch.Tensor, most: int) -> list[torch.Tensor]:
    """Pieces of nearly equal height, at most `most` rows each, in multiples of 128 where that fits: a short last piece, or
    a ragged one, would leave a GPU's tiles half empty.

    Args:
        states (`torch.Tensor` of shape `[R, ...]`): what is split.
        most (`int`): rows of a piece; less than one counts as one.

    Returns:
        `list[torch.Tensor]`: views; none if there are no rows.
    """
    rows = states.shape[0]
    if rows == 0:
        return []
    most = max(1, most)
    height = -(-rows // -(-rows // most))
    rounded = -(-height // 128) * 128
    return list(states.split(rounded if rounded <= most else height))
