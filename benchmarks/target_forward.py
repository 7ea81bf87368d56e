# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The frozen target's forward pass at the shapes of Qwen3.6-27B: stock transformers (with `fla`) against ours.

    python benchmarks/target_forward.py --output benchmarks/results/target_forward.json   # one GPU of 40 GB or more
    python benchmarks/target_forward.py --tiny                                             # any CPU

Eight of the 64 layers stand on the device (six gated-delta-net, two full-attention, as in the whole: 48 and 16), with random
weights at full width; the time of the whole is eight times theirs. Stages: stock; stock with `fla`'s causal convolution in
the place of transformers' reference; ours, compiled layer by layer; ours in FP8. TFLOP/s count the products with the layers'
weights only. Labels: the head at every position. How many labels a stage changes against stock is counted too; random
weights are the worst case for that, since their logits are nearly tied. `--model` counts them for a real model, on
conversations (`--text`, by default those that SmolLM2-135M-Instruct wrote). `--stages compiled profile` names the kernels.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import torch
from measuring import Report, milliseconds, peak_gib, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_dflash.target.fp8 import quantize_to_fp8
from hf_dflash.target.frozen_target import FrozenTarget


QWEN36 = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WHOLE = 64
CONVERSATIONS = Path(__file__).parents[1] / "recipes" / "smollm2" / "completions.jsonl.gz"


def make_model(shapes: dict, num_layers: int, device, dtype):
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * (num_layers // 4)
    config = Qwen3_5TextConfig(
        **shapes, num_hidden_layers=num_layers, layer_types=layer_types, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


class Forward:
    """The decoder over one batch of documents of equal length."""

    def __init__(self, target: FrozenTarget, rows: int, length: int):
        generator = torch.Generator().manual_seed(rows)
        self.target, self.rows, self.length = target, rows, length
        self.input_ids = torch.randint(0, target.config.vocab_size, (rows, length), generator=generator).to(
            target.device
        )

    @torch.no_grad()
    def __call__(self):
        return self.target.decoder(input_ids=self.input_ids, attention_mask=None, use_cache=False).last_hidden_state

    def labels(self) -> torch.Tensor:
        return self.target._own_head.predict(self().flatten(0, 1))


def count_weights(model) -> int:
    return sum(
        module.weight.numel() for module in model.get_decoder().layers.modules() if hasattr(module, "in_features")
    )


def measure(forwards: list[Forward], reference: list[torch.Tensor] | None, repeats: int) -> dict:
    """Milliseconds per layer, and what follows for the whole; labels that differ from the reference."""
    result = {}
    target = forwards[0].target
    device = target.device
    num_layers = len(target.decoder.layers)
    for index, forward in enumerate(forwards):
        for _ in range(3):
            forward()
        elapsed = milliseconds(forward, repeats, device)
        tokens = forward.rows * forward.length
        whole = elapsed * WHOLE / num_layers
        name = f"{forward.rows}x{forward.length}"
        result[f"{name} ms per layer"] = elapsed / num_layers
        result[f"{name} tokens/s of the whole"] = tokens / whole * 1e3
        result[f"{name} TFLOP/s"] = 2 * count_weights(target.model) * tokens / elapsed / 1e9
        if reference is not None:
            result[f"{name} share of labels that change"] = float(
                (forward.labels() != reference[index]).float().mean()
            )
    result["peak_gib"] = peak_gib(forwards[0], device)
    return result


def measure_labels(forward: Forward, repeats: int) -> dict:
    """What the head at every position costs beside the whole forward pass."""
    device = forward.target.device
    states = forward().flatten(0, 1)
    head = forward.target._own_head
    head.predict(states)
    elapsed = milliseconds(lambda: head.predict(states), repeats, device)
    whole = milliseconds(forward, repeats, device) * WHOLE / len(forward.target.decoder.layers)
    return {
        "ms": elapsed,
        "share of the whole forward": elapsed / whole,
        "peak_gib": peak_gib(lambda: head.predict(states), device),
    }


def measure_early_end(forward: Forward, repeats: int) -> dict:
    """A call for features whose last layer lies half-way, without labels and with them."""
    target = forward.target
    half = FrozenTarget(target.model, [0, len(target.decoder.layers) // 2])
    lengths = torch.full((forward.rows,), forward.length)
    input_ids, positions = forward.input_ids.cpu(), torch.arange(forward.rows * forward.length)
    half(input_ids, lengths)
    half(input_ids, lengths, positions)
    return {
        "without labels ms": milliseconds(lambda: half(input_ids, lengths), repeats, target.device),
        "with labels ms": milliseconds(lambda: half(input_ids, lengths, positions), repeats, target.device),
    }


def use_fla_convolution():
    """transformers' hybrid layers with `fla`'s causal convolution; returns how to undo it."""
    from fla.modules.causal_conv1d import causal_conv1d
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    before = modeling.causal_conv1d_fn

    def convolve(hidden_states, weight, bias=None, activation=None, **kwargs):
        out = causal_conv1d(hidden_states.transpose(1, 2).contiguous(), weight, bias, activation=activation)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    modeling.causal_conv1d_fn = convolve

    def undo():
        modeling.causal_conv1d_fn = before

    return undo


def read_conversations(path: Path, tokenizer, count: int, longest: int) -> list[tuple[list[int], int]]:
    """Token ids of conversations and where their last reply begins; what is longer is cut."""
    conversations = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            options = {"tokenize": True, "return_dict": False}
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
            whole = tokenizer.apply_chat_template(messages, **options)[:longest]
            if len(whole) > len(prompt) + 1:
                conversations.append((whole, len(prompt)))
            if len(conversations) == count:
                break
    return conversations


def predict_replies(target: FrozenTarget, conversations: list, rows: int = 16) -> torch.Tensor:
    """The target's label for each token of the replies, batch after batch."""
    labels = []
    for start in range(0, len(conversations), rows):
        batch = conversations[start : start + rows]
        lengths = torch.tensor([len(ids) for ids, _ in batch])
        input_ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        positions, begin = [], 0
        for row, (ids, reply) in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            positions.append(torch.arange(begin + reply - 1, begin + len(ids) - 1))
            begin += len(ids)
        labels.append(target(input_ids, lengths, torch.cat(positions)).label_ids.cpu())
    return torch.cat(labels)


def count_changed_labels(path: str, text: Path, device, count: int) -> dict:
    """Of a real model on real replies: bf16 as it is, compiled and in FP8, each against bf16 as it is and against fp32, whose
    distance from bf16 is what rounding alone does."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    conversations = read_conversations(text, tokenizer, count, 512)

    def load(dtype):
        return FrozenTarget(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device), [0])

    labels = {"fp32": predict_replies(load(torch.float32), conversations)}
    target = load(torch.bfloat16)
    labels["bf16"] = predict_replies(target, conversations)
    if device.type == "cuda":
        labels["bf16, compiled"] = predict_replies(target.compile_layers(), conversations)
    target = load(torch.bfloat16)
    smallest = min(128, target.config.hidden_size)
    matrices = quantize_to_fp8(target.decoder, smallest=smallest)
    labels["FP8"] = predict_replies(target, conversations)
    result = {"labels": len(labels["fp32"]), "conversations": len(conversations), "matrices in FP8": matrices}
    for name, ours in labels.items():
        for reference in ("bf16", "fp32"):
            if name not in ("fp32", reference):
                share = float((ours != labels[reference]).float().mean())
                result[f"{name}: share that differs from {reference}"] = share
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--stages", nargs="*", default=["stock", "convolution", "compiled", "fp8"])
    parser.add_argument("--model", help="count the labels that change for this model, too")
    parser.add_argument("--text", type=Path, default=CONVERSATIONS, help="conversations for `--model`, .jsonl.gz")
    parser.add_argument("--conversations", type=int, default=128, help="how many of them")
    parser.add_argument("--flash-attention", action="store_true", help="ours without cuDNN's, as for small targets")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    if args.tiny:
        args.layers, args.tokens, args.repeats = 4, 64, 2
    is_cuda = device.type == "cuda"
    shapes, dtype = (QWEN36, torch.bfloat16) if is_cuda else (TINY, torch.float32)
    report = Report(args.output, device, shapes=shapes, layers=args.layers, tokens=args.tokens)

    if args.model:
        report.run(
            f"labels of {Path(args.model).name}",
            lambda: count_changed_labels(args.model, args.text, device, args.conversations),
            200,
        )
    if not args.stages:
        return 0
    model = make_model(shapes, args.layers, device, dtype)
    target = FrozenTarget(model, [0, args.layers - 2])
    forwards = [Forward(target, rows, args.tokens // rows) for rows in (4, 1)]
    reference, results = None, {}
    if "stock" in args.stages:
        results["stock"] = report.run("stock", lambda: measure(forwards, None, args.repeats), 240)
        if results["stock"]:
            reference = [forward.labels() for forward in forwards]
            report.run("labels, stock", lambda: measure_labels(forwards[0], args.repeats))
    if "convolution" in args.stages and is_cuda:

        def with_convolution():
            undo = use_fla_convolution()
            try:
                return measure(forwards, reference, args.repeats)
            finally:
                undo()

        report.run("stock with fla's convolution", with_convolution)
    torch.backends.cuda.enable_cudnn_sdp(not args.flash_attention)
    if "compiled" in args.stages and is_cuda:
        target.compile_layers()
        results["compiled"] = report.run("ours", lambda: measure(forwards, reference, args.repeats), 200)
        report.run("labels, ours", lambda: measure_labels(forwards[0], args.repeats))
        report.run("half of the layers, ours", lambda: measure_early_end(forwards[0], args.repeats))
    elif not is_cuda:
        report.run("half of the layers", lambda: measure_early_end(forwards[0], args.repeats))
    if "profile" in args.stages:
        report.run("profile", lambda: profile(forwards[0], device))
    if "fp8" in args.stages:
        print(f"{quantize_to_fp8(target.decoder, smallest=1024 if is_cuda else 16)} matrices in FP8", flush=True)
        results["fp8"] = report.run("ours, FP8", lambda: measure(forwards, reference, args.repeats), 200)
    for name in (f"{forward.rows}x{forward.length} ms per layer" for forward in forwards):
        for stage in ("compiled", "fp8"):
            if results.get("stock") and results.get(stage):
                report.ratio(f"stock / {stage}, {name.split()[0]}", results["stock"][name], results[stage][name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
