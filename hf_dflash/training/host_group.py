# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What the processes of a run tell one another on the host, with patience and without touching a device."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


# Tokenizing a corpus, writing a checkpoint or reading slow storage may keep one process busy for long; the time limit of
# device collectives (`ddp_timeout`) is there to find hangs, not to punish that.
PATIENCE = timedelta(days=7)


class HostGroup:
    """
    All processes of the run, talking over gloo.

    Numbers that the host knows (denominators, requests to stop) need no device collective: no kernel queue is waited for,
    and nobody enters a device collective before everybody has its data.

    Args:
        world_size (`int`): processes of the run; with one, nothing is sent.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if world_size > 1 else None

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes, in fp64."""
        if self._group is None:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def wait(self) -> None:
        """Waits until every process is here."""
        self.sum(0.0)

    def on_first_rank(self, action: Callable[[], None]) -> None:
        """
        Does something on the first rank, for which the others wait. Where it fails, all of them do: none is left waiting.

        Args:
            action (`Callable`): what is done.

        Raises:
            `Exception`: what the action raised, on the first rank.
            `ValueError`: on the others then.
        """
        failure = None
        if self._group is None or dist.get_rank() == 0:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - raised below, once the others know
                failure = error
        (failures,) = self.sum(failure is not None)
        if failures:
            raise failure or ValueError("The first process of this run was refused: see its error.")
