# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Targets that compute ahead of the drafter: how close whole optimizer steps come to the slower side alone.

    python benchmarks/pipeline.py --output benchmarks/results/pipeline.json      # two GPUs of 80 GB or more, 4 minutes
    python benchmarks/pipeline.py --tiny                                          # any CPU, seconds

The real trainer (optimizer included) at the shapes of Qwen3.6-27B with random weights and `--layers` of its 64 layers, so
that one GPU can hold both sides too. `--num_anchors auto` of the trainer balances them in a first run, in which everything
compiles. Then, each with a fresh drafter of the same weights: both at the same time on two GPUs, the target alone (with its
hand-over), the drafter alone (features lie ready), both in turn on two GPUs, and in turn on one. Losses and weights ahead and
in turn must be equal to the last bit; benchmarks/bit_equality.py says what differs first if they are not. Memory: a small model
for `--memory-steps` steps; the peak of each tenth of them.
"""

import argparse
import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from measuring import Report, synchronize
from random_training import Logs, digest, make_documents, make_target, make_trainer, shapes_of, start_report
from transformers import TrainerCallback

from hf_dflash import FrozenTarget
from hf_dflash.target.frozen_target import upload
from hf_dflash.target.moment import Moment
from hf_dflash.target.pipeline import FeaturePipeline, FeatureTimes


# An epoch; as many steps at least are needed to warm up.
NUM_MICRO_BATCHES = {"qwen36": 4, "small": 4, "tiny": 2}


class ReadyFeatures(FeaturePipeline):
    """Features of earlier epochs: the drafter alone. Labels are made up, for other positions are asked in each epoch."""

    def __init__(self, targets):
        super().__init__(targets, asynchronous=False)
        self.kept = {}

    def take(self):
        request = self._tickets[0].request
        key = tuple(request.row_ids)
        if key not in self.kept:
            features, _ = super().take()
            self.kept[key] = replace(features, label_ids=None)
            return features, _no_times(self.device)
        self._tickets.popleft()
        label_ids = upload(torch.zeros(len(request.label_positions), dtype=torch.long), self.device)
        return replace(self.kept[key], label_ids=label_ids), _no_times(self.device)


class FirstStep(TrainerCallback):
    """When the first step was launched, which is when what it needs has been compiled."""

    end = None

    def on_step_end(self, args, state, control, **kwargs):
        self.end = self.end or time.perf_counter()


def _no_times(device) -> FeatureTimes:
    now = Moment(device)
    return FeatureTimes((now, now))


def run(targets, shapes, dataset, steps: int, pipeline_class=None, **options) -> dict:
    """Trains `steps` steps to warm up and `steps` more, which the last log line is about."""
    logs = Logs()
    trainer = make_trainer(targets, shapes, dataset, max_steps=2 * steps, logging_steps=steps, **options)
    trainer.add_callback(logs)
    if pipeline_class is not None:
        trainer.pipeline = pipeline_class(trainer.targets)
    first_step = FirstStep()
    trainer.add_callback(first_step)
    began = time.perf_counter()
    trainer.train()
    line = logs.lines[-1]
    figures = {name: line[name] for name in line if name.startswith(("time/", "memory/", "mfu/"))}
    return {
        "ms per step": 1e3 * line["time/step"],
        "tokens_per_second": line["tokens_per_second"],
        "seconds in all": time.perf_counter() - began,
        "seconds to the end of the first step": first_step.end - began,
        **figures,
        "losses": [one["loss"] for one in logs.lines],
        "weights": digest(trainer.model.parameters()),
        "num_anchors": trainer.args.num_anchors,
        "anchor_ratio": trainer.args.anchor_ratio,
    }


def read_micro_batches(trainer) -> list:
    loader = trainer.get_train_dataloader()
    sampler, rows = loader.batch_sampler, trainer.train_dataset
    picked = (loader.collate_fn([rows[row] for row in sampler.global_batch(i)]) for i in range(len(sampler)))
    return [trainer.draw(batch, 0) for batch in picked]


def time_target(targets, shapes, dataset, steps: int, **options) -> dict:
    """Forward passes and hand-overs, one behind the other, with nobody who trains."""
    trainer = make_trainer(targets, shapes, dataset, max_steps=1, **options)
    batches = read_micro_batches(trainer)

    @contextmanager
    def measuring():
        synchronize(trainer.args.device)
        began = time.perf_counter()
        yield
        synchronize(trainer.args.device)
        result["ms per step"] = 1e3 * (time.perf_counter() - began) / steps

    result = {}
    with trainer.pipeline as pipeline:
        for _ in range(2):  # the first time to warm up
            with measuring():
                requests = [trainer.request_of(batches[i % len(batches)]) for i in range(steps)]
                for request in requests:
                    pipeline.submit(request)
                for _ in requests:
                    pipeline.take()
                    pipeline.release()
    return result


def measure_memory(targets, shapes, dataset, steps: int, **options) -> dict:
    """Peaks of each tenth of a run, of which the first two may still grow (compilers, pools); on a CPU, of the process."""
    peaks = []

    class Watch(Logs):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "memory/drafter" in logs:
                peaks.append([logs["memory/drafter"], logs["memory/target"]])
            elif "loss" in logs:
                peaks.append([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 0.0])

    trainer = make_trainer(targets, shapes, dataset, max_steps=steps, logging_steps=max(1, steps // 10), **options)
    trainer.add_callback(Watch())
    trainer.train()
    drafter, target = ([round(pair[side], 4) for pair in peaks] for side in (0, 1))
    flat = all(max(side[2:]) <= 1.01 * side[2] for side in (drafter, target))
    return {"steps": steps, "drafter GiB": drafter, "target GiB": target, "flat from the third tenth on": flat}


class Stages:
    """Runs those that were asked for, and keeps their results."""

    def __init__(self, report: Report, wanted: list[str] | None):
        self.report, self.wanted, self.results = report, wanted, {}

    def __call__(self, name: str, measure, seconds: int = 150) -> dict:
        if self.wanted is None or name in self.wanted:
            self.results[name] = self.report.run(name, measure, seconds) or {}
        return self.results.get(name, {})

    def ratio(self, name: str, above: str, *below: str) -> None:
        times = [self.results.get(stage, {}).get("ms per step") for stage in (above, *below)]
        if all(times):
            self.report.ratio(name, times[0], max(times[1:]))


def measure_speed(stage: Stages, shapes, drafter_device: str, target_device: str, steps: int, **options) -> None:
    dataset = make_documents(shapes, NUM_MICRO_BATCHES[shapes.name])
    target = make_target(shapes, target_device)
    # Where both sides share a device, computing ahead has to be asked for.
    shares, ahead = target_device == drafter_device, {"pipeline": "on"} if target_device == drafter_device else {}
    balance = stage("balance", lambda: run([target], shapes, dataset, steps, num_anchors="auto", **options, **ahead))
    # What that run found, for all others; everything is compiled by now.
    for name, value in (("num_anchors", 512), ("anchor_ratio", 0.25)):
        options[name] = balance.get(name, value)
    first = stage("at the same time", lambda: run([target], shapes, dataset, steps, **options, **ahead))
    stage("target alone", lambda: time_target([target], shapes, dataset, steps, **options, **ahead))
    stage("drafter alone", lambda: run([target], shapes, dataset, steps, pipeline_class=ReadyFeatures, **options))
    second = stage("in turn", lambda: run([target], shapes, dataset, steps, pipeline="off", **options))
    if first.get("losses") and second.get("losses"):
        equal = all(first[name] == second[name] for name in ("losses", "weights"))
        stage.report.add("at the same time and in turn", {"losses and weights bit-equal": equal})
    last = "in turn"
    if not shares:
        last = "in turn, on one device"
        on_one = FrozenTarget(target.model.to(drafter_device), target.layer_ids)
        stage(last, lambda: run([on_one], shapes, dataset, steps, pipeline="off", **options))
    stage.ratio(
        "step : the slower side alone (goal 1.05 or less)", "at the same time", "target alone", "drafter alone"
    )
    stage.ratio("balance, target : drafter", "target alone", "drafter alone")
    stage.ratio("in turn on one device : at the same time (goal 1.9 or more)", last, "at the same time")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, help="Of the target; 32 by default: with a drafter they fit 139 GiB.")
    parser.add_argument("--steps", type=int, default=12, help="Measured steps; as many go before.")
    parser.add_argument("--memory-steps", type=int, default=500)
    parser.add_argument("--compile_layers", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--stages", nargs="*", help="Only these.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)

    report, shapes, drafter_device, target_device = start_report("pipeline.py", argv, arguments)
    stage = Stages(report, arguments.stages)
    options = {"compile_layers": arguments.compile_layers}
    measure_speed(stage, shapes, drafter_device, target_device, 2 if arguments.tiny else arguments.steps, **options)

    small = shapes_of("tiny" if drafter_device == "cpu" else "small")
    small_target, rows = make_target(small, target_device), make_documents(small, NUM_MICRO_BATCHES[small.name])
    options |= {"pipeline": "on"}
    num_steps = 10 if arguments.tiny else arguments.memory_steps
    stage("memory", lambda: measure_memory([small_target], small, rows, num_steps, **options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
