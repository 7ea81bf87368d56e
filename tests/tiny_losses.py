# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a loss takes of a GPU's memory."""

import torch

from hf_dflash.drafter.losses import compute_dflash_loss


def measure_loss_peak(head, slots: int) -> int:
    """Bytes that a loss of random states and its backward pass take at most, beside what is there before, once compiled.

    Args:
        head ([`LanguageHead`]): in bf16, on a CUDA device.
        slots (`int`): supervised ones.
    """
    states = torch.randn(slots, 1, head.weight.shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(slots, 1, dtype=torch.long, device="cuda")
    supervised = torch.ones_like(labels, dtype=torch.bool)
    compute_dflash_loss(states, head, labels, supervised)[0].backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    compute_dflash_loss(states, head, labels, supervised)[0].backward()
    return torch.cuda.max_memory_allocated() - before
