# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where the time of optimizer steps goes, and how well devices are used, without making anybody wait for a device.

Begin and end of everything are events in the streams. They are read when a log is due, as far as they are past; what is
still under way is read at the next one.
"""

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import TrainerCallback

from ..target.moment import Moment
from ..target.pipeline import FeatureTimes
from .block_batch import BlockBatch
from .estimate import GIB, drafter_flops, peak_flops, sizes_of, target_flops
from .metric_sums import Sums, ratio


@dataclass
class _Step:
    """Pairs of moments of one optimizer step."""

    target: list[tuple[Moment, Moment]] = field(default_factory=list)
    transfer: list[tuple[Moment, Moment]] = field(default_factory=list)
    wait: list[tuple[Moment, Moment]] = field(default_factory=list)
    drafter: list[tuple[Moment, Moment]] = field(default_factory=list)

    @property
    def is_past(self) -> bool:
        return all(end.is_past for pairs in vars(self).values() for _, end in pairs)

    def seconds(self) -> dict[str, float]:
        return {name: sum(begin.seconds_until(end) for begin, end in pairs) for name, pairs in vars(self).items()}


_PARTS = ("target", "transfer", "wait", "drafter")
_COUNTS = ("tokens", "anchors", "labels", "steps")


class StepTimes:
    """
    Times and counts since the last log.

    Args:
        args ([`DFlashTrainingArguments`]): of the run.
        targets (`list[FrozenTarget]`): of this process.
        drafter (`nn.Module`): that trains.
    """

    def __init__(self, args, targets, drafter):
        self._rank, self._world_size = args.process_index, args.world_size
        self._device, self._targets, self._drafter = args.device, targets, drafter
        self._computes_in_half = args.bf16 or args.fp16
        self._steps: deque[_Step] = deque()
        self._step = _Step()
        self._begin: Moment | None = None
        self._counted = dict.fromkeys(_COUNTS, 0)
        self.begin_window()

    def begin_window(self) -> None:
        """From here to the next log."""
        self._window_began, self._excluded = time.perf_counter(), 0.0

    @contextmanager
    def excluded(self):
        """What happens inside (evaluation, saving) is no part of any step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - began

    def forget(self) -> None:
        """A run begins: what an earlier one has left behind says nothing about it."""
        self._steps.clear()
        self._step, self._counted = _Step(), dict.fromkeys(_COUNTS, 0)
        self.begin_window()

    def begin_micro_step(self, batch: BlockBatch, times: FeatureTimes) -> None:
        """The features are there, and the drafter begins.

        Args:
            batch ([`BlockBatch`]): that it is trained on.
            times ([`FeatureTimes`]): of its features.
        """
        step = self._step
        step.target.append(times.target)
        step.transfer += times.transfers
        if times.wait is not None:
            step.wait.append(times.wait)
        self._begin = Moment(self._device)
        self._counted["tokens"] += batch.num_tokens
        self._counted["anchors"] += batch.num_blocks
        self._counted["labels"] += len(batch.label_positions)

    def end_micro_step(self) -> None:
        """The drafter's part is launched: forward, backward and, behind the last one, the optimizer."""
        if self._begin is not None:
            self._step.drafter.append((self._begin, Moment(self._device)))
            self._begin = None

    def end_step(self) -> None:
        """Behind the optimizer."""
        self.end_micro_step()
        self._steps.append(self._step)
        self._step = _Step()
        self._counted["steps"] += 1

    def collect(self) -> Sums:
        """This rank's sums, to be added over ranks. What is under way stays for the next time."""
        seconds, num_timed = dict.fromkeys(_PARTS, 0.0), 0
        while self._steps and self._steps[0].is_past:
            for name, value in self._steps.popleft().seconds().items():
                seconds[name] += value
            num_timed += 1
        values = {f"time/{name}": value for name, value in seconds.items()} | {"time/steps": num_timed}
        values |= {f"count/{name}": value for name, value in self._counted.items()}
        self._counted = dict.fromkeys(_COUNTS, 0)
        sums = {name: [value] for name, value in values.items()}
        for name, value in self._take_peaks().items():
            # Each rank fills in its own place, so that a sum brings all of them together.
            sums[name] = [value if rank == self._rank else 0.0 for rank in range(self._world_size)]
        flat = torch.tensor(sum(sums.values(), []), dtype=torch.float64, device=self._device)
        return dict(zip(sums, flat.split([len(value) for value in sums.values()]), strict=True))

    def _take_peaks(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        devices = {"memory/drafter": [self._device], "memory/target": [target.device for target in self._targets]}
        peaks = {
            name: max(torch.cuda.max_memory_allocated(one) for one in some) / GIB for name, some in devices.items()
        }
        for device in {one for some in devices.values() for one in some}:
            torch.cuda.reset_peak_memory_stats(device)
        return peaks

    def figures(self, sums: Sums) -> dict[str, float]:
        """The log's figures, of [`~StepTimes.collect`] added over ranks; begins the next window.

        Returns:
            `dict[str, float]`: `time/*` in seconds of an optimizer step, means over ranks (`time/target`: of one target);
            rates over all ranks; `mfu/*` as shares of the devices' peak, where it is known; `memory/*` in GiB, the peak of
            the window on the fullest device.
        """
        window = time.perf_counter() - self._window_began - self._excluded
        self.begin_window()
        counts = {name: float(sums[f"count/{name}"]) for name in _COUNTS}
        if not counts["steps"] or window <= 0:
            return {}
        figures = {
            "tokens_per_second": counts["tokens"] / window,
            "anchor_updates_per_second": counts["anchors"] / window,
            "time/step": window * self._world_size / counts["steps"],
        }
        if float(sums["time/steps"]):
            figures |= {f"time/{name}": ratio(sums[f"time/{name}"], sums["time/steps"]) for name in _PARTS}
            figures["time/target"] /= len(self._targets)
        figures |= self._utilizations(counts, window)
        figures |= {name: float(value.max()) for name, value in sums.items() if name.startswith("memory/")}
        return figures

    def _utilizations(self, counts: dict[str, float], window: float) -> dict[str, float]:
        figures, sizes = {}, self._sizes
        if sizes is None:
            return figures
        target, num_targets = self._targets[0], self._world_size * len(self._targets)
        peak = peak_flops(target.device) if target.head.weight.element_size() == 2 else None
        if peak is not None and sizes.is_dense:
            flops = target_flops(sizes, counts["tokens"], counts["labels"])
            figures["mfu/target"] = flops / (window * peak * num_targets)
        peak = peak_flops(self._device) if self._computes_in_half else None
        if peak is not None:
            flops = drafter_flops(sizes, counts["tokens"], counts["anchors"])
            figures["mfu/drafter"] = flops / (window * peak * self._world_size)
        return figures

    @cached_property
    def _sizes(self):
        return sizes_of(self._targets[0].model, self._drafter) if self._device.type == "cuda" else None


class StepTimesCallback(TrainerCallback):
    """Tells [`StepTimes`] where training begins and where each step ends."""

    def __init__(self, step_times: StepTimes):
        self.step_times = step_times

    def on_train_begin(self, args, state, control, **kwargs):
        self.step_times.forget()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.step_times.end_step()
