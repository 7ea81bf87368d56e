# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where two trainings that should be equal to the last bit first differ.

    python benchmarks/bit_equality.py --output benchmarks/results/bit_equality.json     # two GPUs of 80 GB or more, 3 minutes
    python benchmarks/bit_equality.py --attention_backend dense --compile_layers off    # what is left without one or the other
    python benchmarks/bit_equality.py --kernel_options num_stages=1                     # of flex attention
    python benchmarks/bit_equality.py --tiny                                            # any CPU, seconds

The real trainer at the shapes of Qwen3.6-27B with random weights, some steps in each of these ways, twice in turn and twice
ahead, so that a difference between equal ways is seen too:

- *in turn*: the target computes when the drafter asks.
- *ahead*: the target computes on its own device in a thread of its own.
- *ahead, host waits*: as before, but the host waits for all devices between the target and the drafter. Equal to *in turn* where
  *ahead* is not: some order between streams is missing.
- *in turn, memory full of NaN*: free memory holds NaN. Different: a kernel reads what nobody has written.
- *in turn, beside copies*: copies to the drafter's device never stop, as features arrive when the target is ahead. Different: a
  kernel's result depends on how fast memory answers, which is a race inside it.

Signatures (sums of all bits) are taken on the device without a wait of the host: of features and labels as they are taken, and
as they are released, of the blocks, of what each of the drafter's layers puts out, of the loss, and of each parameter's gradient
and value; of features and layers row by row. A report names the first signatures that differ and how many of their rows do, and
says if features changed while they were read.
"""

import argparse
import contextlib
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from random_training import Logs, Shapes, make_documents, make_target, make_trainer, signature, start_report
from transformers import TrainerCallback

from hf_dflash import FrozenTarget
from hf_dflash.drafter import modeling_dflash


@dataclass
class Way:
    """How a run differs from the others."""

    pipeline: str
    host_waits: bool = False
    memory_full_of_nan: bool = False
    beside_copies: bool = False


WAYS = {
    "warm-up": Way("on"),
    "in turn": Way("off"),
    "ahead": Way("on"),
    "in turn, again": Way("off"),
    "ahead, again": Way("on"),
    "ahead, host waits": Way("on", host_waits=True),
    "in turn, memory full of NaN": Way("off", memory_full_of_nan=True),
    "in turn, beside copies": Way("off", beside_copies=True),
}
_NUM_MICRO_BATCHES = 4
_NUM_SHOWN = 6


class Recorder(TrainerCallback):
    """Signatures of whatever passes through a trainer, in order."""

    def __init__(self, trainer, host_waits: bool):
        self.trainer, self.host_waits = trainer, host_waits
        self.names, self.values, self.taken = [], [], None
        pipeline = trainer.pipeline
        self.take, self.release, self.draft, self.loss = pipeline.take, pipeline.release, trainer.draft, trainer._loss
        pipeline.take, pipeline.release = self.take_and_note, self.release_and_note
        trainer.draft, trainer._loss = self.draft_and_note, self.loss_and_note
        trainer.add_callback(self)
        drafter = trainer.accelerator.unwrap_model(trainer.model)
        for name, module in [("fc", drafter.fc), ("hidden_norm", drafter.hidden_norm), ("norm", drafter.norm)] + [
            (f"layer {i}", layer) for i, layer in enumerate(drafter.layers)
        ]:
            module.register_forward_hook(partial(self.note_output, f"output of {name}"))

    def note(self, name: str, tensor: torch.Tensor | None, by_row: bool = False) -> None:
        self.names.append(name)
        if tensor is None:
            self.values.append(torch.zeros((), dtype=torch.long))
        else:
            self.values.append(row_signatures(tensor) if by_row else signature(tensor))

    def note_output(self, name: str, module, arguments, output) -> None:
        self.note(name, output, by_row=True)

    def take_and_note(self):
        features, times = self.take()
        if self.host_waits:
            wait_for_all_devices()
        self.taken = features
        self.note("features, taken", features.context_hidden_states, by_row=True)
        self.note("labels, taken", features.label_ids)
        return features, times

    def release_and_note(self):
        features, self.taken = self.taken, None
        if features is not None:
            self.note("features, released", features.context_hidden_states, by_row=True)
            self.note("labels, released", features.label_ids)
        self.release()

    def draft_and_note(self, model, batch, features):
        for name in (
            "slot_ids",
            "context_index",
            "position_ids",
            "document_ids",
            "anchors",
            "supervised",
            "label_index",
        ):
            self.note(f"blocks, {name}", getattr(batch, name))
        hidden_states, kept_blocks = self.draft(model, batch, features)
        self.note("hidden states", hidden_states)
        self.note("kept blocks", kept_blocks)
        return hidden_states, kept_blocks

    def loss_and_note(self, *args, **kwargs):
        loss, correct = self.loss(*args, **kwargs)
        self.note("loss", loss)
        return loss, correct

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            self.note(f"gradient, {name}", parameter.grad)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            self.note(f"weight, {name}", parameter)
        self.note(f"end of step {state.global_step + 1}", None)

    def changed_while_read(self) -> int:
        """Micro-batches whose features or labels were not released as they were taken."""
        changed = set()
        for what in ("features", "labels"):
            taken, released = (
                [value for name, value in zip(self.names, self.values, strict=True) if name == f"{what}, {moment}"]
                for moment in ("taken", "released")
            )
            changed |= {
                i for i, (one, two) in enumerate(zip(taken, released, strict=True)) if not torch.equal(one, two)
            }
        return len(changed)


def row_signatures(tensor: torch.Tensor) -> torch.Tensor:
    """[`signature`] of each row of the last dimension."""
    tensor = tensor.detach()
    tensor = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return tensor.sum(-1, dtype=torch.long).flatten()


def wait_for_all_devices() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def fill_free_memory(device: torch.device, left_over: int = 24 << 30) -> None:
    """NaN in (nearly) all memory that PyTorch will hand out."""
    if device.type == "cuda":
        size = 1 << 30
        count = max(0, torch.cuda.mem_get_info(device)[0] - left_over) // size
        [torch.full((size // 4,), torch.nan, device=device) for _ in range(count)]


@contextlib.contextmanager
def copies(source: torch.device, destination: torch.device):
    """Copies 256 MB over and over on streams of their own, by a thread; nothing on a CPU."""
    if destination.type != "cuda":
        yield
        return
    stop = threading.Event()

    def copy() -> None:
        data = torch.zeros(1 << 28, dtype=torch.uint8, device=source)
        room = torch.zeros(1 << 28, dtype=torch.uint8, device=destination)
        wait_for_all_devices()
        with torch.cuda.stream(torch.cuda.Stream(destination)), torch.cuda.stream(torch.cuda.Stream(source)):
            while not stop.is_set():
                for _ in range(4):
                    room.copy_(data, non_blocking=True)
                torch.cuda.current_stream(source).synchronize()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(target: FrozenTarget, shapes: Shapes, dataset, steps: int, way: Way, **options) -> tuple[dict, Recorder]:
    """Trains some steps in that way."""
    logs = Logs()
    trainer = make_trainer(
        [target], shapes, dataset, max_steps=steps, logging_steps=steps, pipeline=way.pipeline, **options
    )
    trainer.add_callback(logs)
    recorder = Recorder(trainer, way.host_waits)
    if way.memory_full_of_nan:
        fill_free_memory(trainer.args.device)
    beside = copies(target.device, trainer.args.device) if way.beside_copies else contextlib.nullcontext()
    began = time.perf_counter()
    with beside:
        trainer.train()
    recorder.values = [value.cpu() for value in recorder.values]
    line = logs.lines[-1]
    figures = {
        "seconds": time.perf_counter() - began,
        "loss": line["loss"],
        **{name: value for name, value in line.items() if name.startswith("skipped")},
        "micro-batches whose features changed while they were read": recorder.changed_while_read(),
        "compiled graphs so far": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
    }
    # Models are large, and the recorder outlives the trainer.
    recorder.trainer = recorder.take = recorder.release = recorder.draft = recorder.loss = None
    return figures, recorder


def compare(one: Recorder, other: Recorder) -> dict:
    """How many signatures differ, and which are the first."""
    if one.names != other.names:
        return {"not comparable": "other signatures were taken"}
    differing = [i for i in range(len(one.names)) if not torch.equal(one.values[i], other.values[i])]
    found = {"signatures": len(one.names), "differing": len(differing)}
    if differing:
        step = 1 + sum(name.startswith("end of step") for name in one.names[: differing[0]])
        shown = (describe(one.names[i], one.values[i], other.values[i]) for i in differing[:_NUM_SHOWN])
        found |= {"first in step": step, "first": "; ".join(shown)}
    return found


def describe(name: str, one: torch.Tensor, other: torch.Tensor) -> str:
    """Where signatures differ."""
    if one.dim() == 0 or one.shape != other.shape:
        return name
    rows = (one != other).nonzero().squeeze(1)
    return f"{name} ({len(rows)} of {len(one)} rows, {int(rows[0])} to {int(rows[-1])})"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="Of the target.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--num_anchors", type=int, default=256)
    parser.add_argument("--anchor_ratio", type=float, default=0.125)
    parser.add_argument("--compile_layers", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--attention_backend", default="auto", choices=["auto", "flex", "dense"])
    parser.add_argument(
        "--kernel_options",
        nargs="*",
        default=[],
        metavar="NAME=NUMBER",
        help="Of flex attention, in place of its own.",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)

    report, shapes, _, target_device = start_report("bit_equality.py", argv, arguments)
    options = {"num_anchors": arguments.num_anchors, "anchor_ratio": arguments.anchor_ratio}
    options |= {"compile_layers": arguments.compile_layers, "attention_backend": arguments.attention_backend}
    for option in arguments.kernel_options:
        key, _, number = option.partition("=")
        for of_some_widths in (modeling_dflash.ANY_TILES, modeling_dflash.FILLED_TILES):
            of_some_widths[key] = int(number)
    target, dataset = make_target(shapes, target_device), make_documents(shapes, _NUM_MICRO_BATCHES)
    recorders: dict[str, Recorder] = {}

    def measure(name: str) -> dict:
        figures, recorders[name] = run(target, shapes, dataset, arguments.steps, WAYS[name], **options)
        return figures | (compare(recorders["in turn"], recorders[name]) if "in turn" in recorders else {})

    for name in WAYS:
        report.run(name, partial(measure, name), 240 if name == "warm-up" else 60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
