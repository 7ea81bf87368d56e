# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Several drafters with their targets: step time of one pair and of two, who waits, what the all-reduce costs.

    python benchmarks/data_parallel.py --output R.json                                           # one pair, two GPUs
    torchrun --nproc_per_node 2 benchmarks/data_parallel.py --output R.json                      # two pairs, four GPUs
    accelerate launch --config_file recipes/accelerate_configs/two_pairs.yaml benchmarks/data_parallel.py --output R.json
    python benchmarks/data_parallel.py --targets_per_process 3 --output R.json                   # 3 + 1, four GPUs
    torchrun --nproc_per_node 2 benchmarks/data_parallel.py --target_devices same --layers 16    # two GPUs, a pair on each
    torchrun --nproc_per_node 4 benchmarks/data_parallel.py --shapes tiny --use_cpu              # gloo

Each run adds its layout to the file; with one pair and two in it, it also says how they compare. Stages of a run: training
(step time, tokens/s, how long each device waits, whether the ranks' gradients are equal to the last bit behind each step's
all-reduce); the same without an all-reduce, so that the difference is what of it the backward pass does not hide; and, with
`--resume`, a checkpoint in the middle and a run that goes on from it, whose weights must be those of the first. The real
trainer, random weights and documents, the same micro-batches a rank in each layout.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import PACKAGES, version
from random_training import Logs, digest, make_documents, make_target, make_trainer, shapes_of
from transformers import TrainerCallback

from hf_dflash.training.plan import place_targets_of_this_process


# NVLink multicast is not available in every container.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class CompareGradients(TrainerCallback):
    """Whether all ranks are about to take the same step."""

    def __init__(self):
        self.equal = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        own = digest(p.grad for p in model.parameters())
        every = [None] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(every, own)
        self.equal.append(len(set(every)) == 1)


class NoAllReduce(TrainerCallback):
    """Leaves each rank its own gradients: what they cost to exchange is missing, nothing else."""

    def __init__(self):
        self.trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        wrapped = self.trainer.model_wrapped
        if state.global_step == 0 and isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
            wrapped.register_comm_hook(None, _keep)


def _keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Layout:
    """Targets of this process, and runs with them."""

    def __init__(self, arguments):
        use_cpu = arguments.use_cpu
        self.shapes = shapes_of(arguments.shapes, arguments.layers, arguments.token_budget)
        self.accumulation, self.steps = arguments.gradient_accumulation_steps, arguments.steps
        self.places = place_targets_of_this_process(arguments.target_devices, arguments.targets_per_process, use_cpu)
        if not use_cpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        self.targets = [make_target(self.shapes, place) for place in self.places]
        self.options = {
            "gradient_accumulation_steps": self.accumulation,
            "num_anchors": arguments.num_anchors,
            "anchor_ratio": arguments.anchor_ratio,
            "pipeline": arguments.pipeline,
            "compile_layers": arguments.compile_layers,
        }
        # As many micro-batches a rank as an epoch has steps for, whatever the number of ranks.
        self.dataset = make_documents(self.shapes, 4 * self.accumulation * WORLD_SIZE)

    def train(self, steps, *callbacks, resume_from=None, **options) -> tuple:
        logs = Logs()
        trainer = make_trainer(
            self.targets, self.shapes, self.dataset, **{**self.options, "max_steps": steps, **options}
        )
        for callback in (logs, *callbacks):
            if isinstance(callback, NoAllReduce):
                callback.trainer = trainer
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume_from)
        return trainer, logs.lines

    def measure(self, *callbacks) -> dict:
        """As many steps to warm up as are measured."""
        _, lines = self.train(2 * self.steps, *callbacks, logging_steps=self.steps)
        line = lines[-1]
        names = ("tokens_per_second", "anchor_updates_per_second")
        figures = {name: line[name] for name in line if name.startswith(("time/", "mfu/", "memory/")) or name in names}
        figures["drafter waits"] = line["time/wait"] / line["time/step"]
        figures["target waits"] = 1 - line["time/target"] / line["time/step"]
        return figures

    def resume(self) -> dict:
        """A run that saves at its second step, and one that goes on from there."""
        folder = [tempfile.mkdtemp() if RANK == 0 else None]
        if WORLD_SIZE > 1:
            dist.broadcast_object_list(folder)
        options = {"output_dir": folder[0], "logging_steps": 1}
        began = time.perf_counter()
        whole, lines = self.train(4, save_strategy="steps", save_steps=2, **options)
        saved = time.perf_counter()
        resumed, more = self.train(4, resume_from=f"{folder[0]}/checkpoint-2", **options)
        losses = [line["loss"] for line in lines[2:]], [line["loss"] for line in more]
        pairs = list(zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
        difference = max(float((one - other).detach().abs().max()) for one, other in pairs)
        return {
            "weights and losses bit-equal": difference == 0 and losses[0] == losses[1],
            "largest difference of weights": difference,
            "seconds with two checkpoints": saved - began,
            "seconds resumed": time.perf_counter() - saved,
        }


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="qwen36", choices=["qwen36", "small", "tiny"])
    parser.add_argument("--layers", type=int, help="Of the target; 32 of 64 by default.")
    parser.add_argument("--token_budget", type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--num_anchors", default="512", help="A number, or auto; auto may choose another in each run.")
    parser.add_argument("--anchor_ratio", type=float, default=0.25)
    parser.add_argument("--target_devices")
    parser.add_argument("--targets_per_process", type=int, default=1)
    parser.add_argument("--pipeline", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--compile_layers", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--steps", type=int, default=8, help="Measured optimizer steps; as many go before.")
    parser.add_argument("--resume", action="store_true", help="Also save and resume; needs room for two checkpoints.")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)

    layout = Layout(arguments)
    gradients = CompareGradients()
    # Comparing gradients brings them to the host: in a run of its own.
    stages = {"training": layout.measure()}
    if WORLD_SIZE > 1:
        layout.train(2, gradients, logging_steps=2)
        stages["gradients of all ranks bit-equal"] = all(gradients.equal)
        stages["without all-reduce"] = layout.measure(NoAllReduce())
        exposed = 1 - stages["without all-reduce"]["time/step"] / stages["training"]["time/step"]
        stages["share of the step that the all-reduce adds"] = exposed
    if arguments.resume:
        stages["resume"] = layout.resume()
    if RANK == 0:
        add_layout(arguments, layout, stages)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def add_layout(arguments, layout: Layout, stages: dict) -> None:
    """Prints this layout and adds it to the file."""
    device = "cpu" if arguments.use_cpu else torch.cuda.get_device_name()
    name = f"{WORLD_SIZE} x (1 drafter + {len(layout.places)} target(s) on {', '.join(layout.places)})"
    results = {"device": device, "versions": {p: version(p) for p in PACKAGES if version(p)}, "layouts": {}}
    if arguments.output and arguments.output.is_file():
        results |= {"layouts": json.loads(arguments.output.read_text())["layouts"]}
    command = shlex.join(["benchmarks/data_parallel.py", *sys.argv[1:]])
    results["layouts"][name] = {
        "processes": WORLD_SIZE,
        "targets_per_process": len(layout.places),
        "target_layers": layout.shapes.num_target_layers,
        "command": command,
        **json.loads(json.dumps(stages), parse_float=lambda text: float(f"{float(text):.4g}")),
    }
    print(json.dumps({name: results["layouts"][name]}, indent=2), flush=True)
    pairs = {one["processes"]: one for one in results["layouts"].values() if one["targets_per_process"] == 1}
    for processes in sorted(pairs):
        if 1 in pairs and processes > 1:
            rates = [pairs[n]["training"]["tokens_per_second"] for n in (processes, 1)]
            results[f"tokens/s, {processes} pairs : one"] = round(rates[0] / rates[1], 3)
            print(f"tokens/s, {processes} pairs : one = {rates[0] / rates[1]:.3f}", flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
