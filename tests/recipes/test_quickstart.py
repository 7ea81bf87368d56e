# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""recipes/quickstart.py as a user starts it, with very little to do."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel


RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = "--max_steps 2 --token_budget 512 --num_anchors 2 --eval_strategy no --logging_steps 1".split()


@pytest.fixture
def quickstart(load_recipe, monkeypatch):
    recipe = load_recipe("quickstart")
    for name, value in {"NUM_PROMPTS": 1, "MAX_NEW_TOKENS": 8, "MAX_EVAL_ROWS": 2}.items():
        monkeypatch.setattr(recipe, name, value)
    threads = torch.get_num_threads()
    yield recipe
    torch.set_num_threads(threads)


def test_quickstart_on_completions_of_ones_own_ends_with_a_table_and_is_not_done_twice(quickstart, tmp_path, capsys):
    completions = tmp_path / "completions.jsonl"
    with gzip.open(RECIPES / "pocket" / "completions_train.jsonl.gz", "rt", encoding="utf-8") as source:
        completions.write_text("".join(line for line, _ in zip(source, range(60), strict=False)), encoding="utf-8")
    output = tmp_path / "out"
    # One of 60 replies that occurs twice is already 3%: shares say nothing about so few rows.
    argv = ["--completions", str(completions), "--output_dir", str(output), "--max_reply_share", "1", *SMALL]
    quickstart.main(argv)
    first = capsys.readouterr().out
    assert "identical to greedy                      1/1         1/1" in first
    assert (output / "quickstart.png").stat().st_size > 0
    held_out = [json.loads(line)["id"] for line in (output / "completions_heldout.jsonl").open(encoding="utf-8")]
    trained_on = [json.loads(line)["id"] for line in (output / "completions_train.jsonl").open(encoding="utf-8")]
    assert len(held_out) == 3 and len(trained_on) == 57 and not set(held_out) & set(trained_on)
    assert AutoModel.from_pretrained(output).dtype == torch.bfloat16

    weights = (output / "model.safetensors").stat().st_mtime_ns
    quickstart.main(argv)
    assert "Already done" in capsys.readouterr().out
    assert (output / "model.safetensors").stat().st_mtime_ns == weights
