# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import os

import numpy as np
import pytest
from logs import BEGIN, training_rows, write_rows

from hf_dflash.monitor.history import OVERVIEW, RunHistory
from hf_dflash.monitor.run_log import RUN_LOG


def read(folder, **options):
    history = RunHistory(folder, **options)
    assert history.update()
    return history


def series(history, name, **seen):
    return {key: values.tolist() for key, values in history.snapshot(**seen)["series"][name].items()}


def test_a_short_log_is_shown_as_it_is(tmp_path):
    write_rows(tmp_path, [BEGIN, *training_rows(1, 5, loss=lambda step: 10.0 - step)])
    shown = read(tmp_path).snapshot()
    assert shown["series"]["loss"]["x"].tolist() == [1, 2, 3, 4, 5]
    assert shown["series"]["loss"]["y"].tolist() == [9, 8, 7, 6, 5]
    assert (shown["name"], shown["step"], shown["max_steps"], shown["latest"]["loss"]) == ("a run", 5, 100, 5)
    assert shown["remaining"] == [95, 95, 95]
    assert shown["ended"] is None


def test_of_a_long_log_every_bucket_keeps_mean_lowest_highest_and_last_step(tmp_path):
    rng = np.random.default_rng(0)
    losses = rng.normal(size=1001)
    losses[777] = 50.0
    write_rows(tmp_path, training_rows(1, 1000, loss=lambda step: losses[step]))
    history = read(tmp_path, num_buckets=64)
    assert history.width == 16
    found = series(history, "loss")
    for bucket, last in enumerate(found["x"]):
        steps = np.arange(max(1, 16 * bucket), min(1000, 16 * bucket + 15) + 1)
        assert last == steps[-1]
        assert found["y"][bucket] == pytest.approx(losses[steps].mean(), rel=1e-6)
        assert found["low"][bucket] == np.float32(losses[steps].min())
        assert found["high"][bucket] == np.float32(losses[steps].max())
    assert max(found["high"]) == 50


def test_reading_on_reads_only_what_is_new(tmp_path):
    rows = training_rows(1, 5000, loss=float)
    write_rows(tmp_path, rows)
    history = read(tmp_path)
    size = (tmp_path / RUN_LOG).stat().st_size
    assert history.bytes_read < size + 2**20
    before = history.bytes_read
    assert history.update() and history.bytes_read == before
    write_rows(tmp_path, training_rows(5001, 5010, loss=float), "a")
    assert history.update()
    assert history.bytes_read - before == (tmp_path / RUN_LOG).stat().st_size - size
    assert history.step == 5010


def test_a_page_that_has_the_rest_is_sent_the_last_buckets_only(tmp_path):
    write_rows(tmp_path, training_rows(1, 1000, loss=float))
    history = read(tmp_path)
    first = history.snapshot()
    write_rows(tmp_path, training_rows(1001, 1010, loss=float), "a")
    history.update()
    second = history.snapshot(first["generation"], first["next_bucket"], first["events_version"])
    assert second["series"]["loss"]["x"].tolist() == list(range(1000, 1011))
    assert "events" not in second


def test_a_page_is_sent_everything_when_buckets_were_joined(tmp_path):
    write_rows(tmp_path, training_rows(1, 100, loss=float))
    history = read(tmp_path, num_buckets=128)
    first = history.snapshot()
    write_rows(tmp_path, training_rows(101, 200, loss=float), "a")
    history.update()
    second = history.snapshot(first["generation"], first["next_bucket"])
    assert second["generation"] != first["generation"] and second["first_bucket"] == 0
    assert len(second["series"]["loss"]["x"]) == 101


def test_joined_in_pieces_or_at_once_is_the_same(tmp_path):
    draw = np.random.default_rng(1)
    values = draw.normal(size=701)
    rows = training_rows(1, 700, loss=lambda step: values[step], lr=float)
    write_rows(tmp_path, rows)
    whole = read(tmp_path, num_buckets=32)
    (tmp_path / "pieces").mkdir()
    pieces = RunHistory(tmp_path / "pieces", num_buckets=32)
    for begin in range(0, 700, 37):
        write_rows(tmp_path / "pieces", rows[begin : begin + 37], "a")
        pieces.update()
    for name in ("loss", "lr"):
        one, other = series(whole, name), series(pieces, name)
        assert one["x"] == other["x"] and one["low"] == other["low"] and one["high"] == other["high"]
        assert one["y"] == pytest.approx(other["y"])


def test_a_run_that_went_on_from_a_checkpoint_replaces_the_steps_behind_it(tmp_path):
    rows = [BEGIN, *training_rows(1, 30, loss=lambda step: 1.0)]
    write_rows(tmp_path, [*rows, {**BEGIN, "step": 20}, *training_rows(21, 25, loss=lambda step: 2.0)])
    found = series(read(tmp_path), "loss")
    assert found["x"] == list(range(1, 26))
    assert found["y"] == [1.0] * 20 + [2.0] * 5


def test_a_run_that_begins_anew_in_the_folder_of_a_long_one_shows_nothing_of_it(tmp_path):
    """The buckets of the long one held all steps of the short one, and its loss was in their mean."""
    short = [BEGIN, *training_rows(1, 80, loss=lambda step: 2.0), {"event": "decoded", "step": 80, "samples": []}]
    write_rows(tmp_path, short)
    alone = read(tmp_path, num_buckets=128).snapshot()
    long = [BEGIN, *training_rows(1, 5000, loss=lambda step: 9.0, grad_norm=float)]
    write_rows(tmp_path, [*long, {"event": "decoded", "step": 5000, "acceptance_by_slot": [1.0]}, *short])
    behind = read(tmp_path, num_buckets=128).snapshot()
    for name in ("step", "width", "latest", "decoded", "remaining"):
        assert behind[name] == alone[name]
    assert behind["series"].keys() == {"loss"}
    for key, values in alone["series"]["loss"].items():
        assert behind["series"]["loss"][key].tolist() == values.tolist()


def test_what_a_bucket_cannot_tell_from_steps_that_are_void_is_a_gap(tmp_path):
    rows = [BEGIN, *training_rows(1, 1000, loss=lambda step: 1e9 if step > 900 else 1.0)]
    rows.insert(901, {"step": 900, "eval_loss": 3.0})
    write_rows(tmp_path, [*rows, {**BEGIN, "step": 900}])
    history = read(tmp_path, num_buckets=64)
    assert history.width == 16 and 900 % 16 != 15
    found = series(history, "loss")
    assert found["x"][-1] == 895 and max(found["high"]) == 1.0
    assert series(history, "eval_loss")["x"] == [900]
    latest = history.snapshot()["latest"]
    assert (latest["loss"], latest["eval_loss"]) == (1.0, 3.0)


def test_the_latest_line_says_when_the_run_was_alive_whatever_the_clock_showed_before(tmp_path):
    rows = [{**BEGIN, "time": 90000.0}, {"step": 1, "time": 90001.0, "loss": 1.0}]
    write_rows(tmp_path, [*rows, {"step": 2, "time": 500.0, "loss": 1.0}])
    assert read(tmp_path).time == 500
    write_rows(tmp_path, [*rows, {**BEGIN, "step": 1, "time": 400.0}])
    assert read(tmp_path).time == 400


def test_a_line_without_a_time_is_no_clock_that_was_set_back(tmp_path):
    rows = [{"step": step, "time": None if step == 20 else 1e9 + 2 * step, "loss": 1.0} for step in range(1, 41)]
    write_rows(tmp_path, [{**BEGIN, "run": {"max_steps": 100}}, *rows])
    assert read(tmp_path).snapshot()["remaining"] == [120, 120, 120]


def test_a_log_that_was_replaced_is_read_anew(tmp_path):
    write_rows(tmp_path, training_rows(1, 30, loss=float))
    history = read(tmp_path)
    (tmp_path / RUN_LOG).unlink()
    write_rows(tmp_path, training_rows(1, 3, loss=lambda step: 7.0))
    history.update()
    assert series(history, "loss")["y"] == [7, 7, 7] and history.step == 3


def test_half_a_line_waits_for_its_other_half(tmp_path):
    write_rows(tmp_path, training_rows(1, 2, loss=float))
    history = read(tmp_path)
    line = json.dumps({"step": 3, "time": 1.0, "loss": 3.0})
    with open(tmp_path / RUN_LOG, "a") as file:
        file.write(line[:20])
    assert history.update() and history.step == 2
    with open(tmp_path / RUN_LOG, "a") as file:
        file.write(line[20:] + "\n")
    assert history.update() and history.step == 3


def test_a_limited_look_reads_a_part_and_says_so(tmp_path):
    write_rows(tmp_path, training_rows(1, 60_000, loss=float))
    history = RunHistory(tmp_path)
    assert not history.update(2**20)
    assert 0 < history.step < 60_000 and 0 < history.snapshot()["read"][0] < history.size
    while not history.update(2**20):
        pass
    assert history.step == 60_000


def test_figures_that_are_not_finite_leave_a_gap(tmp_path):
    write_rows(tmp_path, training_rows(1, 4, loss=lambda step: None if step == 3 else float(step), a=float))
    history = read(tmp_path)
    assert series(history, "loss")["x"] == [1, 2, 4]
    assert series(history, "a")["x"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1, 2]",
        "{}",
        '{"step": -1, "loss": 1}',
        '{"step": 1e300, "loss": 1}',
        '{"step": "1", "loss": [1]}',
        '{"step": 2, "loss": ' + "9" * 400 + "}",
        '{"step": 2, "loss": {"a": 1}}',
        '{"event": 5, "step": 1}',
        '{"event": "begin", "step": "x"}',
        '{"event": "begin", "step": 0, "run": [1]}',
        '{"event": "decoded", "step": 1, "acceptance_by_slot": "x"}',
        '{"event": "decoded", "step": 1, "acceptance_by_slot": [{}, null]}',
        "[" * 100_000,
        '{"event": "begin", "step": 1, "run": "' + "x" * 300_000 + '"}',
        "x" * 3_000_000,
    ],
    ids=lambda line: line[:24],
)
def test_a_line_that_is_none_of_ours_harms_no_other(line, tmp_path):
    write_rows(tmp_path, [BEGIN, *training_rows(1, 2, loss=float), line, *training_rows(3, 4, loss=float)])
    history = read(tmp_path)
    assert series(history, "loss")["y"][-2:] == [3, 4]
    json.dumps(history.snapshot(), default=lambda array: array.tolist())


def test_the_number_of_names_is_limited(tmp_path):
    write_rows(tmp_path, [{"step": 1, **{f"name_{i}": i for i in range(3000)}, "x" * 200: 1}])
    assert len(read(tmp_path).snapshot()["series"]) == 512


def test_without_a_log_the_last_checkpoint_tells(tmp_path):
    state = {"global_step": 4, "max_steps": 10, "num_train_epochs": 1}
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": s, "loss": 1.0 * s, "epoch": 0.1} for s in range(1, step + 1)]
        history += [{"step": step, "eval_acceptance_length": 1.5}]
        (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": step, "log_history": history}))
    run = read(tmp_path)
    assert series(run, "loss")["y"] == [1, 2, 3, 4]
    shown = run.snapshot()
    assert (shown["step"], shown["max_steps"], shown["ended"]) == (4, 10, "as of the last checkpoint")
    assert shown["latest"]["eval_acceptance_length"] == 1.5
    before = run.bytes_read
    run.update()
    assert run.bytes_read == before


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="--output_dir"):
        RunHistory(tmp_path).update()


@pytest.mark.parametrize("name", [RUN_LOG, "trainer_state.json"])
def test_links_and_pipes_are_not_followed(name, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    write_rows(secret, training_rows(1, 2, loss=float))
    (secret / "trainer_state.json").write_text('{"global_step": 1, "log_history": [{"step": 1, "loss": 1}]}')
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(secret / name)
    (run / "checkpoint-1").symlink_to(secret)
    with pytest.raises(FileNotFoundError):
        RunHistory(run).update()
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(FileNotFoundError):
        RunHistory(run).update()


def test_alerts_stay_until_they_are_over(tmp_path):
    alert = {"event": "alert", "step": 3, "name": "disk", "message": "m", "cause": "c", "fix": "f"}
    write_rows(tmp_path, [BEGIN, alert, {**alert, "name": "loss"}])
    history = read(tmp_path)
    assert [one["name"] for one in history.snapshot()["alerts"]] == ["disk", "loss"]
    write_rows(tmp_path, [{"event": "alert_over", "step": 4, "name": "disk"}], "a")
    history.update()
    assert [one["name"] for one in history.snapshot()["alerts"]] == ["loss"]


def test_decoded_slots_become_figures(tmp_path):
    write_rows(tmp_path, [BEGIN, {"event": "decoded", "step": 8, "samples": [], "acceptance_by_slot": [0.5, 0.25]}])
    assert series(read(tmp_path), "decoded_slot_2") == {"x": [8], "y": [0.25]}


# ---- The overview ----


def comparable(history):
    shown = history.snapshot()
    del shown["generation"]
    return json.dumps(shown, default=lambda array: array.tolist())


def write_overview(folder, **options):
    history = read(folder, **options)
    history.write_overview()
    return (folder / RUN_LOG).stat().st_size


DECODED = {"event": "decoded", "step": 700, "time": 1.0, "samples": [], "acceptance_by_slot": [0.5]}
CHECKPOINT = {"event": "checkpoint", "step": 700, "time": 1.0, "name": "checkpoint-700", "bytes": 5}


def test_with_an_overview_a_log_is_read_from_where_it_ends_and_shows_the_same(tmp_path):
    draw = np.random.default_rng(2).normal(size=2001)
    rows = training_rows(1, 2000, loss=lambda step: draw[step], late=lambda step: step if step > 1500 else None)
    write_rows(tmp_path, [BEGIN, *rows[:700], DECODED, CHECKPOINT, *rows[700:1500]])
    size = write_overview(tmp_path, num_buckets=256)
    write_rows(tmp_path, rows[1500:], "a")
    overview_size = (tmp_path / OVERVIEW).stat().st_size
    quick = read(tmp_path, num_buckets=256)
    assert quick.bytes_read <= overview_size + (tmp_path / RUN_LOG).stat().st_size - size
    (tmp_path / OVERVIEW).unlink()
    assert comparable(quick) == comparable(read(tmp_path, num_buckets=256))


def test_a_run_that_went_on_before_or_behind_its_overview_shows_the_same(tmp_path):
    rows = training_rows(1, 60, loss=float)
    write_rows(tmp_path, [BEGIN, *rows[:40], {**BEGIN, "step": 20}, *rows[20:50]])
    write_overview(tmp_path)
    write_rows(tmp_path, [{**BEGIN, "step": 30}, *rows[30:]], "a")
    quick = read(tmp_path)
    (tmp_path / OVERVIEW).unlink()
    assert comparable(quick) == comparable(read(tmp_path))


def test_an_overview_of_another_log_or_of_other_buckets_is_not_used(tmp_path):
    write_rows(tmp_path, training_rows(1, 50, loss=float))
    write_overview(tmp_path)
    assert series(read(tmp_path, num_buckets=64), "loss")["y"] == list(range(1, 51))
    write_rows(tmp_path, training_rows(1, 60, loss=lambda step: 2.0 * step))
    assert series(read(tmp_path), "loss")["y"] == [2 * step for step in range(1, 61)]
    write_rows(tmp_path, training_rows(1, 3, loss=float))
    assert series(read(tmp_path), "loss")["y"] == [1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"names": 5}, {"names": [["x"]] * 3}, {"names": ["x"] * 10**4}, {"offset": -1}, {"offset": "9"}, {"offset": 10**30},
        {"width": 0}, {"step": 10**20}, {"run": 5}, {"events": [5, None, {"event": "begin"}, {"event": 1, "step": 1}]},
        {"events": 5}, {"alerts": []}, {"alerts": {"x": 5}}, {"moments": [[1]]}, {"time": "x"}, {"digest": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_overview_harms_nothing(change, tmp_path):
    write_rows(tmp_path, [BEGIN, *training_rows(1, 5, loss=float)])
    expected = comparable(read(tmp_path))
    write_overview(tmp_path)
    head, _, body = (tmp_path / OVERVIEW).read_bytes().partition(b"\n")
    (tmp_path / OVERVIEW).write_bytes(json.dumps({**json.loads(head), **change}).encode() + b"\n" + body)
    shown = json.loads(comparable(read(tmp_path)))
    assert shown["series"] == json.loads(expected)["series"] and shown["step"] == 5
    assert all(type(event) is dict for event in shown["events"])


@pytest.mark.parametrize("content", [b"", b"x", b"{}\n", b"[" * 10**6, b"null\n" + bytes(80)], ids=len)
def test_what_is_no_overview_is_passed_over(content, tmp_path):
    write_rows(tmp_path, training_rows(1, 5, loss=float))
    expected = comparable(read(tmp_path))
    (tmp_path / OVERVIEW).write_bytes(content)
    assert comparable(read(tmp_path)) == expected
    write_overview(tmp_path)
    whole = (tmp_path / OVERVIEW).read_bytes()
    (tmp_path / OVERVIEW).write_bytes(whole[: len(whole) // 2])
    assert comparable(read(tmp_path)) == expected
