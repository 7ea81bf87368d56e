# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where a training step's time goes with a small target, whose launches weigh as much as its work: target, drafter and Muon.

    python benchmarks/small_target_step.py --target SmolLM2-135M-Instruct --work quality_work     # one GPU
    python benchmarks/small_target_step.py --tiny                                                  # any CPU

The runs of benchmarks/quality.py (its settings, rows and trainer). Prints the time of a step, Python's functions by their own
time and with what they call, and PyTorch's profile by device time and by host time.
"""

import cProfile
import pstats
import time

import quality
import torch
from measuring import synchronize
from quality_tiny import make_tiny
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback


class Watch(TrainerCallback):
    """Times some steps, then looks at some in Python's profiler, then at a few in PyTorch's."""

    def __init__(self, name: str, device: torch.device, warm_up: int, timed: int, in_python: int, in_torch: int):
        self.name, self.device = name, device
        self.in_python, self.in_torch = in_python, in_torch
        self.begin, self.end = warm_up, warm_up + timed
        self.python_end = self.end + in_python
        self.stop = self.python_end + in_torch
        self.calls, self.recorded = cProfile.Profile(), None
        self.milliseconds = None

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step == self.begin:
            synchronize(self.device)
            self.began = time.perf_counter()
        elif step == self.end:
            synchronize(self.device)
            self.milliseconds = (time.perf_counter() - self.began) / (self.end - self.begin) * 1e3
            print(f"{self.name}: {self.milliseconds:.1f} ms a step", flush=True)
            self.calls.enable()
        elif step == self.python_end:
            self.calls.disable()
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.recorded = profile(activities=activities)
            self.recorded.__enter__()
        elif step == self.stop:
            synchronize(self.device)
            self.recorded.__exit__(None, None, None)
            control.should_training_stop = True

    def print_profiles(self) -> None:
        print(f"Python, {self.in_python} steps of {self.name}:")
        pstats.Stats(self.calls).sort_stats("tottime").print_stats(20)
        pstats.Stats(self.calls).sort_stats("cumtime").print_stats(
            "hf_dflash|transformers|accelerate|optim|autograd", 60
        )
        averages = self.recorded.key_averages()
        orders = ["self_cpu_time_total"] + ["self_cuda_time_total"] * (self.device.type == "cuda")
        for order in orders:
            print(f"PyTorch, {self.in_torch} steps of {self.name}, by {order}:")
            print(averages.table(sort_by=order, row_limit=18, max_name_column_width=60), flush=True)


def main(argv: list[str] | None = None) -> float:
    parser = quality.make_parser(__doc__)
    parser.set_defaults(setting=("muon_dpace", 0))
    parser.add_argument("--steps", type=int, default=30, help="timed ones")
    arguments = parser.parse_args(argv)
    windows, tokens = (20, arguments.steps, 10, 5), 2e6
    if arguments.tiny:
        make_tiny(arguments)
        windows, tokens = (1, 1, 1, 1), 1e4
    elif arguments.target is None:
        parser.error("--target is needed")
    device, setting = quality.device_of(arguments), arguments.setting[0]
    name = f"{setting}, {arguments.attention} attention, compiled layers {arguments.compile}"
    watch = Watch(name, torch.device(device), *windows)
    trainer = quality.make_trainer(arguments, setting, 0, tokens, arguments.work / "profile", device, [watch])
    trainer.train()
    watch.print_profiles()
    return watch.milliseconds


if __name__ == "__main__":
    main()
