# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import math

import pytest

from hf_dflash.monitor.alerts import AlertLimits, AlertWatch, Waiting


LIMITS = AlertLimits(grad_norm_factor=10, acceptance_drop=0.15, wait_share=0.25, free_gib=10, upload_minutes=60)
GIB = 2**30


def names(changes):
    """What begins with its name, what ends with a minus before it."""
    return [("-" if change.is_over else "") + change.name for change in changes]


def watch_of(*logs, **more):
    """What changes at each log."""
    watch = AlertWatch(LIMITS)
    return [names(watch.observe(figures, **more)) for figures in logs]


def test_a_good_run_raises_no_alert():
    logs = [
        {"loss": 3 - 0.01 * step, "grad_norm": 1 + 0.1 * math.sin(step), "time/step": 1.0, "time/wait": 0.2}
        for step in range(100)
    ] + [{"eval_acceptance_length": 2.0}, {"eval_acceptance_length": 1.9}]
    assert watch_of(*logs, free_bytes=11 * GIB) == [[]] * len(logs)


def test_an_episode_is_told_at_its_begin_and_at_its_end_and_never_in_between():
    nan = {"loss": float("nan")}
    assert watch_of({"loss": 1.0}, nan, nan, nan, {"loss": 1.0}, {"loss": 1.0}, nan) == [
        [],
        ["loss"],
        [],
        [],
        ["-loss"],
        [],
        ["loss"],
    ]


def test_a_log_that_says_nothing_about_a_rule_neither_begins_nor_ends_its_episode():
    assert watch_of({"loss": float("inf")}, {"eval_acceptance_length": 2.0}, {}) == [["loss"], [], []]


@pytest.mark.parametrize(
    "figures, name", [({"skipped_nonfinite_blocks": 3}, "skipped_blocks"), ({"skipped_nonfinite_steps": 1}, "loss")]
)
def test_what_training_left_out_as_not_finite_is_told(figures, name):
    assert watch_of({"loss": 1.0, **figures}, {"loss": 1.0}) == [[name], [f"-{name}"]]


def test_a_window_of_nothing_but_lost_steps_is_told_as_such_not_as_a_loss_that_is_nan():
    (change,) = AlertWatch(LIMITS).observe({"loss": math.nan, "skipped_nonfinite_steps": 2})
    assert change.message.startswith("2 steps were passed over")


def test_a_gradient_norm_is_compared_with_the_usual_one_once_that_is_known():
    usual = [{"grad_norm": 1.0}] * 19
    assert watch_of(*usual, {"grad_norm": 50.0})[-1] == []
    assert watch_of(*usual, {"grad_norm": 1.0}, {"grad_norm": 10.0}, {"grad_norm": 10.1}, {"grad_norm": 1.0})[-3:] == [
        [],
        ["grad_norm"],
        ["-grad_norm"],
    ]
    assert watch_of({"grad_norm": float("nan")}) == [["grad_norm"]]


def test_acceptance_is_compared_with_the_best_of_the_same_evaluation():
    logs = [{"eval_acceptance_length": length} for length in (2.0, 3.0, 2.71, 2.69, 2.9)]
    assert watch_of(*logs) == [[], [], [], ["acceptance"], ["-acceptance"]]
    assert watch_of({"eval_math_acceptance_length": 3.0}, {"eval_chat_acceptance_length": 2.0}) == [[], []]
    assert watch_of({"decoded_acceptance_length": 3.0}, {"decoded_acceptance_length": 2.0})[-1] == ["acceptance"]


def test_neither_chance_nor_anchors_nor_an_evaluation_that_was_cut_short_is_a_fall():
    assert watch_of({"eval_acceptance_length": 1.04}, {"eval_acceptance_length": 1.0})[-1] == []
    assert watch_of({"eval_anchor_acceptance_length": 3.0}, {"eval_anchor_acceptance_length": 1.0})[-1] == []
    assert watch_of({"eval_acceptance_length": 3.0}, {"eval_acceptance_length": float("nan")})[-1] == []


def test_a_drafter_starves_when_it_waits_in_five_logs_in_a_row():
    waits = [0.5, 0.5, 0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1]
    logs = [{"time/wait": wait, "time/step": 1.0} for wait in waits]
    assert watch_of(*logs) == [[]] * 7 + [["starving"], ["-starving"]]


def test_a_disk_must_hold_two_checkpoints_whatever_the_limit_says():
    assert watch_of({}, free_bytes=9 * GIB) == [["disk"]]
    assert watch_of({}, free_bytes=50 * GIB, checkpoint_bytes=24 * GIB) == [[]]
    assert watch_of({}, free_bytes=50 * GIB, checkpoint_bytes=26 * GIB) == [["disk"]]


def test_the_oldest_upload_is_named():
    waiting = [Waiting("checkpoint-1", "S3", 7200), Waiting("checkpoint-2", "the Hub", 3601), Waiting("c-3", "S3", 10)]
    watch = AlertWatch(LIMITS)
    (alert,) = watch.observe({}, waiting=waiting)
    assert alert.message == "checkpoint-1 has been on its way to S3 for 120 minutes."
    assert names(watch.observe({}, waiting=waiting[2:])) == ["-upload"]


def test_every_alert_says_a_cause_and_what_helps():
    watch = AlertWatch(LIMITS)
    usual = {"loss": 1.0, "grad_norm": 1.0, "eval_acceptance_length": 3.0, "time/wait": 0.9, "time/step": 1.0}
    alerts = [alert for _ in range(20) for alert in watch.observe(usual)]
    bad = {
        **usual,
        "loss": float("nan"),
        "skipped_nonfinite_blocks": 1,
        "grad_norm": 99.0,
        "eval_acceptance_length": 1.0,
    }
    alerts += watch.observe(bad, free_bytes=0, waiting=[Waiting("c", "S3", 1e6)])
    assert sorted(names(alerts)) == ["acceptance", "disk", "grad_norm", "loss", "skipped_blocks", "starving", "upload"]
    for alert in alerts:
        assert alert.message.endswith(".") and alert.cause.endswith(".") and alert.fix.endswith(".")
        assert str(alert) == f"{alert.message} Likely cause: {alert.cause} What helps: {alert.fix}"
