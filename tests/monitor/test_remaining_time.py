# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest

from hf_dflash.monitor.remaining_time import RemainingTime, format_duration


def test_an_even_pace_has_no_spread():
    remaining = RemainingTime()
    for step in range(50):
        remaining.add(step, 2.0 * step)
    estimate = remaining.estimate(100)
    assert (estimate.low, estimate.seconds, estimate.high) == (200, 200, 200)
    assert str(estimate) == "3 min 20 s"


def test_the_spread_holds_the_slow_and_the_fast_stretches_and_the_mean():
    remaining, time = RemainingTime(), 0.0
    for step in range(161):
        time += 1.0 if step // 20 % 2 else 3.0
        remaining.add(step, time)
    estimate = remaining.estimate(10)
    assert estimate.low == pytest.approx(10) and estimate.high == pytest.approx(30)
    assert estimate.low < estimate.seconds < estimate.high


def test_nothing_is_known_before_two_moments():
    remaining = RemainingTime()
    assert remaining.estimate(10) is None
    remaining.add(5, 100.0)
    assert remaining.estimate(10) is None


def test_a_pause_between_two_starts_is_no_training_time():
    remaining = RemainingTime()
    for step in range(10):
        remaining.add(step, float(step))
    remaining.clear()
    for step in range(10, 20):
        remaining.add(step, 5000.0 + step)
    assert remaining.estimate(7).seconds == 7


def test_a_clock_that_is_set_back_is_no_fast_pace():
    remaining = RemainingTime()
    for step in range(20):
        remaining.add(step, (5000.0 if step < 10 else 0.0) + 2 * step)
    assert remaining.estimate(7).seconds == 14


def test_only_the_latest_pace_counts():
    remaining, time = RemainingTime(), 0.0
    for step in range(2000):
        time += 10.0 if step < 1000 else 2.0
        remaining.add(step, time)
    assert remaining.estimate(1).seconds == 2


@pytest.mark.parametrize(
    "seconds, text",
    [
        (4.4, "4 s"),
        (250, "4 min 10 s"),
        (7500, "2 h 05 min"),
        (3 * 86400 + 4 * 3600 + 59, "3 d 4 h"),
        (59.7, "1 min 00 s"),
    ],
)
def test_durations_are_two_figures(seconds, text):
    assert format_duration(seconds) == text
