# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The recipes as a user starts them, with very little to do."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel


RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = "--max_steps 2 --token_budget 512 --num_anchors 2 --eval_strategy no --logging_steps 1".split()


def load_recipe(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def quickstart(monkeypatch):
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


def test_the_reference_job_tries_itself_out_on_a_cpu(tmp_path):
    load_recipe("train_qwen36").main(["--test", f"--output-dir={tmp_path / 'out'}", "--max_steps", "1"])
    assert (tmp_path / "out" / "tiny_target").is_dir()
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (5, 8, [1, 2, 3, 4, 5])


def test_the_reference_jobs_help_lists_its_own_option_and_makes_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        load_recipe("train_qwen36").main(["--test", "--output-dir", str(tmp_path / "out"), "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith("usage: train_qwen36.py ") and "--test" in out
    assert not (tmp_path / "out").exists()


TRAINING = "--target t --completions c.jsonl --loss_weighting dpace --loss_type kl"


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("quickstart.py", TRAINING, "--loss_type"),
        ("train_qwen36.py", TRAINING, "--loss_type"),
        ("train_smollm2.py", TRAINING, "--loss_type"),
        ("tokenize_completions.py", f"none.jsonl --target {RECIPES / 'pocket'} --output {{folder}}", "none.jsonl"),
        ("generate_completions.py", "none.jsonl {folder} --servers http://127.0.0.1:9/v1", "none.jsonl"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback(recipe, arguments, message, tmp_path):
    command = [sys.executable, str(RECIPES / recipe), *arguments.format(folder=tmp_path / "out").split()]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert f"{recipe}: error: " in run.stderr and message in run.stderr
