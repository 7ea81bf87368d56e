# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Inputs of `quality.py --tiny`: a random Llama with the tokenizer of recipes/pocket, and a few of its completions."""

import gzip
import itertools
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


POCKET = Path(__file__).parents[1] / "recipes" / "pocket"
NUM_ROWS = 9
NUM_PROMPTS = 1


def make_tiny(arguments) -> None:
    """Makes target, completions and prompts below `--work`, and lets `arguments` name them."""
    target = arguments.work / "target"
    arguments.target, arguments.completions = str(target), arguments.work / "completions.jsonl"
    arguments.prompts = [arguments.work / "prompts_eval_pocket.jsonl"]
    arguments.heldout_rows, arguments.rows_at_points, arguments.decode_tokens = 2, 1, 12
    arguments.tokens = min(arguments.tokens, 2e3)
    arguments.max_length, arguments.max_new_tokens = 256, 12
    if target.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    with gzip.open(POCKET / "completions_train.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, NUM_ROWS))
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.completions.write_text("".join(lines), encoding="utf-8")
    prompts = [{"messages": json.loads(line)["messages"][:-1]} for line in lines[:NUM_PROMPTS]]
    arguments.prompts[0].write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    config = LlamaConfig(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
