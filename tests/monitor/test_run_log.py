# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import logging
import threading

from tiny_training import heard_by_pytest

from hf_dflash.monitor.run_log import RUN_LOG, RunLog


def read(folder):
    return [json.loads(line) for line in (folder / RUN_LOG).read_text().splitlines()]


def test_what_is_not_finite_is_null_and_what_is_no_number_is_left_out(tmp_path):
    log = RunLog(tmp_path)
    log.add_figures(
        3, {"loss": float("nan"), "grad_norm": float("inf"), "accuracy": 0.123456789, "note": "x", "ok": True}
    )
    (row,) = read(tmp_path)
    assert row.pop("time") > 0
    assert row == {"step": 3, "loss": None, "grad_norm": None, "accuracy": 0.123457}


def test_a_line_is_in_the_file_before_the_log_is_closed(tmp_path):
    log = RunLog(tmp_path / "made")
    log.add_event("checkpoint", 5, name="checkpoint-5")
    assert read(tmp_path / "made")[0]["name"] == "checkpoint-5"


def test_half_a_line_of_a_killed_run_does_not_spoil_the_next_one(tmp_path):
    (tmp_path / RUN_LOG).write_text('{"step": 1, "lo')
    RunLog(tmp_path).add_figures(2, {"loss": 1.0})
    first, second = (tmp_path / RUN_LOG).read_text().splitlines()
    assert first == '{"step": 1, "lo' and json.loads(second)["step"] == 2


def test_threads_write_whole_lines(tmp_path):
    log = RunLog(tmp_path)
    threads = [
        threading.Thread(target=lambda n=n: [log.add_event("upload", n, name="x" * 500) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row["step"] for row in read(tmp_path)) == sorted([0, 1, 2, 3] * 50)


def test_a_log_that_cannot_be_written_is_warned_about_once_and_raises_nothing(tmp_path, caplog):
    (tmp_path / RUN_LOG).mkdir()
    log = RunLog(tmp_path)
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        log.add_figures(1, {"loss": 1.0})
        log.add_figures(2, {"loss": 1.0})
    assert caplog.text.count("cannot be written") == 1
