# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Numerators and denominators of metrics: summed on the device, over ranks in one collective, and kept by checkpoints.

Never a mean of means: a ratio is made where it is logged. Everything is fp64, so counts are exact.
"""

import math
import os
from pathlib import Path

import torch

from ..atomic_files import replacing


# Each of one element, except those that are kept for each of the B - 1 drafts.
_SUMS = ("loss", "steps", "accepted", "blocks", "tokens", "padded_tokens", "skipped_blocks", "skipped_steps")
# Of the whole run, up to its last log.
_SUMS_OF_THE_RUN = ("run_loss", "run_steps")
_EVALUATION_SUMS = ("weight", "walk_tokens", "walk_blocks", "agreeing", "replied")
_SUMS_BY_SLOT = ("correct", "supervised")

Sums = dict[str, torch.Tensor]


def new_sums(block_size: int, device: torch.device) -> Sums:
    """All sums at zero."""
    sizes = dict.fromkeys(_SUMS_BY_SLOT, block_size - 1)
    sizes |= dict.fromkeys(_SUMS + _SUMS_OF_THE_RUN + _EVALUATION_SUMS, 1)
    return {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}


def add_sums(sums: Sums, more: Sums) -> None:
    """Adds in place."""
    for name, value in more.items():
        sums[name] += value


def begin_window(sums: Sums) -> Sums:
    """What is summed from a log on: nothing yet, beside the whole run's loss, to which the window that ends is added."""
    fresh = {name: torch.zeros_like(value) for name, value in sums.items()}
    return fresh | {"run_loss": sums["run_loss"] + sums["loss"], "run_steps": sums["run_steps"] + sums["steps"]}


def reduce_sums(sums: Sums, accelerator) -> Sums:
    """Sums over ranks in one collective, brought to the host."""
    flat = accelerator.reduce(torch.cat(list(sums.values())), reduction="sum").cpu()
    return dict(zip(sums, flat.split([len(value) for value in sums.values()]), strict=True))


def ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> float:
    """0 for an empty denominator: a log line without any block must not be NaN."""
    return float(numerator) / float(denominator) if float(denominator) > 0 else 0.0


def mean(total: torch.Tensor, count: torch.Tensor) -> float:
    """NaN of nothing: a loss, or an acceptance length, of 0 would be taken for one."""
    return ratio(total, count) if count > 0 else math.nan


def save_sums(sums: Sums, checkpoint: str, rank: int) -> None:
    """Keeps what this rank has summed since the last log; ranks apart, so that the order of additions stays the same."""
    with replacing(Path(checkpoint, f"metric_sums_{rank}.pt"), "wb") as file:
        torch.save({name: value.cpu() for name, value in sums.items()}, file)


def load_sums(sums: Sums, checkpoint: str, rank: int, world_size: int) -> None:
    """Adds what a checkpoint keeps for this rank, and for ranks that no longer exist."""
    for saved_rank in range(rank, 1 << 16, world_size):
        path = os.path.join(checkpoint, f"metric_sums_{saved_rank}.pt")
        if not os.path.isfile(path):
            break
        saved = torch.load(path, weights_only=True)
        add_sums(sums, {name: value.to(sums[name].device) for name, value in saved.items()})
