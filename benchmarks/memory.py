# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Memory of a drafter step by part, at the shapes of Qwen3.6-27B; and over many steps of varied widths: is it flat, is anything
compiled anew?

    python benchmarks/memory.py --output benchmarks/results/memory.json   # one GPU of 80 GB or more
    python benchmarks/memory.py --tiny                                     # any CPU: sizes of tensors only

Inputs (features, and the target's embedding and head, which the drafter's device holds) are counted apart.
"""

import argparse
import sys
from pathlib import Path

import torch
from measuring import Report, synchronize
from torch._dynamo.utils import counters
from train_step import Ours
from train_step_inputs import QWEN36, TINY, Inputs

from hf_dflash.drafter.configuration_dflash import DFlashConfig


GIB = 2**30


def allocated(device) -> float | None:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None


class Peak:
    """What a part of the step adds while it runs and when it is done, in GiB."""

    def __init__(self, device, result: dict):
        self.device, self.result = device, result

    def __call__(self, name: str, part):
        if self.device.type != "cuda":
            return part()
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = allocated(self.device)
        value = part()
        synchronize(self.device)
        self.result[f"{name}, left behind"] = allocated(self.device) - before
        self.result[f"{name}, at most"] = torch.cuda.max_memory_allocated(self.device) / GIB - before
        return value


def measure_parts(inputs: Inputs, parameter_dtype, inputs_gib: float | None) -> dict:
    device = inputs.device
    side = Ours(inputs, parameter_dtype)
    parameters = list(side.model.parameters())
    result = {"inputs": inputs_gib, "parameters": sum(p.numel() * p.element_size() for p in parameters) / GIB}

    def autocast():
        is_on = device.type == "cuda" and parameter_dtype == torch.float32
        return torch.autocast(device.type, torch.bfloat16, enabled=is_on)

    def step(measured=lambda name, part: part()):
        with autocast():
            mask = measured("mask", side.make_mask)
            states = measured("forward", lambda: side.forward(mask))
            loss = measured("loss", lambda: side.loss(states))
        measured("backward", loss.backward)

    for _ in range(2):
        step()
        side.model.zero_grad(set_to_none=True)
    step(Peak(device, result))
    result["gradients"] = sum(p.grad.numel() * p.grad.element_size() for p in parameters) / GIB
    if device.type == "cuda":
        side.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        result["whole step at most, inputs counted"] = torch.cuda.max_memory_allocated(device) / GIB
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, fused=device.type == "cuda")
    Peak(device, result)("AdamW", optimizer.step)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    result["AdamW's states"] = sum(v.numel() * v.element_size() for v in states) / GIB
    return result


def run_varied_steps(config: DFlashConfig, steps: int, context: int, anchors: int, device, dtype) -> dict:
    """Steps whose widths differ, in multiples of a tile of flex attention, as the trainer pads them."""
    generator = torch.Generator().manual_seed(0)
    largest = Inputs(config, context, anchors, device, dtype)
    side = Ours(largest, dtype)
    warm_up, memory, compiled = max(2, steps // 10), [], None
    for index in range(steps):
        inputs = Inputs.__new__(Inputs)
        inputs.__dict__.update(largest.__dict__)
        inputs.context_length = int(torch.randint(3, context // 128 + 1, (), generator=generator)) * 128
        most = min(anchors, inputs.context_length // 2) // 16
        inputs.num_anchors = int(torch.randint(min(2, most), most + 1, (), generator=generator)) * 16
        inputs.features = largest.features[:, : inputs.context_length]
        inputs.document_ids = largest.document_ids[:, : inputs.context_length]
        last = inputs.context_length - config.block_size - 1
        inputs.anchors = torch.randperm(last, generator=generator)[: inputs.num_anchors].sort().values.to(device)
        inputs.valid = torch.ones_like(inputs.anchors, dtype=torch.bool)
        inputs.labels = largest.labels[: inputs.num_anchors]
        inputs.supervised = torch.ones_like(inputs.labels, dtype=torch.bool)
        inputs.slot_indices = torch.arange(inputs.labels.numel(), device=device)
        side.set_inputs(inputs)
        side.loss(side.forward(side.make_mask())).backward()
        side.model.zero_grad(set_to_none=True)
        if index == warm_up:
            synchronize(device)
            compiled = counters["stats"]["unique_graphs"]
        if index >= warm_up and index % max(1, steps // 10) == 0:
            memory.append(allocated(device))
    result = {"steps": steps, "graphs": compiled, "compiled anew": counters["stats"]["unique_graphs"] - compiled}
    if device.type == "cuda":
        result |= {"allocated_gib": [round(m, 4) for m in memory], "reserved_gib": torch.cuda.memory_reserved() / GIB}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--steps", type=int, default=500, help="steps of varied widths; 0 for none")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    config = DFlashConfig(**(TINY if args.tiny else QWEN36))
    if args.tiny:
        args.context, args.anchors, args.steps = 512, 32, 4
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    report = Report(args.output, device, context=args.context, anchors=args.anchors)

    inputs = Inputs(config, args.context, args.anchors, device, dtype)
    inputs_gib = allocated(device)
    precisions = {"bf16 parameters": torch.bfloat16, "fp32 parameters, bf16 autocast": torch.float32}
    for name, parameter_dtype in precisions.items() if is_cuda else [("fp32", torch.float32)]:
        report.run(f"{name}, GiB", lambda d=parameter_dtype: measure_parts(inputs, d, inputs_gib))
    if args.steps:
        report.run(
            "varied steps",
            lambda: run_varied_steps(config, args.steps, args.context, args.anchors, device, dtype),
            300,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
