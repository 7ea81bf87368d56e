# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Makes the small file that is shipped of the completions that SmolLM2-135M-Instruct wrote.

    python recipes/smollm2/pack_completions.py completions/ SmolLM2-135M-Instruct recipes/smollm2/completions.jsonl.gz

It leaves out replies that are shorter than a block (most are the single letters that a test asks for) and replies that were
given before, drops token ids where the text gives the same ids again, and thins the rest out evenly until the file fits.
"""

import argparse
import gzip
import hashlib
import io
import json
import sys
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer


def select(rows: list[dict], min_reply_tokens: int) -> tuple[list[dict], Counter]:
    """The rows that are worth training on, in the order of a hash of their ids, and the number of others by reason."""
    kept, left_out, replies = [], Counter(), set()
    for row in sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).digest()):
        reply = row["messages"][-1]["content"].strip()
        if len(row["completion_token_ids"]) < min_reply_tokens:
            left_out["short"] += 1
        elif reply in replies:
            left_out["given before"] += 1
        else:
            replies.add(reply)
            kept.append(row)
    return kept, left_out


def without_needless_ids(row: dict, tokenizer) -> dict:
    """The row without its ids, if its text and its end of turn are tokenized to just these."""
    ids = tokenizer(row["messages"][-1]["content"], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if row["finish_reason"] == "stop" else []
    if ids + end != row["completion_token_ids"]:
        return row
    return {key: value for key, value in row.items() if key != "completion_token_ids"}


def compress(rows: list[dict]) -> bytes:
    """The same rows always give the same bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        for row in sorted(rows, key=lambda row: row["id"]):  # rows of one source together: they share their wording
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return buffer.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("completions", type=Path, help="folder that `hf-dflash generate` wrote")
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("output", type=Path, help=".jsonl.gz")
    parser.add_argument("--min_reply_tokens", type=int, default=16)
    parser.add_argument("--max_bytes", type=int, default=8_000_000)
    arguments = parser.parse_args()

    files = sorted(arguments.completions.glob("completions-*.jsonl*"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    if not rows:
        sys.exit(f"{arguments.completions} holds no completions.")
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    kept, left_out = select(rows, arguments.min_reply_tokens)
    packed = [without_needless_ids(row, tokenizer) for row in kept]
    content = compress(packed)
    while len(content) > arguments.max_bytes:
        fitting = int(len(packed) * arguments.max_bytes / len(content) * 0.995)
        left_out["too many for the file"] += len(packed) - fitting
        packed = packed[:fitting]
        content = compress(packed)
    arguments.output.write_bytes(content)
    with_ids = sum("completion_token_ids" in row for row in packed)
    print(
        f"{len(rows)} completions, {len(packed)} in {arguments.output} ({len(content) / 1e6:.1f} MB), {with_ids} of them with "
        f"ids. Left out: {dict(left_out)}. Cut: {sum(row['finish_reason'] == 'length' for row in packed)}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
