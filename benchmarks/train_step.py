# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One drafter step (forward and backward, no optimizer) at the shapes of Qwen3.6-27B: ours against speculators 0.9.0 and
NVIDIA Model-Optimizer.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json      # one GPU of 80 GB or more
    python benchmarks/train_step.py --tiny                                            # any CPU

All sides get the same shapes on the same device in one run: one document of 4,096 supervised tokens, 512 anchors x 16
slots, random weights and features. Two precisions: parameters and gradients in bf16, and what training really uses, fp32
parameters and gradients under bf16 autocast (frozen embeddings and heads stay in bf16 on all sides).

Decoder layers are compiled one by one on all sides: whole-model compilation of speculators, its default, did not finish in
five minutes on an H200, nor did its own compiled mask, which is therefore built uncompiled; a step without masks is compared
too. speculators makes the target's logits at every slot inside its step. Our labels are token ids, made once per position
where the target lives; the time for that is measured too (`labels`) and added where it says "with labels". Model-Optimizer
is measured with cross-entropy on the data's tokens, its cheapest loss, which needs no labels of a target.

"hf_dflash with FP8 head" is a side of its own, with ratios of its own: the others' products are all in bf16, and so are those
of "hf_dflash".
"""

import argparse
import contextlib
import gc
import itertools
import sys
import time
from functools import partial
from pathlib import Path

import torch
from measuring import Report, milliseconds, peak_gib, profile, synchronize
from train_step_inputs import GAMMA, QWEN36, TINY, Inputs
from train_step_peers import ModelOptimizer, Speculators

from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_dense_mask, create_flex_mask
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.fp8_head import Fp8Gradient, Fp8Head
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.drafter.modeling_dflash import FILLED_TILES, DFlashForSpeculation, create_training_masks
from hf_dflash.target.language_head import LanguageHead


class Ours:
    def __init__(self, inputs: Inputs, parameter_dtype, dynamic: bool = True, head_fp8: bool = False):
        config, device = inputs.config, inputs.device
        self.is_cuda = device.type == "cuda"
        with torch.device(device):
            self.model = DFlashForSpeculation(config).to(parameter_dtype).train()
        if self.is_cuda:
            self.model.compile_layers(dynamic=dynamic)
        self.head = (Fp8Head if head_fp8 else LanguageHead)(inputs.head_weight)
        self.set_inputs(inputs)

    def set_inputs(self, inputs: Inputs) -> None:
        self.inputs, config, device = inputs, inputs.config, inputs.device
        slots = torch.full((inputs.num_anchors, config.block_size), config.mask_token_id, device=device)
        slots[:, 0] = inputs.input_ids[0, inputs.anchors]
        self.slot_ids = slots.view(1, -1)
        offsets = torch.arange(config.block_size, device=device)
        context_positions = torch.arange(inputs.context_length, device=device)
        self.position_ids = torch.cat([context_positions, (inputs.anchors[:, None] + offsets).flatten()])[None]

    def make_mask(self):
        blocks = (self.inputs.document_ids, self.inputs.anchors[None], self.inputs.valid[None], self.inputs.block_size)

        def create(**kinds):
            if self.is_cuda:
                return create_flex_mask(*blocks, **kinds)
            mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*blocks, **kinds)
            return create_dense_mask(mask_mod, 1, q_len, kv_len, self.inputs.device)

        return create_training_masks(self.model, create)

    def forward(self, mask):
        noise = torch.nn.functional.embedding(self.slot_ids, self.inputs.embedding)
        states = self.model(noise, self.inputs.features, self.position_ids, attention_mask=mask).last_hidden_state
        return states.view(self.inputs.num_anchors, self.inputs.block_size, -1)[:, 1:]

    def loss(self, states):
        inputs = self.inputs
        with torch.autocast(inputs.device.type, enabled=False):
            return compute_dflash_loss(
                states,
                self.head,
                inputs.labels,
                inputs.supervised,
                gamma=GAMMA,
                slot_indices=inputs.slot_indices,
            )[0]


def held_gib(device) -> float:
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


class Step:
    """Forward and backward pass of a side."""

    def __init__(self, side, device):
        self.side = side
        # speculators holds the frozen embedding and heads (bf16) in the same module.
        is_fp32 = any(parameter.dtype == torch.float32 for parameter in side.model.parameters())
        self.uses_autocast = device.type == "cuda" and is_fp32

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.uses_autocast else contextlib.nullcontext()

    def __call__(self):
        side = self.side
        with self.autocast():
            loss = side.loss(side.forward(side.make_mask()))
        loss.backward()
        side.model.zero_grad(set_to_none=True)


def measure_step(make_side, inputs_gib: float, repeats: int, device) -> dict:
    """A whole step without waits in between, its parts with waits, and the peak memory.

    Compiled code of an earlier side may still hold its weights: it is let go, and what is left is taken off the peak.
    """
    torch.compiler.reset()
    gc.collect()
    left_over = held_gib(device) - inputs_gib
    step = Step(make_side(), device)
    side = step.side

    synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        step()
    synchronize(device)
    result = {"warm_up_s": time.perf_counter() - start}
    peak = peak_gib(step, device)
    result["peak_gib"] = None if peak is None else peak - left_over
    result["left_by_others_gib"] = left_over
    result["step_ms"] = milliseconds(step, repeats, device)

    parts = {"mask": [], "forward": [], "loss": [], "backward": []}
    for _ in range(3):
        value = None
        for name, part in zip(parts, (side.make_mask, side.forward, side.loss, torch.Tensor.backward), strict=True):
            synchronize(device)
            begin = time.perf_counter()
            with step.autocast() if name != "backward" else contextlib.nullcontext():
                value = part() if value is None else part(value)
            synchronize(device)
            parts[name].append((time.perf_counter() - begin) * 1e3)
        side.model.zero_grad(set_to_none=True)
    return result | {f"{name}_ms": min(values) for name, values in parts.items()}


def profile_step(side, device) -> dict:
    """Where the time of a step goes, kernel by kernel."""
    step = Step(side, device)
    for _ in range(2):
        step()
    return profile(step, device)


# Tiles of flex attention: PyTorch's own choice for this device, and others.
TILES = {
    "own": {},
    "bounds checked": {"IS_DIVISIBLE": False},
    "bwd 2 stages": {"bwd_num_stages": 2},
    "bwd 64x64": {
        **{f"bwd_BLOCK_{name}": 64 for name in ("M1", "N1", "M2", "N2")},
        "bwd_num_warps": 4,
        "bwd_num_stages": 3,
    },
    "fwd by TMA": {"fwd_USE_TMA": True},
}


def measure_attention(side: Ours, options: dict, repeats: int) -> dict:
    """Attention of one layer, forward and backward, by the kernels that training runs."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    options = {**FILLED_TILES, **options}
    inputs, config = side.inputs, side.inputs.config
    mask = next(iter(side.make_mask().values()))
    slots = inputs.num_anchors * inputs.block_size
    key_length = inputs.context_length + slots
    # Heads behind positions, as the projections leave them.
    queries, keys, values = (
        torch.randn(1, length, heads, config.head_dim, device=inputs.device, dtype=inputs.dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length, heads in (
            (slots, config.num_attention_heads),
            (key_length, config.num_key_value_heads),
            (key_length, config.num_key_value_heads),
        )
    )
    upstream = torch.randn_like(queries)

    @torch.compile(fullgraph=True, dynamic=True)
    def attend(queries, keys, values):
        return flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)

    def forward():
        return attend(queries, keys, values)

    def both():
        forward().backward(upstream)
        queries.grad = keys.grad = values.grad = None

    for _ in range(2):
        both()
    return {
        "forward ms": milliseconds(forward, repeats, inputs.device),
        "both ms": milliseconds(both, repeats, inputs.device),
        "is finite": bool(torch.isfinite(forward()).all()),
    }


def measure_loss(
    inputs: Inputs, implementation: str, max_elements: int, repeats: int, head_class=LanguageHead
) -> dict:
    """The loss and its gradient by the hidden states alone."""
    shape = (*inputs.labels.shape, inputs.config.hidden_size)
    states = torch.randn(shape, device=inputs.device, dtype=inputs.dtype, requires_grad=True)
    head = head_class(inputs.head_weight)

    def run():
        loss, _ = compute_dflash_loss(
            states,
            head,
            inputs.labels,
            inputs.supervised,
            gamma=GAMMA,
            slot_indices=inputs.slot_indices,
            implementation=implementation,
            max_elements=max_elements,
        )
        loss.backward()
        states.grad = None

    for _ in range(2):
        run()
    return {"ms": milliseconds(run, repeats, inputs.device), "peak_gib": peak_gib(run, inputs.device)}


def measure_matrix_rate(inputs: Inputs, repeats: int) -> dict:
    """The two products of the loss, all rows at once: what no kernel around them can beat."""
    rows = inputs.labels.numel()
    states = torch.randn(rows, inputs.config.hidden_size, device=inputs.device, dtype=inputs.dtype)

    def run():
        return (states @ inputs.head_weight.t()) @ inputs.head_weight

    run()
    elapsed = milliseconds(run, repeats, inputs.device)
    return {"ms": elapsed, "tflops": 4e-9 * rows * inputs.head_weight.numel() / elapsed}


def measure_fp8_rate(inputs: Inputs, repeats: int) -> dict:
    """The same in FP8, as [`Fp8Head`] does them: hidden states are rounded in it, the gradient is there already."""
    rows = inputs.labels.numel()
    states = torch.randn(rows, inputs.config.hidden_size, device=inputs.device, dtype=inputs.dtype)
    head = Fp8Head(inputs.head_weight)
    gradient = Fp8Gradient.empty(inputs.labels.flatten(), inputs.config.vocab_size)
    # Any positive numbers of e4m3: equal ones would take less power, so be faster.
    gradient.values.view(torch.uint8).random_(0, 127)
    gradient.scales.fill_(2.0**-8)
    gradient.at_labels.fill_(-1.0)

    def project():
        return head.project(states)

    def multiply():
        return head.multiply_gradient(gradient)

    results = {}
    for name, run in (("logits ms", project), ("gradient ms", multiply)):
        run()
        results[name] = milliseconds(run, repeats, inputs.device)
    elapsed = sum(results.values())
    return {**results, "ms": elapsed, "tflops": 4e-9 * rows * inputs.head_weight.numel() / elapsed}


def measure_labels(inputs: Inputs, repeats: int) -> dict:
    """The target's predictions, once per position that has a label."""
    head = LanguageHead(inputs.head_weight)

    def run():
        return head.predict(inputs.last_hidden_states[0].index_select(0, inputs.label_positions))

    run()
    return {
        "ms": milliseconds(run, repeats, inputs.device),
        "peak_gib": peak_gib(run, inputs.device),
        "positions": inputs.label_positions.numel(),
    }


def measure_optimizer(inputs: Inputs, repeats: int) -> dict:
    """Fused AdamW over fp32 masters."""
    with torch.device(inputs.device):
        model = DFlashForSpeculation(inputs.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=inputs.device.type == "cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"ms": milliseconds(optimizer.step, repeats, inputs.device)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument(
        "--stages", nargs="*", default=["loss", "ours", "peers", "static"], help="also: profile, attention"
    )
    parser.add_argument("--bf16-only", action="store_true", help="without fp32 parameters under autocast")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    config = DFlashConfig(**(TINY if args.tiny else QWEN36))
    if args.tiny:
        args.context, args.anchors, args.repeats = 256, 8, 2
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    report = Report(
        args.output,
        device,
        context=args.context,
        anchors=args.anchors,
        block_size=config.block_size,
        shapes=TINY if args.tiny else QWEN36,
    )
    inputs = Inputs(config, args.context, args.anchors, device, dtype)
    inputs_gib = held_gib(device)

    labels = report.run("labels", lambda: measure_labels(inputs, args.repeats))
    if "loss" in args.stages:
        report.run("loss, its two products alone", lambda: measure_matrix_rate(inputs, args.repeats))
        report.run("loss, its two products alone, FP8", lambda: measure_fp8_rate(inputs, args.repeats))
        variants = [("eager", 28), ("compiled", 28), ("compiled", 29), ("compiled", 30)]
        variants += [("triton", power) for power in (28, 29, 30, 31)]
        for implementation, power in variants if is_cuda else [("eager", 28)]:
            report.run(
                f"loss, {implementation}, 2^{power} logits at once",
                lambda i=implementation, p=power: measure_loss(inputs, i, 1 << p, args.repeats),
            )
        for implementation, power in [("triton", 29), ("triton", 30)] if is_cuda else [("eager", 28)]:
            report.run(
                f"loss, fp8, {implementation}, 2^{power} logits at once",
                lambda i=implementation, p=power: measure_loss(inputs, i, 1 << p, args.repeats, Fp8Head),
            )

    with_fp8 = "hf_dflash with FP8 head"
    sides = {
        "hf_dflash": Ours,
        with_fp8: partial(Ours, head_fp8=True),
        "speculators": Speculators,
        "Model-Optimizer": ModelOptimizer,
    }
    precisions = {"bf16 parameters": torch.bfloat16, "fp32 parameters, bf16 autocast": torch.float32}
    if args.bf16_only:
        del precisions["fp32 parameters, bf16 autocast"]
    if not is_cuda:
        precisions = {"fp32": torch.float32}
    steps = {}
    for name, side in sides.items():
        for precision, parameter_dtype in precisions.items():
            if ("ours" if name.startswith("hf_dflash") else "peers") in args.stages:
                steps[name, precision] = report.run(
                    f"{name}, {precision}",
                    lambda s=side, p=parameter_dtype: measure_step(
                        lambda: s(inputs, p), inputs_gib, args.repeats, device
                    ),
                )
    if "static" in args.stages and is_cuda:
        report.run(
            "hf_dflash, bf16 parameters, fixed shapes",
            lambda: measure_step(
                lambda: Ours(inputs, torch.bfloat16, dynamic=False), inputs_gib, args.repeats, device
            ),
        )
    if "profile" in args.stages:
        report.run("profile", lambda: profile_step(Ours(inputs, dtype), device))
    if "attention" in args.stages and is_cuda:
        side = Ours(inputs, dtype)
        for name, options in TILES.items():
            report.run(f"attention, {name}", lambda o=options: measure_attention(side, o, args.repeats), 45)
        del side
    if "ours" in args.stages:
        report.run("AdamW", lambda: measure_optimizer(inputs, args.repeats))

    for precision, us in itertools.product(precisions, ("hf_dflash", with_fp8)):
        ours, theirs = steps.get((us, precision)), steps.get(("speculators", precision))
        if ours and theirs and labels:
            name = f"speculators / {us}, {precision}"
            report.ratio(f"{name}, labels on the target's device", theirs["step_ms"], ours["step_ms"])
            report.ratio(f"{name}, with labels", theirs["step_ms"], ours["step_ms"] + labels["ms"])
            without = theirs["step_ms"] - theirs["mask_ms"]
            report.ratio(f"{name}, with labels, without their masks", without, ours["step_ms"] + labels["ms"])
        theirs = steps.get(("Model-Optimizer", precision))
        if ours and theirs:
            report.ratio(f"Model-Optimizer / {us}, {precision}", theirs["step_ms"], ours["step_ms"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
