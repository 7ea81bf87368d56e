# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Points in time that cost no synchronisation: CUDA events, or the host's clock."""

import time

import torch


class Moment:
    """
    When the stream of a device gets here.

    Args:
        device (`torch.device`): on a CPU, work is over when its call returns, and the host's clock tells the time.
        stream (`torch.cuda.Stream`, *optional*): of that device; its current one by default.
    """

    def __init__(self, device: torch.device, stream=None):
        self.event, self._seconds = None, 0.0
        if device.type == "cuda":
            # A host that waits for this one sleeps instead of spinning.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record(torch.cuda.current_stream(device) if stream is None else stream)
        else:
            self._seconds = time.perf_counter()

    @property
    def is_past(self) -> bool:
        """Whether the device got here; never waits."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Makes the host wait until the device gets here."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, later: "Moment") -> float:
        """Both must be past, and of one device."""
        if self.event is None:
            return later._seconds - self._seconds
        return self.event.elapsed_time(later.event) / 1000
