# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What drafters of benchmarks/quality.py are trained and measured on: tokenized once, kept in memory, no `datasets` needed.

The target's greedy completions, of which the recipe holds out every 40th, and replies that the target writes to evaluation
prompts, greedily and at temperature 1. Acceptance is only defined on what the target itself wrote.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash.atomic_files import replacing
from hf_dflash.data.chat import render_conversation
from hf_dflash.data.local_generation import LocalSampling, generate_replies
from hf_dflash.data.sources import open_jsonl
from hf_dflash.evaluation.prompts import encode_prompt


HELD_OUT_EVERY = 40
ROWS_OF_A_BATCH = 128
TEMPERATURES = (0.0, 1.0)


class RowsInMemory(list):
    """As much of `datasets.Dataset` as the trainer asks for."""

    column_names = ("input_ids", "loss_mask", "length", "num_supervised", "row_id")

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def make_row(input_ids, loss_mask, row_id: int) -> dict:
    return {
        "input_ids": np.asarray(input_ids, dtype=np.int32),
        "loss_mask": np.asarray(loss_mask, dtype=bool),
        "length": len(input_ids),
        "num_supervised": int(sum(loss_mask)),
        "row_id": int(row_id),
    }


def pick_evenly(items: list, number: int) -> list:
    """So many of them, spread evenly."""
    return items[:: max(1, len(items) // number)][:number]


def prompt_of(row: dict) -> np.ndarray:
    """The ids before the reply."""
    return row["input_ids"][: int(row["loss_mask"].argmax())]


def read_jsonl(path: Path) -> list[dict]:
    with open_jsonl(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def tokenize_rows(completions: Path, target: str, cache: Path, max_length: int) -> dict[str, RowsInMemory]:
    """`{"train": rows, "heldout": rows}`, made once; rows are cut at `max_length` tokens."""
    if not cache.exists():
        tokenizer = AutoTokenizer.from_pretrained(target)
        rows = []
        for number, row in enumerate(read_jsonl(completions)):
            messages = list(row["messages"])
            of_the_reply = {key: row[key] for key in ("completion_token_ids", "finish_reason") if row.get(key)}
            messages[-1] = {**messages[-1], **of_the_reply}
            try:
                sample = render_conversation(tokenizer, messages, max_length=max_length)[-1]
            except ValueError:
                continue
            if sum(sample.loss_mask) >= 2:
                rows.append(make_row(sample.input_ids, sample.loss_mask, number))
        columns = {
            name: np.concatenate([np.atleast_1d(row[name]) for row in rows])
            for name in ("input_ids", "loss_mask", "length", "row_id")
        }
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache, "wb") as file:
            np.savez_compressed(file, **columns)
    columns = np.load(cache)
    ends = columns["length"].cumsum()[:-1]
    whole = zip(np.split(columns["input_ids"], ends), np.split(columns["loss_mask"], ends), strict=True)
    splits = {"train": RowsInMemory(), "heldout": RowsInMemory()}
    for row_id, (input_ids, loss_mask) in zip(columns["row_id"], whole, strict=True):
        splits["train" if row_id % HELD_OUT_EVERY else "heldout"].append(make_row(input_ids, loss_mask, row_id))
    return splits


def write_replies(
    target: str,
    prompt_files: list[Path],
    heldout: RowsInMemory,
    cache: Path,
    *,
    num_heldout: int,
    max_length: int,
    max_new_tokens: int,
    device: str,
) -> dict[str, RowsInMemory]:
    """
    Replies of the target, made once: a set for each file of prompts and temperature, and one at temperature 1 for held-out
    prompts (whose greedy replies are the completions).

    Returns:
        `dict[str, RowsInMemory]`: by names such as `gsm8k` and, at temperature 1, `gsm8k_t1`.
    """
    if not cache.exists():
        tokenizer = AutoTokenizer.from_pretrained(target)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
        prompts = [("heldout", prompt_of(row).tolist()) for row in heldout]
        # Spread over the file, whose rows are sorted by source.
        prompts = pick_evenly(prompts, num_heldout)
        for path in prompt_files:
            name = path.stem.removeprefix("prompts_eval_")
            prompts += [
                (name, encode_prompt(tokenizer, row["messages"], enable_thinking=True)[0].tolist())
                for row in read_jsonl(path)
            ]
        prompts = [(name, ids) for name, ids in prompts if len(ids) + max_new_tokens <= max_length]
        prompts.sort(key=lambda prompt: len(prompt[1]))
        lines = []
        for temperature in TEMPERATURES:
            asked = [(name, ids) for name, ids in prompts if temperature or name != "heldout"]
            for start in range(0, len(asked), ROWS_OF_A_BATCH):
                batch = asked[start : start + ROWS_OF_A_BATCH]
                replies = generate_replies(
                    model,
                    [ids for _, ids in batch],
                    max_new_tokens=max_new_tokens,
                    eos_token_ids=[tokenizer.eos_token_id],
                    sampling=LocalSampling(temperature=temperature),
                )
                for (name, ids), reply in zip(batch, replies, strict=True):
                    lines.append({"set": name + "_t1" * bool(temperature), "prompt_ids": ids, "reply_ids": reply})
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
    sets: dict[str, RowsInMemory] = {}
    for number, line in enumerate(read_jsonl(cache)):
        prompt, reply = line["prompt_ids"], line["reply_ids"]
        if len(reply) >= 2:
            row = make_row(prompt + reply, [0] * len(prompt) + [1] * len(reply), number)
            sets.setdefault(line["set"], RowsInMemory()).append(row)
    return sets
