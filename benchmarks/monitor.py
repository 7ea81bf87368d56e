# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The monitor: how soon the page of a long log is there, and what watching costs a training loop.

    python benchmarks/monitor.py --output benchmarks/results/monitor.json
    python benchmarks/monitor.py --num_lines 2000 --num_steps 10      (a try-out)

1. A log of 200,000 lines, one a step: the server opens it, a headless Chromium shows its page, ten lines more arrive. Once with
   the overview that training leaves beside the log (999 lines behind it), once without. Plain `json` over the same file is the
   other side. Without Chromium and playwright only the server is timed.
2. One training run with `--run_log` and alerts, one without, of the same steps; and the time inside the watching callbacks.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
import uvicorn
from starlette import __version__ as starlette_version

from hf_dflash.monitor.history import RunHistory
from hf_dflash.monitor.run_log import RUN_LOG, RunLog
from hf_dflash.monitor.server import create_app


TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "monitor")]

SLOTS = 15


def figures_at(step: int, num_steps: int, draw: random.Random) -> dict:
    """A log that looks like one of the reference job; every figure that the trainer logs."""
    done = step / num_steps
    noise = draw.gauss
    step_seconds = 1.55 + noise(0, 0.04)
    wait = 0.08 + 0.03 * math.sin(step / 900) ** 2
    return {
        "loss": 1.9 + 6 * math.exp(-9 * done) + noise(0, 0.05),
        "grad_norm": 0.4 + 2 * math.exp(-30 * done) + abs(noise(0, 0.05)) + (8 if draw.random() < 2e-5 else 0),
        "learning_rate": 6e-4 * min(1, done / 0.04) * (1 + math.cos(math.pi * done)) / 2,
        "accuracy": 0.45 - 0.4 * math.exp(-7 * done) + noise(0, 0.01),
        "anchor_acceptance_length": 4.6 - 3.5 * math.exp(-6 * done) + noise(0, 0.06),
        "blocks": 3600 + int(noise(0, 90)),
        "context_tokens": 16200 + int(noise(0, 130)),
        "padding_waste": 0.031 + noise(0, 0.004),
        "tokens_per_second": 16200 / step_seconds,
        "anchor_updates_per_second": 3600 / step_seconds,
        "time/step": step_seconds,
        "time/target": step_seconds * 0.9,
        "time/drafter": step_seconds - wait - 0.03,
        "time/transfer": 0.03,
        "time/wait": wait,
        "mfu/target": 0.44 + noise(0, 0.01),
        "mfu/drafter": 0.36 + noise(0, 0.01),
        "memory/target": 71.3,
        "memory/drafter": 96.2,
        "epoch": 6 * done,
    }


def write_log(folder: Path, num_lines: int, num_steps: int | None = None, seed: int = 0) -> int:
    """
    A made-up run log.

    Args:
        folder (`Path`): where it goes.
        num_lines (`int`): lines with figures of training.
        num_steps (`int`, *optional*): of the whole run; the log ends with it by default.
        seed (`int`, *optional*, defaults to 0): of the noise.

    Returns:
        `int`: its size in bytes.
    """
    num_steps, draw = num_steps or num_lines, random.Random(seed)
    every = max(1, num_lines // 80)
    now = time.time() - 1.6 * num_lines

    def rows():
        run = {
            "name": "qwen3.6-27b-drafter",
            "max_steps": num_steps,
            "num_train_epochs": 6,
            "target": "Qwen/Qwen3.6-27B",
        }
        run |= {"num_hidden_layers": 5, "block_size": SLOTS + 1, "world_size": 2, "device": "made-up figures"}
        yield {"event": "begin", "step": 0, "time": now, "run": run}
        for step in range(1, num_lines + 1):
            at = {"step": step, "time": round(now + 1.6 * step, 2)}
            yield at | {name: float(f"{value:.6g}") for name, value in figures_at(step, num_steps, draw).items()}
            if step % every == 0:
                length = 4.1 - 3.1 * math.exp(-6 * step / num_steps) + draw.gauss(0, 0.02)
                share = 1 - 1 / length
                by_slot = [max(0.0, share ** (1 + 0.5 * slot)) for slot in range(SLOTS)]
                slots = {f"eval_accuracy_slot_{slot}": value**0.6 for slot, value in enumerate(by_slot, start=1)}
                yield (
                    at
                    | {"eval_loss": 2.05 + 6 * math.exp(-8 * step / num_steps), "eval_acceptance_length": length}
                    | slots
                )
                yield at | {"decoded_acceptance_length": length - 0.02, "simulated_acceptance_length": length - 0.02}
                yield {"event": "decoded", **at, "acceptance_by_slot": by_slot, "samples": []}
            if step % (2 * every) == 0:
                yield {"event": "checkpoint", **at, "name": f"checkpoint-{step}", "bytes": 27 * 2**30}

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / RUN_LOG, "w", encoding="utf-8") as file:
        for row in rows():
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return (folder / RUN_LOG).stat().st_size


def leave_overview(folder: Path, num_lines_behind: int = 999) -> None:
    """What training leaves beside its log, at the worst moment: just before the next one."""
    log = folder / RUN_LOG
    lines = log.read_bytes().splitlines(keepends=True)
    behind = b"".join(lines[-num_lines_behind:]) if num_lines_behind < len(lines) else b""
    with open(log, "rb+") as file:
        file.truncate(log.stat().st_size - len(behind))
        history = RunHistory(folder)
        history.update()
        history.write_overview()
        file.seek(0, os.SEEK_END)
        file.write(behind)


# ---- 1. The page of a long log ----


@contextmanager
def served(folder: Path):
    """Yields the address and the [`RunHistory`]; the server starts with nothing read."""
    history = RunHistory(folder)
    server = uvicorn.Server(uvicorn.Config(create_app(history), "127.0.0.1", 0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", history
    finally:
        server.should_exit = True
        thread.join()


def measure_reading(folder: Path) -> dict:
    """Seconds to read a log into a history, and to read it with the standard library into nothing."""
    began = time.perf_counter()
    history = RunHistory(folder)
    history.update()
    ours = time.perf_counter() - began
    began = time.perf_counter()
    history.snapshot()
    snapshot = time.perf_counter() - began
    began = time.perf_counter()
    with open(folder / RUN_LOG, encoding="utf-8") as file:
        for line in file:
            json.loads(line)
    return {"read_seconds": ours, "snapshot_seconds": snapshot, "plain_json_seconds": time.perf_counter() - began}


def measure_page(folder: Path) -> dict:
    """Seconds from asking for the page until every chart shows the whole log, and what ten lines more cost; empty without a browser."""
    from browser import CHROMIUM, launch, open_page

    if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        return {}
    size = (folder / RUN_LOG).stat().st_size
    with launch() as browser:
        with served(folder) as (address, history), open_page(browser) as page:
            began = time.perf_counter()
            page.goto(address, wait_until="commit")
            page.wait_for_selector("#chart-loss polyline")
            first = time.perf_counter() - began
            page.wait_for_selector("body[data-ready]")
            whole = time.perf_counter() - began
            last = int(page.locator("body").get_attribute("data-ready"))
            before = history.bytes_read
            log = RunLog(folder)
            for step in range(last + 1, last + 11):
                log.add_figures(step, figures_at(step, last, random.Random(step)))
            log.close()
            page.wait_for_selector(f"body[data-ready='{last + 10}']")
            more = history.bytes_read - before
            written = (folder / RUN_LOG).stat().st_size - size
    return {
        "first_chart_seconds": first,
        "whole_log_seconds": whole,
        "bytes_read_for_ten_more_lines": more,
        "bytes_of_ten_more_lines": written,
    }


# ---- 2. What watching costs ----


def measure_cost(num_steps: int) -> dict:
    """
    The same tiny run with and without run log and alerts, turn by turn, and the time inside the watching callbacks.

    A step of this run takes tens of milliseconds, one of a real run a hundred times as long, so the share is an upper bound;
    and it logs every step, the default is every tenth.
    """
    from tiny_training import make_dataset, make_trainer

    from hf_dflash.training.run_watch import AlertCallback, RunLogCallback

    seconds = {True: [], False: []}
    inside = 0.0

    def timed(function):
        def call(*args, **kwargs):
            nonlocal inside
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                inside += time.perf_counter() - began

        return call

    def train(run_log: bool, logging_steps: int) -> float:
        folder = tempfile.mkdtemp()
        trainer = make_trainer(
            folder,
            run_log=run_log,
            dataset=make_dataset(256, longest=400),
            token_budget=2048,
            max_steps=num_steps,
            num_train_epochs=100,
            logging_steps=logging_steps,
        )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, RunLogCallback | AlertCallback):
                for event in ("on_step_end", "on_log", "on_save"):
                    setattr(callback, event, timed(getattr(callback, event)))
        if not run_log:
            for kind in (RunLogCallback, AlertCallback):
                trainer.remove_callback(kind)
        began = time.perf_counter()
        with open(os.devnull, "w") as nowhere:
            kept, sys.stdout = sys.stdout, nowhere
            try:
                trainer.train()
            finally:
                sys.stdout = kept
        taken = time.perf_counter() - began
        shutil.rmtree(folder)
        return taken

    train(True, 1)
    inside = 0.0
    for _ in range(3):
        for run_log in (True, False):
            seconds[run_log].append(train(run_log, logging_steps=1))
    each_step = inside / sum(seconds[True])
    inside = 0.0
    default = train(True, logging_steps=10)
    return {
        "num_steps": num_steps,
        "watched_seconds": min(seconds[True]),
        "unwatched_seconds": min(seconds[False]),
        "ratio": min(seconds[True]) / min(seconds[False]),
        "share_inside_callbacks_logging_each_step": each_step,
        "share_inside_callbacks_logging_each_tenth": inside / default,
        "milliseconds_a_step": 1000 * min(seconds[False]) / num_steps,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_lines", type=int, default=200_000)
    parser.add_argument("--num_steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp())
    try:
        size = write_log(folder, args.num_lines)
        without = measure_reading(folder) | measure_page(folder)
        leave_overview(folder)
        results = {
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "starlette": starlette_version,
                "uvicorn": uvicorn.__version__,
            },
            "device": f"CPU, {os.cpu_count()} cores",
            "num_lines": args.num_lines,
            "log_bytes": size,
            "without_overview": without,
            "with_overview": measure_reading(folder) | measure_page(folder),
            "cost": measure_cost(args.num_steps),
        }
    finally:
        shutil.rmtree(folder)

    for name, value in results.items():
        if not isinstance(value, dict):
            print(f"{name:34} {value:.3f}" if isinstance(value, float) else f"{name:34} {value}")
    for part in ("with_overview", "without_overview", "cost"):
        print(f"{part}:")
        for name, value in results[part].items():
            print(f"  {name:42} {value:.5f}" if isinstance(value, float) else f"  {name:42} {value}")
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
