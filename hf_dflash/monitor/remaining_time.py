# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How long a run still takes, judged by its latest pace, and how sure that is."""

from collections import deque
from dataclasses import dataclass


# The latest pace, from so many moments that are at least so many seconds apart, in so many stretches.
_NUM_MOMENTS = 512
_SECONDS_APART = 1.0
_NUM_STRETCHES = 16


@dataclass(frozen=True)
class Remaining:
    """
    Args:
        seconds (`float`): at the mean pace of the window. Evaluations and saves are part of it.
        low (`float`), high (`float`): at the pace of its fastest and its slowest tenth.
    """

    seconds: float
    low: float
    high: float

    def __str__(self) -> str:
        text = format_duration(self.seconds)
        low, high = format_duration(self.low), format_duration(self.high)
        return text if low == high else f"{text} ({low} to {high})"


class RemainingTime:
    """Watches steps go by."""

    def __init__(self):
        self._moments: deque[tuple[int, float]] = deque(maxlen=_NUM_MOMENTS)

    def add(self, step: int, time: float) -> None:
        """
        Args:
            step (`int`): optimizer steps done.
            time (`float`): when, in seconds of any clock. Moments that follow too closely are left out; if the clock was set
                back, the ones before are forgotten.
        """
        if self._moments:
            last_step, last_time = self._moments[-1]
            if step <= last_step or last_time <= time < last_time + _SECONDS_APART:
                return
            if time < last_time:
                self.clear()
        self._moments.append((step, time))

    def clear(self) -> None:
        """For a run that starts again: the time between was no training."""
        self._moments.clear()

    def moments(self) -> list[tuple[int, float]]:
        """What an estimate is made of, for [`~RemainingTime.add`] of another one."""
        return list(self._moments)

    def estimate(self, remaining_steps: int) -> Remaining | None:
        """
        Args:
            remaining_steps (`int`): to go.

        Returns:
            [`Remaining`], `None` as long as nothing is known of the pace.
        """
        if len(self._moments) < 2:
            return None
        moments = list(self._moments)
        num_stretches = min(_NUM_STRETCHES, len(moments) - 1)
        ends = [moments[i * (len(moments) - 1) // num_stretches] for i in range(num_stretches + 1)]
        paces = sorted((t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in zip(ends, ends[1:], strict=False))
        mean = (moments[-1][1] - moments[0][1]) / (moments[-1][0] - moments[0][0])
        tenth = (len(paces) - 1) // 10 + (len(paces) > 5)
        low, high = paces[tenth], paces[-1 - tenth]
        return Remaining(*(remaining_steps * pace for pace in (mean, min(low, mean), max(high, mean))))


def format_duration(seconds: float) -> str:
    """Two figures are enough: `"3 d 4 h"`, `"2 h 05 min"`, `"4 min 10 s"`, `"12 s"`."""
    seconds = round(seconds)
    if seconds >= 86400:
        return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    if seconds >= 60:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds} s"
