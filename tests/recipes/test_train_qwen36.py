# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""recipes/train_qwen36.py as a user starts it, on its try-out."""

import pytest
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerBase


def test_the_reference_job_tries_itself_out_on_a_cpu(load_recipe, tmp_path):
    load_recipe("train_qwen36").main(["--test", f"--output-dir={tmp_path / 'out'}", "--max_steps", "1"])
    assert (tmp_path / "out" / "tiny_target").is_dir()
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (5, 8, [1, 2, 3, 4, 5])


def test_the_reference_jobs_help_lists_its_own_option_and_makes_nothing(load_recipe, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        load_recipe("train_qwen36").main(["--test", "--output-dir", str(tmp_path / "out"), "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith("usage: train_qwen36.py ") and "--test" in out
    assert not (tmp_path / "out").exists()


def test_inputs_of_a_try_out_stay_whole_while_another_process_makes_them(load_recipe, tmp_path, monkeypatch):
    recipe, output = load_recipe("train_qwen36"), tmp_path / "out"
    output.mkdir()
    recipe.test_flags(str(output))
    names = sorted(path.name for path in output.iterdir())
    assert names == ["completions.jsonl", "tiny_target"]

    weights = output / "tiny_target" / "model.safetensors"
    written = weights.stat().st_mtime_ns

    def read_and_stop(tokenizer, folder, **kwargs):
        # The other process has its model saved, and not yet its tokenizer.
        AutoModelForCausalLM.from_pretrained(weights.parent)
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", read_and_stop)
    with pytest.raises(KeyboardInterrupt):
        recipe.test_flags(str(output))
    assert weights.stat().st_mtime_ns == written
    assert sorted(path.name for path in output.iterdir()) == names
