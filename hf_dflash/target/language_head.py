# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The target's language head, as the drafter borrows it: weight, bias, scale and soft-cap."""

from dataclasses import dataclass, replace

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
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(linear.weight.detach(), getattr(linear, "bias", None), float(scale), softcap)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "LanguageHead":
        """A copy on another device; the same tensors where nothing changes."""
        bias = None if self.bias is None else self.bias.detach().to(device, dtype)
        return replace(self, weight=self.weight.to(device, dtype), bias=bias)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> logits `[..., V]` in fp32 (fp64 for fp64 weights): softmax in bf16 costs 7% of acceptance
        (speculators pull request 788)."""
        logits = F.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def backward(self, logits: torch.Tensor, grad_logits: torch.Tensor) -> torch.Tensor:
        """The gradient by the hidden states, `[..., H]`, of a loss whose gradient by [`~LanguageHead.logits`] is given."""
        if self.softcap is not None:
            grad_logits = grad_logits * (1 - (logits / self.softcap) ** 2)
        if self.scale != 1.0:
            grad_logits = grad_logits * self.scale
        return grad_logits.to(self.weight.dtype) @ self.weight

    def predict(self, hidden_states: torch.Tensor, max_elements: int = 1 << 28) -> torch.Tensor:
        """The most likely token of each row, without holding more than `max_elements` logits.

        Args:
            hidden_states (`torch.Tensor` of shape `[R, H]`): final normed hidden states.
            max_elements (`int`, *optional*, defaults to 2^28): logits that stand in memory at once (1 GiB in fp32).

        Returns:
            `torch.Tensor` of shape `[R]`, int64.
        """
        rows = max(1, max_elements // self.vocab_size)
        tokens = [self.logits(chunk).argmax(-1) for chunk in hidden_states.split(rows)]
        return torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.long, device=hidden_states.device)
