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
- *ahead, target waits*: its thread waits for its device before and after each forward pass. Equal: launches that run ahead of
  the device go wrong.
- *ahead, one thread at a time*: no thread is interrupted, only waits let another one go on. Equal: two threads get into each
  other's way while they launch.
- *ahead, by host*: features pass through the host's memory. Equal: the copy from device to device goes wrong.
- *in turn, memory full of NaN*: free memory holds NaN. Different: a kernel reads what nobody has written.
- *in turn, beside copies*: copies to the drafter's device never stop, as features arrive when the target is ahead. Different: a
  kernel's result depends on how fast memory answers, which is a race inside it.

Signatures (sums of all bits) are taken on the device without a wait of the host: of features and labels as they are taken, and
as they are released, of the blocks, of what each of the drafter's layers puts out, of the loss, and of each parameter's gradient
and value; of features and layers row by row. A report names the first signatures that differ and how many of their rows do, and
says if features changed while they were read. So much for the drafter's side; of the target's the same is said about what it
reads, what each layer puts out, and features before they are sent.
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
from hf_dflash.target.pipeline import FeatureRequest


@dataclass
class Way:
    """How a run differs from the others."""

    pipeline: str
    host_waits: bool = False
    target_waits: bool = False
    one_thread_at_a_time: bool = False
    by_host: bool = False
    memory_full_of_nan: bool = False
    beside_copies: bool = False


WAYS = {
    "warm-up": Way("on"),
    "in turn": Way("off"),
    "ahead": Way("on"),
    "in turn, again": Way("off"),
    "ahead, again": Way("on"),
    "ahead, host waits": Way("on", host_waits=True),
    "ahead, target waits": Way("on", target_waits=True),
    "ahead, one thread at a time": Way("on", one_thread_at_a_time=True),
    "ahead, by host": Way("on", by_host=True),
    "in turn, memory full of NaN": Way("off", memory_full_of_nan=True),
    "in turn, beside copies": Way("off", beside_copies=True),
}
_NUM_MICRO_BATCHES = 4
_NUM_SHOWN = 6


class Notes:
    """Named signatures, in order."""

    def __init__(self):
        self.names, self.values = [], []

    def note(self, name: str, tensor: torch.Tensor | None, by_row: bool = False) -> None:
        self.names.append(name)
        if tensor is None:
            self.values.append(torch.zeros((), dtype=torch.long))
        else:
            self.values.append(row_signatures(tensor) if by_row else signature(tensor))

    def note_output(self, name: str, module, arguments, output) -> None:
        self.note(name, output[0] if isinstance(output, tuple) else output, by_row=True)

    def read(self) -> None:
        """Brings them to the host."""
        self.values = [value.cpu() for value in self.values]


class TargetRecorder(Notes):
    """Signatures of a target's forward passes, noted by the thread that runs them."""

    def __init__(self, target: FrozenTarget, waits: bool):
        super().__init__()
        self.target, self.waits, self.run = target, waits, FeatureRequest.run
        modules = {"norm": target.decoder.norm, "embedding": target.decoder.embed_tokens}
        modules |= {f"layer {i}": layer for i, layer in enumerate(target.decoder.layers)}
        self.handles = [
            module.register_forward_hook(partial(self.note_output, f"output of the target's {name}"))
            for name, module in modules.items()
        ]
        # The drafter may use the same embedding.
        self.thread = None
        recorder = self

        def run_and_note(request, *arguments):
            if recorder.waits:
                wait_for_all_devices()
            recorder.thread = threading.get_ident()
            features = recorder.run(request, *arguments)
            recorder.thread = None
            recorder.note("features, before they are sent", features.context_hidden_states, by_row=True)
            recorder.note("labels, before they are sent", features.label_ids)
            recorder.note("end of micro-batch", None)
            if recorder.waits:
                wait_for_all_devices()
            return features

        FeatureRequest.run = run_and_note

    def note_output(self, name: str, module, arguments, output) -> None:
        if self.thread == threading.get_ident():
            super().note_output(name, module, arguments, output)

    def stop(self) -> None:
        FeatureRequest.run = self.run
        for handle in self.handles:
            handle.remove()
        self.target = self.handles = None


class Recorder(Notes, TrainerCallback):
    """Signatures of whatever passes through a trainer."""

    def __init__(self, trainer, host_waits: bool):
        super().__init__()
        self.host_waits, self.taken, self.samples = host_waits, None, []
        pipeline = trainer.pipeline
        self.take, self.release, self.draft, self.loss = pipeline.take, pipeline.release, trainer.draft, trainer._loss
        pipeline.take, pipeline.release = self.take_and_note, self.release_and_note
        trainer.draft, trainer._loss = self.draft_and_note, self.loss_and_note
        trainer.add_callback(self)
        drafter = trainer.accelerator.unwrap_model(trainer.model)
        modules = {"fc": drafter.fc, "hidden_norm": drafter.hidden_norm, "norm": drafter.norm}
        modules |= {f"layer {i}": layer for i, layer in enumerate(drafter.layers)}
        for name, module in modules.items():
            module.register_forward_hook(partial(self.note_output, f"output of {name}"))

    def take_and_note(self):
        features, times = self.take()
        if self.host_waits:
            wait_for_all_devices()
        self.taken = features
        self.samples.append(
            features.context_hidden_states[:: max(1, len(features.context_hidden_states) // 64)].float()
        )
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
    recorder, of_target = Recorder(trainer, way.host_waits), TargetRecorder(target, way.target_waits)
    for route in trainer.pipeline._routes:
        route.is_direct = getattr(route, "is_direct", True) and not way.by_host
    if way.memory_full_of_nan:
        for device in {trainer.args.device, target.device}:
            fill_free_memory(device)
    beside = copies(target.device, trainer.args.device) if way.beside_copies else contextlib.nullcontext()
    began = time.perf_counter()
    interval = sys.getswitchinterval()
    if way.one_thread_at_a_time:
        sys.setswitchinterval(1e3)
    try:
        with beside:
            trainer.train()
    finally:
        sys.setswitchinterval(interval)
        of_target.stop()
    recorder.read()
    of_target.read()
    recorder.samples = [sample.cpu() for sample in recorder.samples]
    line = logs.lines[-1]
    figures = {
        "seconds": time.perf_counter() - began,
        "loss": line["loss"],
        **{name: value for name, value in line.items() if name.startswith("skipped")},
        "micro-batches whose features changed while they were read": recorder.changed_while_read(),
        "compiled graphs so far": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
    }
    # Models are large, and the recorder outlives the trainer.
    recorder.take = recorder.release = recorder.draft = recorder.loss = None
    recorder.of_target = of_target
    return figures, recorder


def compare_features(one: Recorder, other: Recorder) -> str:
    """By how much features of each micro-batch differ, of a sample of tokens: the mean, by that of the features."""
    return " ".join(
        f"{float((first - second).abs().mean() / first.abs().mean()):.2g}" if first.shape == second.shape else "?"
        for first, second in zip(one.samples, other.samples, strict=True)
    )


def compare(one: Notes, other: Notes, part: str = "step") -> dict:
    """How many signatures differ, and which are the first, in which step (of the target: micro-batch)."""
    if one.names != other.names:
        return {"not comparable": "other signatures were taken"}
    differing = [i for i in range(len(one.names)) if not torch.equal(one.values[i], other.values[i])]
    found = {"signatures": len(one.names), "differing": len(differing)}
    if differing:
        number = 1 + sum(name.startswith(f"end of {part}") for name in one.names[: differing[0]])
        shown = (describe(one.names[i], one.values[i], other.values[i]) for i in differing[:_NUM_SHOWN])
        found |= {f"first in {part}": number, "first": "; ".join(shown)}
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
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="Only these, in this order.")
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
        if "in turn" in recorders:
            one, other = recorders["in turn"], recorders[name]
            figures |= compare(one, other) | {"features differ by": compare_features(one, other)}
            figures["the target's"] = compare(one.of_target, other.of_target, "micro-batch")
        return figures

    for name in arguments.ways:
        report.run(name, partial(measure, name), 240 if name == "warm-up" else 60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
