# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What the benchmarks of speed share: stages with a time limit whose results are printed and saved as soon as they are known."""

import contextlib
import gc
import importlib.metadata
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Report:
    """
    Results by stage; printed and written after each of them, so that a run that is cut off loses nothing that it measured.

    Args:
        output (`Path`, *optional*): the JSON file.
        settings: what was measured (shapes, say).
    """

    def __init__(self, output: Path | None, device: torch.device, **settings):
        self.output, self.start = output, time.perf_counter()
        self.results = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "versions": {name: version(name) for name in PACKAGES if version(name)},
            **settings,
            "stages": {},
        }
        print(json.dumps({key: value for key, value in self.results.items() if key != "stages"}), flush=True)

    def add(self, stage: str, values: dict) -> dict:
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        self.results["stages"][stage] = rounded
        print(f"[{time.perf_counter() - self.start:6.1f} s] {stage}: {rounded}", flush=True)
        self.save()
        return values

    def save(self) -> None:
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(json.dumps(self.results, indent=2) + "\n")

    def run(self, stage: str, measure: Callable[[], dict], seconds: int = 120) -> dict | None:
        """Runs a stage; says why, where it has no result."""
        print(f"[{time.perf_counter() - self.start:6.1f} s] {stage} ...", flush=True)
        try:
            with time_limit(seconds):
                return self.add(stage, measure())
        except Exception as error:
            message = " ".join(str(error).split())
            self.add(stage, {"not measured": f"{type(error).__name__}: {message[:400]}"})
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def ratio(self, name: str, above: float | None, below: float | None) -> None:
        if above and below:
            self.results.setdefault("ratios", {})[name] = round(above / below, 3)
            print(f"{name}: {above / below:.2f}", flush=True)
            self.save()


PACKAGES = "torch triton transformers speculators nvidia-modelopt flash-linear-attention liger-kernel".split()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def time_limit(seconds: int):
    def stop(*args):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median over `repeats` runs that follow one another without a wait of the host, as in training."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return sorted(times)[len(times) // 2]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    times = sorted(begin.elapsed_time(end) for begin, end in zip(events, events[1:], strict=False))
    return times[len(times) // 2]


def peak_gib(run: Callable[[], object], device: torch.device) -> float | None:
    """Most memory that PyTorch held while `run` ran, in GiB; what stood there before is counted too."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30
