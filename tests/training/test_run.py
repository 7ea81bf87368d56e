# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What `hf-dflash train` does before it trains, and leaves behind when it fails there."""

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

import hf_dflash.training.run as run
from hf_dflash import DFlashForSpeculation
from hf_dflash.data import tokenization
from hf_dflash.data.sources import digest_of
from hf_dflash.training.plan import main as plan


pytestmark = pytest.mark.compat

POCKET = Path(__file__).parents[2] / "recipes" / "pocket"


@pytest.fixture
def arguments(tmp_path):
    """A job of 30 completions that would train; more options may follow."""
    completions = tmp_path / "completions.jsonl"
    with gzip.open(POCKET / "completions_train.jsonl.gz", "rt", encoding="utf-8") as source:
        completions.write_text("".join(islice(source, 30)), encoding="utf-8")
    options = (
        "--use_cpu true --num_hidden_layers 1 --block_size 4 --token_budget 512 --max_steps 1 --max_reply_share 1"
    )
    options += f" --target {POCKET} --completions {completions} --output_dir {tmp_path / 'out' / 'run'}"
    return [*options.split(), "--report_to", "none"]


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("--lerning_rate 1", "unknown option"),
        ("--target ./nowhere", "There is no folder"),
        ("--completions nowhere.jsonl", "nowhere.jsonl"),
        ("--eval_completions nowhere.jsonl", "nowhere.jsonl"),
        ("--eval_strategy epoch", "--eval_strategy epoch.*--eval_completions"),
        ("--acceptance_steps 1", "--acceptance_steps.*--eval_completions"),
        ("--target_dtype floaty", "--target_dtype floaty"),
        ("--mask_token_id 99999999", "mask_token_id"),
        ("--target_layer_ids 500", "target_layer_ids"),
        ("--num_attention_heads 3 --num_key_value_heads 2", "num_attention_heads"),
        ("--attention_backend flex", "--attention_backend flex"),
        ("--lora_rank 4", "--lora_rank.*--drafter"),
        (f"--init_from_target --drafter {POCKET}", "--init_from_target.*--drafter"),
        (f"--drafter {POCKET}", "can be imported"),
        ("--max_length 1", "max_length"),
        ("--chat_template nowhere.jinja", "nowhere.jinja"),
    ],
)
def test_a_mistake_that_can_be_seen_at_once_leaves_nothing_behind(mistake, message, arguments, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        run.main([*arguments, *mistake.split()])
    assert not (tmp_path / "out").exists()


def test_completions_are_read_with_the_template_that_the_target_was_served_with(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_job", run.make_trainer)
    template = tmp_path / "template.jinja"
    own = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    template.write_text("{# another one #}" + own, encoding="utf-8")
    assert run.main([*arguments, "--chat_template", str(template)]) == 0
    manifest = json.loads((tmp_path / "out" / "run" / "dataset" / "train" / "manifest.json").read_text())
    assert manifest["tokenizer"]["chat_template_digest"] == digest_of(template.read_text(encoding="utf-8"))


def test_data_that_is_refused_gives_way_to_what_was_mended(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_job", run.make_trainer)
    completions = tmp_path / "completions.jsonl"
    good = completions.read_text(encoding="utf-8")
    completions.write_text("{broken", encoding="utf-8")
    with pytest.raises(ValueError, match="bad_json"):
        run.main(arguments)
    completions.write_text(good, encoding="utf-8")
    assert run.main(arguments) == 0


def test_a_dataset_that_was_tokenized_is_kept_when_the_target_cannot_be_loaded(arguments, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the target's weights are not there")

    monkeypatch.setattr(run, "load_targets", fail)
    with pytest.raises(OSError, match="weights are not there"):
        run.main(arguments)
    monkeypatch.undo()
    monkeypatch.setattr(tokenization, "_run_units", lambda *args: pytest.fail("tokenized again"))
    assert run.main(arguments) == 0
    assert DFlashForSpeculation.from_pretrained(tmp_path / "out" / "run").config.block_size == 4


@pytest.mark.parametrize("left", ["a stopped run", "not one sample"])
def test_a_plan_does_not_take_half_a_dataset_for_the_documents(left, arguments, tmp_path, capsys):
    if left == "a stopped run":
        folder = tmp_path / "out" / "run" / "dataset" / "train"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"status": "running"}))
    else:
        (tmp_path / "completions.jsonl").write_text("{broken", encoding="utf-8")
        with pytest.raises(ValueError, match="bad_json"):
            run.main(arguments)
    assert plan(arguments) == 0
    assert "documents assumed" in capsys.readouterr().out
