# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How fast a small target writes completions on one device: rows/s and tokens/s, as JSON.

    python benchmarks/generate_smollm2.py SmolLM2-135M-Instruct prompts.jsonl.gz completions/ --max_rows 20000

The same prompts are answered one batch of 8 after the other with `model.generate` for a few seconds in the same run, to have
both sides. The completions stay in the output folder; a run that was stopped goes on.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash.data.completion_folder import ReplyLimits
from hf_dflash.data.local_completions import generate_completions_locally
from hf_dflash.data.sources import open_jsonl


def measure_plain_generate(arguments, seconds: float) -> dict:
    """`generate` over batches of 8 in file order, as most scripts do it."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=getattr(torch, arguments.dtype))
    model = model.to(arguments.device).eval()
    with open_jsonl(arguments.prompts) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(4096), strict=False)]
    replies = tokens = 0
    started = time.perf_counter()
    for start in range(0, len(rows), 8):
        texts = [
            tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
            for row in rows[start : start + 8]
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
        written = output[:, inputs["input_ids"].shape[1] :]
        # The end of turn is also the padding: it counts once.
        tokens += int((written != tokenizer.eos_token_id).sum() + (written == tokenizer.eos_token_id).any(1).sum())
        replies += len(texts)
        if time.perf_counter() - started > seconds:
            break
    elapsed = time.perf_counter() - started
    return {
        "rows_per_s": round(replies / elapsed, 2),
        "tokens_per_s": round(tokens / elapsed),
        "seconds": round(elapsed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("prompts", type=Path, help="JSONL, plain or .gz")
    parser.add_argument("output", type=Path, help="folder of completions")
    parser.add_argument("--max_rows", type=int)
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--time_limit", type=float, help="seconds after which no further batch is started")
    parser.add_argument("--token_budget", type=int, default=2**20)
    parser.add_argument("--max_batch_rows", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plain_seconds", type=float, default=15.0, help="for the plain loop; 0 leaves it out")
    arguments = parser.parse_args()

    result = {
        "machine": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: getattr(arguments, name) for name in ("max_new_tokens", "token_budget", "max_batch_rows", "dtype")},
    }
    started = time.perf_counter()
    manifest = generate_completions_locally(
        arguments.prompts,
        arguments.output,
        arguments.target,
        devices=[arguments.device],
        dtype=arguments.dtype,
        max_new_tokens=arguments.max_new_tokens,
        token_budget=arguments.token_budget,
        max_batch_rows=arguments.max_batch_rows,
        max_rows=arguments.max_rows,
        time_limit=arguments.time_limit,
        # A third of these prompts want a word or a letter: many replies are the same for good reason.
        limits=ReplyLimits(max_empty_share=0.2, max_identical_share=0.5),
    )
    seconds = time.perf_counter() - started
    counts = manifest["counts"]
    result |= {
        "status": manifest["status"],
        "counts": counts,
        "this_run": manifest["this_run"],
        "seconds_with_loading": round(seconds, 1),
        "rows_per_s": round(manifest["this_run"]["rows"] / seconds, 1),
        "tokens_per_s": round(manifest["this_run"]["completion_tokens"] / seconds),
    }
    if torch.cuda.is_available():
        result["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    if arguments.plain_seconds:
        result["plain_generate_batch_8"] = plain = measure_plain_generate(arguments, arguments.plain_seconds)
        result["speedup"] = round(result["tokens_per_s"] / plain["tokens_per_s"], 1)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
