# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Decoding speed, all in one run: plain `generate`, transformers' own DFlash path (dense targets), and ours.

    python benchmarks/decoding.py --tiny
    python benchmarks/decoding.py --target SMOLLM2 --drafter DRAFTER --prompts prompts.jsonl \
        --device cuda --dtype bfloat16 --output benchmarks/results/decoding_smollm2_h200.json

Prompts are taken in turn by every way of decoding, so that a machine that slows down slows all of them. Beside tokens per
second it says how often greedy output differs from plain decoding (in bf16 other kernels round otherwise) and by how little
the two tokens differed where it first did; `--tiny` checks the script on random models, its times mean nothing.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm

import hf_dflash
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.evaluation.benchmark import encode_prompt, find_first_difference, load_prompts


WARM_UP_TOKENS = 24


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random models on a CPU")
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--drafter", help="folder of the drafter")
    parser.add_argument("--prompts", help="JSONL file, as for `hf-dflash evaluate`")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--enable-thinking", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--tree-budget", type=int, nargs="*", default=[], help="also tree verification with so many nodes"
    )
    parser.add_argument("--adaptive", action="store_true", help="also with adaptive block length")
    parser.add_argument("--static", action="store_true", help="also ours with a static cache")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    target, drafter, prompts = load_tiny(args) if args.tiny else load(args)
    ways = {"plain": lambda ids, **kw: decode_plainly(target, ids, **kw)}
    if not getattr(target, "_is_stateful", False):
        ways["transformers"] = lambda ids, **kw: decode_natively(target, drafter, ids, **kw)
    ways["ours"] = lambda ids, **kw: decode(target, drafter, ids, **kw)
    if args.adaptive:
        ways["ours, adaptive"] = lambda ids, **kw: decode(target, drafter, ids, adaptive_block=True, **kw)
    for budget in args.tree_budget:
        ways[f"ours, tree {budget}"] = lambda ids, b=budget, **kw: decode(target, drafter, ids, tree_budget=b, **kw)
    if args.static:
        ways["ours, static"] = lambda ids, **kw: decode(target, drafter, ids, cache_implementation="static", **kw)

    results = measure(target, ways, prompts, args)
    report = {
        "settings": {
            **{name: str(value) for name, value in vars(args).items() if name != "output"},
            "block_size": drafter.config.block_size,
            "device_name": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "summary": {name: summarize(name, results) for name in ways},
        "first_differences": results["first_differences"],
    }
    for name, summary in report["summary"].items():
        print(f"{name:18s}", "  ".join(f"{key} {show(value)}" for key, value in summary.items()))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return report


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


def decode_plainly(target, input_ids, **kwargs):
    sequences = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, **kwargs)
    return sequences, sequences.shape[1] - input_ids.shape[1]


def decode_natively(target, drafter, input_ids, **kwargs):
    passes = []
    handle = target.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    sequences = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        assistant_model=drafter,
        speculation_type="dflash",
        **kwargs,
    )
    handle.remove()
    return sequences, len(passes)


def decode(target, drafter, input_ids, **kwargs):
    out = speculative_generate(target, drafter, input_ids, torch.ones_like(input_ids), **kwargs)
    return out.sequences, out.num_target_passes


def synchronize(args):
    if not args.device.startswith("cpu"):
        torch.accelerator.synchronize()


@torch.no_grad()
def measure(target, ways, prompts, args) -> dict:
    results = {name: [] for name in ways}
    first_differences = {name: [] for name in ways if name != "plain"}
    for way in ways.values():
        way(prompts[0], max_new_tokens=WARM_UP_TOKENS if not args.tiny else 4)
    for number, input_ids in enumerate(tqdm(prompts, desc="Decoding", unit="prompt")):
        outputs = {}
        # Another one goes first each time.
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            synchronize(args)
            start = time.perf_counter()
            sequences, passes = ways[name](input_ids, max_new_tokens=args.max_new_tokens)
            synchronize(args)
            seconds = time.perf_counter() - start
            outputs[name] = sequences[0, input_ids.shape[1] :]
            results[name].append({"tokens": len(outputs[name]), "passes": passes, "seconds": seconds})
        for name, tokens in outputs.items():
            plain = outputs["plain"]
            shared = min(len(tokens), len(plain))
            results[name][-1]["differing"] = int((tokens[:shared] != plain[:shared]).sum()) + abs(
                len(tokens) - len(plain)
            )
            results[name][-1]["off_argmax"] = count_off_argmax(target, input_ids, tokens)
            place = find_first_difference(tokens, plain)
            if name != "plain" and 0 <= place < shared:
                logits = target(torch.cat([input_ids[0], plain[:place]])[None]).logits[0, -1].float()
                margin = logits[plain[place]] - logits[tokens[place]]
                first_differences[name].append({"prompt": number, "place": place, "margin": float(margin)})
    return {**results, "first_differences": first_differences}


def count_off_argmax(target, input_ids, tokens) -> int:
    """Tokens that one pass over the whole text would not have chosen; plain decoding has some of its own in bf16."""
    logits = target(torch.cat([input_ids[0], tokens])[None]).logits[0, input_ids.shape[1] - 1 : -1]
    return int((logits.float().argmax(-1) != tokens).sum())


def summarize(name, results) -> dict:
    runs, plain = results[name], results["plain"]
    tokens = sum(run["tokens"] for run in runs)
    speed = tokens / sum(run["seconds"] for run in runs)
    plain_speed = sum(run["tokens"] for run in plain) / sum(run["seconds"] for run in plain)
    blocks = sum(run["passes"] - 1 for run in runs)
    margins = [difference["margin"] for difference in results["first_differences"].get(name, [])]
    summary = {
        "tokens_per_second": speed,
        "speedup": speed / plain_speed,
        "acceptance_length": (tokens - len(runs)) / blocks if blocks else None,
        "target_passes_per_token": sum(run["passes"] for run in runs) / tokens,
        "share_differing_from_plain": sum(run["differing"] for run in runs) / tokens,
        "share_off_argmax": sum(run["off_argmax"] for run in runs) / tokens,
        "prompts_identical": sum(run["differing"] == 0 for run in runs),
        "prompts": len(runs),
        "largest_margin_at_first_difference": max(map(abs, margins), default=None),
    }
    if "transformers" in results and name.startswith("ours"):
        native = results["transformers"]
        native_speed = sum(run["tokens"] for run in native) / sum(run["seconds"] for run in native)
        summary["ratio_to_transformers"] = speed / native_speed
    return summary


def show(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
