# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What all recipes have in common."""

import subprocess
import sys
from pathlib import Path

import pytest


RECIPES = Path(__file__).parents[2] / "recipes"
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
