# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""recipes/train_smollm2.py as a user starts it, with a tiny random target and very little to do."""

import gzip
from argparse import Namespace
from pathlib import Path

from transformers import AutoModel


ROOT = Path(__file__).parents[2]


def test_the_recipe_trains_evaluates_what_it_held_out_and_writes_a_card(load_recipe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from quality_tiny import make_tiny

    recipe = load_recipe("train_smollm2")
    tiny = Namespace(work=tmp_path, tokens=1.0)
    make_tiny(tiny)
    rows = tiny.completions.read_text(encoding="utf-8")
    completions, output = tmp_path / "completions.jsonl.gz", tmp_path / "out"
    completions.write_bytes(gzip.compress(rows.encode()))
    monkeypatch.setattr(recipe, "COMPLETIONS", str(completions))
    recipe.main(
        f"--target {tiny.target} --target_dtype float32 --output_dir {output} --num_hidden_layers 1 --target_layer_ids 2 6 "
        "--max_steps 2 --token_budget 256 --num_anchors 2 --max_length 256 --eval_strategy no --logging_steps 1 "
        "--max_reply_share 1 --max_short_share 1".split()
    )
    assert (output / "completions_heldout.jsonl").read_text(encoding="utf-8").splitlines() == rows.splitlines()[:1]
    drafter = AutoModel.from_pretrained(output)
    assert (drafter.config.num_hidden_layers, drafter.config.block_size, drafter.config.mask_token_id) == (1, 8, 4)
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "held-out replies" in card and "matrix_optimizer: muon" in card


def test_a_dry_run_says_what_would_be_done_and_does_nothing(load_recipe, tmp_path, capsys, tiny_qwen3):
    tiny_qwen3.config.save_pretrained(tmp_path / "target")
    output = tmp_path / "out"
    load_recipe("train_smollm2").main(
        f"--target {tmp_path / 'target'} --output_dir {output} --target_layer_ids 0 2 4 --mask_token_id 4 --dry_run".split()
    )
    assert "matrix_optimizer" in capsys.readouterr().out and not output.exists()
