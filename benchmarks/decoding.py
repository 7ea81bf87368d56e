# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Decoding speed, all in one run: plain `generate`, transformers' own DFlash path (dense targets), and ours.

    python benchmarks/decoding.py --tiny
    python benchmarks/decoding.py --target SMOLLM2 --drafter DRAFTER --prompts prompts.jsonl --time-limit 90 \
        --device cuda --dtype bfloat16 --output benchmarks/results/decoding_smollm2_bf16_h200.json

Every prompt is decoded by every way before the next one, so that a machine that slows down slows all of them. The first three
ways come first: the others (`--also`) begin once these have had all prompts, or half of the time. The JSON file is written
anew after each way of each prompt; where the time ends, what is there is the result, and ways are compared over the prompts
that they share.

Ours leaves out cuDNN's attention, which plans each new length for some 50 ms of the host; with `--without-cudnn-attention` all ways
do, and what is left is the difference between the ways.

Greedy output that differs from plain decoding is counted (in bf16 other kernels round otherwise), with the difference between
the target's logits of the two tokens where they first part. Beside it, for every way and for plain decoding itself, the
tokens that one pass over the whole text would not have chosen, and by how much. `--tiny` checks the script on random models,
its times mean nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

import hf_dflash
from hf_dflash.atomic_files import write_json
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.evaluation.benchmark import find_first_difference
from hf_dflash.evaluation.prompts import encode_prompt, load_prompts


WARM_UP_TOKENS = 24
FIRST_WAYS = ("plain", "ours", "transformers")
# What each further way gives to `speculative_generate`; "plain, sampled" is what sampled ways are compared with.
FURTHER_WAYS = {
    "tree": {"tree_budget": 24},
    "plain, sampled": {"do_sample": True},
    "ours, sampled": {"do_sample": True},
    "ours, drawn drafts": {"do_sample": True, "sample_drafts": True},
    "adaptive": {"adaptive_block": True},
    "static": {"cache_implementation": "static"},
    "cuda graph": {"cuda_graph": True},
}


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random models on a CPU")
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter")
    parser.add_argument("--prompts", help="JSONL file, as for `hf-dflash evaluate`")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--time-limit", type=float, help="seconds, from the start of the script")
    parser.add_argument("--enable-thinking", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--also", nargs="*", default=[], choices=FURTHER_WAYS, help="further ways, in this order")
    parser.add_argument("--without-cudnn-attention", action="store_true", help="in all ways")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    if args.without_cudnn_attention:
        torch.backends.cuda.enable_cudnn_sdp(False)
    run = Run(args)
    run.decode_all()
    report = run.report()
    for way, summary in report["summary"].items():
        print(f"{way:18s}", "  ".join(f"{name} {show(value)}" for name, value in summary.items()))
    return report


class Run:
    def __init__(self, args):
        self.args, self.start = args, time.perf_counter()
        self.target, self.drafter, self.prompts = load_tiny(args) if args.tiny else load(args)
        print(f"[{self.elapsed():6.1f} s] loaded, {len(self.prompts)} prompts", flush=True)
        first = [w for w in FIRST_WAYS if w != "transformers" or not getattr(self.target, "_is_stateful", False)]
        self.groups = [first, [way for way in args.also if way not in first]]
        self.results = {way: [] for group in self.groups for way in group}

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def decode_all(self) -> None:
        limit = self.args.time_limit or float("inf")
        # Further ways are given half of the time.
        ends = [limit / 2 if self.groups[1] else limit, limit]
        for ways, end in zip(self.groups, ends, strict=True):
            for way in ways:
                if self.elapsed() < limit:
                    self.decode(way, self.prompts[0], WARM_UP_TOKENS)
            for number in range(len(self.prompts)):
                # Another one goes first each time.
                turn = number % max(1, len(ways))
                for way in ways[turn:] + ways[:turn]:
                    if self.elapsed() > end:
                        break
                    self.measure(way, number)

    @torch.no_grad()
    def measure(self, way: str, number: int) -> None:
        input_ids = self.prompts[number]
        synchronize(self.args)
        start = time.perf_counter()
        sequences, passes = self.decode(way, input_ids, self.args.max_new_tokens)
        synchronize(self.args)
        seconds = time.perf_counter() - start
        tokens = sequences[0, input_ids.shape[1] :]
        result = {"prompt": number, "tokens": len(tokens), "passes": passes, "seconds": seconds}
        if not is_sampled(way):
            result["off_argmax_margins"] = find_off_argmax_margins(self.target, input_ids, tokens)
            result["new_tokens"] = tokens.tolist()
        self.results[way].append(result)
        print(f"[{self.elapsed():6.1f} s] prompt {number} {way}: {len(tokens) / seconds:.1f} tokens/s", flush=True)
        self.save()

    def decode(self, way: str, input_ids, max_new_tokens: int) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        kwargs = {"max_new_tokens": max_new_tokens, "do_sample": False, **FURTHER_WAYS.get(way, {})}
        if way.startswith("plain"):
            sequences = self.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
            return sequences, sequences.shape[1] - input_ids.shape[1]
        if way == "transformers":
            return decode_natively(self.target, self.drafter, input_ids, **kwargs)
        out = speculative_generate(self.target, self.drafter, input_ids, torch.ones_like(input_ids), **kwargs)
        return out.sequences, out.num_target_passes

    def report(self) -> dict:
        args = self.args
        report = {
            "settings": {
                **{name: value for name, value in vars(args).items() if name not in ("output", "also", "tiny")},
                **{name: Path(getattr(args, name) or "random").name for name in ("target", "drafter", "prompts")},
                "block_size": self.drafter.config.block_size,
                "device_name": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
                "threads": None if args.device.startswith("cuda") else torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "seconds": self.elapsed(),
            "summary": {way: self.summarize(way) for way, runs in self.results.items() if runs},
            "first_differences": {way: self.find_differences(way) for way in self.results if not is_sampled(way)},
        }
        return report

    def summarize(self, way: str) -> dict:
        runs = self.results[way]
        tokens = sum(run["tokens"] for run in runs)
        blocks = sum(run["passes"] - 1 for run in runs)
        summary = {
            "prompts": len(runs),
            "tokens": tokens,
            "tokens_per_second": tokens / sum(run["seconds"] for run in runs),
            "speedup": self.ratio(way, "plain, sampled" if is_sampled(way) else "plain"),
            "acceptance_length": (tokens - len(runs)) / blocks if blocks else None,
            "target_passes_per_token": sum(run["passes"] for run in runs) / tokens,
        }
        if way != "transformers" and not way.startswith("plain") and not is_sampled(way):
            summary["ratio_to_transformers"] = self.ratio(way, "transformers")
        if is_sampled(way):
            return summary
        margins = [margin for run in runs for margin in run["off_argmax_margins"]]
        summary["share_off_argmax"] = len(margins) / tokens
        summary["median_off_argmax_margin"] = statistics.median(margins) if margins else None
        summary["largest_off_argmax_margin"] = max(margins, default=None)
        if way != "plain":
            differences = self.find_differences(way)
            compared = {run["prompt"] for run in runs} & {run["prompt"] for run in self.results["plain"]}
            shared = sum(run["tokens"] for run in runs if run["prompt"] in compared)
            summary["prompts_compared"] = len(compared)
            summary["prompts_identical"] = len(compared) - len(differences)
            summary["share_differing_from_plain"] = sum(d["differing"] for d in differences) / max(1, shared)
            summary["largest_margin_at_first_difference"] = max((abs(d["margin"]) for d in differences), default=None)
        return summary

    def ratio(self, way: str, other: str) -> float | None:
        """Tokens per second of one way over another's, over the prompts that both have decoded."""
        speeds = []
        ours, theirs = ({run["prompt"]: run for run in self.results.get(name, [])} for name in (way, other))
        shared = ours.keys() & theirs.keys()
        for runs in (ours, theirs):
            seconds = sum(runs[number]["seconds"] for number in shared)
            speeds.append(sum(runs[number]["tokens"] for number in shared) / seconds if seconds else None)
        return speeds[0] / speeds[1] if shared else None

    @torch.no_grad()
    def find_differences(self, way: str) -> list[dict]:
        """Where greedy output first parts from plain decoding's, and what the target's logits say of the two tokens there."""
        differences = []
        plain = {run["prompt"]: torch.tensor(run["new_tokens"]) for run in self.results["plain"]}
        for run in self.results[way]:
            if way == "plain" or run["prompt"] not in plain:
                continue
            tokens, expected = torch.tensor(run["new_tokens"]), plain[run["prompt"]]
            place, shared = find_first_difference(tokens, expected), min(len(tokens), len(expected))
            if place < 0:
                continue
            if "margin" not in run:
                run["margin"] = 0.0
                if place < shared:
                    input_ids = self.prompts[run["prompt"]]
                    prefix = torch.cat([input_ids[0], expected[:place].to(input_ids.device)])
                    logits = self.target(prefix[None]).logits[0, -1].float()
                    run["margin"] = float(logits[expected[place]] - logits[tokens[place]])
            differing = int((tokens[:shared] != expected[:shared]).sum()) + abs(len(tokens) - len(expected))
            differences.append(
                {"prompt": run["prompt"], "place": place, "margin": run["margin"], "differing": differing}
            )
        return differences

    def save(self) -> None:
        if self.args.output is None:
            return
        self.args.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.args.output, self.report())


def is_sampled(way: str) -> bool:
    return FURTHER_WAYS.get(way, {}).get("do_sample", False)


def load(args):
    if not (args.target and args.drafter and args.prompts):
        raise SystemExit("Give --target, --drafter and --prompts, or --tiny.")
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target)
    dtype = getattr(torch, args.dtype)
    target = transformers.AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
    drafter = transformers.AutoModel.from_pretrained(args.drafter, dtype=dtype).to(args.device).eval()
    rows = load_prompts(args.prompts, args.limit)
    prompts = []
    for row in rows:
        content = row.get("prompt") or row.get("turns", [None])[0]
        messages = row.get("messages") or [{"role": "user", "content": content}]
        prompts.append(encode_prompt(tokenizer, messages, args.enable_thinking).to(args.device))
    return target, drafter, prompts


def load_tiny(args):
    args.max_new_tokens = min(args.max_new_tokens, 40)
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    target = transformers.Qwen3ForCausalLM(config).to(args.device, dtype).eval()
    drafter_config = hf_dflash.create_drafter_config(config, num_hidden_layers=2, block_size=8, mask_token_id=255)
    drafter = hf_dflash.DFlashForSpeculation(drafter_config)
    with tempfile.TemporaryDirectory() as folder:
        # As a user has it: saved and loaded.
        drafter.save_pretrained(folder)
        drafter = transformers.AutoModel.from_pretrained(folder, dtype=dtype).to(args.device).eval()
    prompts = [torch.randint(3, 255, (1, 12), device=args.device) for _ in range(min(args.limit, 3))]
    return target, drafter, prompts


def decode_natively(target, drafter, input_ids, **kwargs):
    passes = []
    handle = target.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    sequences = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        speculation_type="dflash",
        **kwargs,
    )
    handle.remove()
    return sequences, len(passes)


def synchronize(args):
    if not args.device.startswith("cpu"):
        torch.accelerator.synchronize()


def find_off_argmax_margins(target, input_ids, tokens) -> list[float]:
    """By how much the target's first choice leads, at each token that one pass over the whole text would not have chosen."""
    logits = target(torch.cat([input_ids[0], tokens])[None]).logits[0, input_ids.shape[1] - 1 : -1].float()
    margins = logits.max(dim=-1).values - logits.gather(-1, tokens[:, None])[:, 0]
    return margins[logits.argmax(-1) != tokens].tolist()


def show(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
