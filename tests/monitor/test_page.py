# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The page in a real browser, while a real run writes its log."""

import os
import re
import threading

import pytest
from browser import CHROMIUM, launch, open_page
from logs import BEGIN, training_rows, write_rows
from serving import serve
from tiny_training import make_dataset, make_trainer
from transformers import TrainerCallback

from hf_dflash.training.callbacks import AcceptanceCallback


pytest.importorskip("playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with launch() as launched:
        yield launched


class Gate(TrainerCallback):
    """Holds a run at its evaluations until the test has looked."""

    def __init__(self):
        self.evaluated, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step and state.global_step % 6 == 0:
            self.evaluated.release()
            self.go_on.acquire(timeout=60)


def points(page, chart, series=0):
    """The points of a line of a chart, in pixels."""
    line = page.locator(f"#chart-{chart} polyline").nth(series)
    return [tuple(map(float, point.split(","))) for point in line.get_attribute("points").split()]


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def test_the_acceptance_chart_of_a_real_run_moves_while_it_trains(tmp_path, browser):
    gate = Gate()
    trainer = make_trainer(
        tmp_path / "run",
        dataset=make_dataset(40),
        eval_dataset=make_dataset(4, seed=2),
        eval_strategy="steps",
        eval_steps=6,
        acceptance_steps=6,
        save_strategy="steps",
        save_steps=6,
        logging_steps=2,
        max_steps=24,
        callbacks=[gate],
        alert_free_gib=1e9,
    )
    decoding = next(one for one in trainer.callback_handler.callbacks if isinstance(one, AcceptanceCallback))
    decoding.num_prompts, decoding.max_new_tokens = 1, 8
    run = threading.Thread(target=trainer.train, daemon=True)
    run.start()
    assert gate.evaluated.acquire(timeout=120)
    with serve(tmp_path / "run") as (port, _), open_page(browser) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready='6']")
        assert page.locator("#state").inner_text() == "running"
        assert page.locator("h1").inner_text() == "run"
        assert "step 6 of 24 (25.0%)" in page.locator("#progress-text").inner_text()
        assert "GiB are free" in page.locator("#alerts").inner_text()
        before, training_before = points(page, "acceptance", 0), points(page, "acceptance", 2)
        assert len(before) == 1 and len(training_before) == 3

        # The run goes on, the page is not touched.
        for _ in range(2):
            gate.go_on.release()
            assert gate.evaluated.acquire(timeout=120)
        page.wait_for_selector("body[data-ready='18']")
        after = points(page, "acceptance", 0)
        assert len(after) == 3 and len(points(page, "acceptance", 2)) == 9
        assert [x for x, _ in after] == sorted({x for x, _ in after})
        for chart in (
            "loss",
            "slots",
            "decoded-slots",
            "times",
            "step",
            "tokens",
            "anchors",
            "grad-norm",
            "learning-rate",
        ):
            assert page.locator(f"#chart-{chart}").is_visible(), chart
        assert page.locator("#chart-slots rect.heat").count() == 3 * 3
        # On a CPU nobody knows a peak.
        assert page.locator("#chart-mfu").count() == 0
        assert "checkpoint-12 saved" in page.locator("#lists").inner_text()
        assert page.locator("#decoded .rejected").count() > 0
        # HF_DFLASH_SCREENSHOT keeps the picture.
        screenshot = page.screenshot(
            full_page=True, path=os.environ.get("HF_DFLASH_SCREENSHOT", tmp_path / "page.png")
        )
        assert screenshot.startswith(b"\x89PNG") and len(screenshot) > 50_000

        gate.go_on.release()
        run.join(120)
        page.wait_for_selector(".pill.finished")
        assert page.problems == []


def test_of_a_long_log_the_page_draws_what_it_says(tmp_path, browser):
    rows = training_rows(
        1, 30_000, loss=lambda step: 500.0 if step == 20_001 else 2.0, grad_norm=lambda step: step % 7
    )
    write_rows(tmp_path, [{**BEGIN, "run": {"name": "long", "max_steps": 60_000}}, *rows])
    with serve(tmp_path) as (port, history), open_page(browser) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready='30000']")
        assert len(points(page, "loss")) == 30_000 // 32 + 1
        assert page.locator("#chart-loss polygon.band").count() == 1
        # The spike of one step in 30,000 is told to whoever points at it.
        chart = page.locator("#chart-loss svg").bounding_box()
        spike = min(points(page, "loss"), key=lambda point: point[1])
        page.mouse.move(chart["x"] + spike[0], chart["y"] + chart["height"] / 2)
        tip = page.locator("#chart-loss .tip").inner_text()
        assert "(2 to 500)" in tip and abs(numbers(tip)[0] - 20_001) < 100
        # And it stays live without reading the log anew.
        before = history.bytes_read
        added = write_and_measure(tmp_path, training_rows(30_001, 30_005, loss=float))
        page.wait_for_selector("body[data-ready='30005']")
        assert history.bytes_read - before == added
        assert page.problems == []


def write_and_measure(folder, rows):
    path = folder / "run_log.jsonl"
    before = path.stat().st_size
    write_rows(folder, rows, "a")
    return path.stat().st_size - before


HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'></h1><b id=broken>"


def test_hostile_names_events_and_samples_are_shown_as_text(tmp_path, browser):
    run = {
        "name": HOSTILE,
        "max_steps": 10,
        "target": HOSTILE,
        "device": HOSTILE,
        "versions": HOSTILE,
        "block_size": HOSTILE,
    }
    alert = {"event": "alert", "step": 2, "name": HOSTILE, "message": HOSTILE, "cause": HOSTILE, "fix": HOSTILE}
    sample = {"prompt": HOSTILE, "pieces": [[HOSTILE, "accepted"], [HOSTILE, HOSTILE]], "acceptance_length": HOSTILE}
    rows = [
        {**BEGIN, "run": run},
        *training_rows(1, 3, loss=float, **{f"mfu/{HOSTILE}": float, f"eval_{HOSTILE}_acceptance_length": float}),
        {"step": 3, "time": 1003, "__proto__": 1, "constructor": 2, "memory/__proto__": 3},
        alert,
        {"event": "upload_failed", "step": 2, "name": HOSTILE, "place": HOSTILE, "error": HOSTILE},
        {"event": "constructor", "step": 2},
        {"event": "checkpoint", "step": 2, "time": HOSTILE, "name": HOSTILE, "bytes": HOSTILE},
        {"event": "decoded", "step": 3, "samples": [sample], "acceptance_by_slot": [0.5]},
        {"event": "end", "step": 3, "time": 1004.0, "how": HOSTILE},
    ]
    write_rows(tmp_path, rows)
    with serve(tmp_path) as (port, _), open_page(browser) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready='3']")
        assert page.locator("h1").inner_text() == HOSTILE
        for place in ("#alerts", "#lists", "#decoded", "#charts", "#about", "#footer"):
            assert HOSTILE in page.locator(place).inner_text(), place
        assert page.locator("img, b#broken, main script").count() == 0
        page.wait_for_timeout(200)
        assert page.problems == []


def test_another_site_cannot_read_the_run_from_a_browser(tmp_path, browser):
    write_rows(tmp_path, [BEGIN, *training_rows(1, 3, loss=float)])
    (tmp_path / "other").mkdir()
    write_rows(tmp_path / "other", [BEGIN])
    with (
        serve(tmp_path) as (port, _),
        serve(tmp_path / "other") as (other, _),
        open_page(browser) as page,
    ):
        # A page of another origin: the same address, another port.
        page.goto(f"http://127.0.0.1:{other}/monitor.css")
        statuses = []
        page.on("response", lambda answer: statuses.append(answer.status))
        outcome = page.evaluate(
            f"fetch('http://127.0.0.1:{port}/data').then(answer => answer.text()).catch(error => 'refused')"
        )
        assert outcome == "refused" and set(statuses) <= {403}


@pytest.mark.parametrize("width", [390, 1900])
def test_the_page_fits_a_telephone_and_a_wide_screen(width, tmp_path, browser):
    write_rows(tmp_path, [{**BEGIN, "run": {"name": "x" * 200}}, *training_rows(1, 300, loss=float, grad_norm=float)])
    with serve(tmp_path) as (port, _), open_page(browser, width=width, dark=True) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready='300']")
        page.wait_for_selector("#chart-loss polyline")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        svg = page.locator("#chart-loss svg")
        # One unit of the drawing is one pixel, so text is not stretched.
        assert svg.get_attribute("viewBox").split()[2] == str(
            page.evaluate("document.querySelector('svg').clientWidth")
        )


def test_slots_stand_at_the_steps_of_their_own_and_axes_are_labelled(tmp_path, browser):
    """Slot 2 was reached by no block at step 10: its only figure, at step 20, is no figure of step 10."""
    rows = [{"step": step, "time": 1000 + step, **slots(step)} for step in (10, 20)]
    write_rows(tmp_path, [BEGIN, *rows])
    with serve(tmp_path) as (port, _), open_page(browser, width=390) as page:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("body[data-ready='20']")
        chart = page.locator("#chart-slots")
        places = [
            (float(rect.get_attribute("x")), float(rect.get_attribute("y"))) for rect in chart.locator("rect").all()
        ]
        columns = sorted({x for x, _ in places})
        assert len(columns) == 2 and len(places) == 20 * 2 - 1
        second = sorted({y for _, y in places})[1]
        assert [x for x, y in places if y == second] == [columns[1]]
        labels = chart.locator("text").all_text_contents()
        assert {"step", "10", "20", "slot 1", "slot 3", "slot 19", "10.0%"} <= set(labels) and "slot 2" not in labels
        assert page.problems == []


def slots(step):
    return {f"eval_accuracy_slot_{slot}": None if (slot, step) == (2, 10) else 0.1 for slot in range(1, 21)}
