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

from hf_dflash.atomic_files import write_json


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
        shown = {k: v for k, v in rounded.items() if not isinstance(v, list)}
        print(f"[{time.perf_counter() - self.start:6.1f} s] {stage}: {shown}", flush=True)
        self.save()
        return values

    def save(self) -> None:
        if self.output:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.output, self.results)

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


def profile(run: Callable[[], object], device: torch.device, top: int = 25) -> dict:
    """Milliseconds of one run by kind of kernel, and the kernels that take longest (printed, and saved by name).

    Args:
        run (`Callable`): warmed up.
        top (`int`, *optional*, defaults to 25): kernels to name.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    is_cuda = device.type == "cuda"
    run()
    synchronize(device)
    with record(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as recorded:
        run()
        synchronize(device)
    kernels = []
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if microseconds:
            kernels.append((microseconds / 1e3, event.count, event.key))
    kernels.sort(reverse=True)
    kinds = {}
    for elapsed, count, name in kernels[:top]:
        print(f"{elapsed:9.3f} ms {count:5d} x  {name[:130]}", flush=True)
    for elapsed, _, name in kernels:
        kind = kind_of_kernel(name)
        kinds[kind] = kinds.get(kind, 0.0) + elapsed
    return {
        **kinds,
        "all ms": sum(kinds.values()),
        "kernels": [
            {"ms": round(elapsed, 3), "calls": count, "name": name[:130]} for elapsed, count, name in kernels[:top]
        ],
    }


KINDS_OF_KERNELS = {
    "attention ms": ("flex_attention", "flash", "fmha", "attention"),
    "delta rule ms": ("chunk_", "gated_delta", "solve_tril", "recompute_w_u", "merge_16x16", "kkt"),
    "loss ms": ("cross_entropy",),
    "products ms": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk", "aten::mm", "aten::addmm", "aten::bmm"),
    "copies ms": ("memcpy", "memset"),
}


def kind_of_kernel(name: str) -> str:
    """What a kernel does, by its name; the first kind that fits."""
    lowered = name.lower()
    for kind, parts in KINDS_OF_KERNELS.items():
        if any(part in lowered for part in parts) and not lowered.startswith(
            ("triton_poi", "triton_red", "triton_per")
        ):
            return kind
    return "element-wise and sums ms"
