# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""benchmarks/quality.py: a tiny run, the driver, the report, and that speculators gets what we get."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_drafters import make_drafter
from tiny_training import make_dataset

from hf_dflash import DFlashTrainer, DFlashTrainingArguments


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import quality

    return quality


def test_a_tiny_run_is_measured_at_four_points_decodes_losslessly_and_is_not_done_twice(quality, tmp_path, capsys):
    argv = ["--tiny", "--work", str(tmp_path / "work"), "--results", str(tmp_path), "--setting", "muon_dpace"]
    quality.main([*argv, "--decode", "1", "--card"])
    (path,) = tmp_path.glob("muon_dpace-*-seed0.json")
    result = json.loads(path.read_text())
    assert result["finished"] and result["steps"] == result["max_steps"] and result["blocks"] > 0
    assert len(result["curve"]) == len(quality.POINTS)
    last = result["curve"][-1]
    assert last["tokens"] == result["tokens"]
    for name in ("acceptance_length", "pocket_acceptance_length", "pocket_t1_acceptance_length", "accuracy_slot_7"):
        assert name in last
    greedy, sampled = result["decoded"]["greedy"], result["decoded"]["t1"]
    assert greedy["identical_to_plain"] == greedy["compared"] == 2
    for way in (greedy, sampled):
        assert way["decoded_acceptance_length"] == way["walked_acceptance_length"]

    # As if it were the recipe's.
    from quality_report import write_example_card

    (card,) = tmp_path.glob("card-*")
    card.rename(tmp_path / card.name.replace("muon_dpace", "recipe"))
    (tmp_path / path.name.replace("muon_dpace", "recipe")).write_text(json.dumps({**result, "setting": "recipe"}))
    write_example_card(tmp_path, tmp_path / "example")
    text = (tmp_path / "example" / "README.md").read_text(encoding="utf-8")
    assert "really decoded in fp32, greedy" in text and "2 of 2 outputs identical to plain decoding" in text
    assert (tmp_path / "example" / "training_curves.png").stat().st_size > 0

    capsys.readouterr()
    quality.main(argv)
    assert "Trained" not in capsys.readouterr().out and json.loads(path.read_text()) == result


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_speculators_computes_what_we_compute_and_trains_our_very_weights(
    kind, quality, tiny_llama, tmp_path, monkeypatch
):
    pytest.importorskip("speculators")
    from speculators.models.dflash import core
    from speculators_trainer import SpeculatorsTrainer

    dataset = make_dataset()
    seen = []

    def train(trainer_class, **more):
        args = DFlashTrainingArguments(
            str(tmp_path), token_budget=64, num_anchors=3, max_steps=3, learning_rate=1e-3, warmup_steps=0,
            save_strategy="no", use_cpu=True, disable_tqdm=True, report_to="none", run_log=False,
        )  # fmt: skip
        trainer = trainer_class(make_drafter(tiny_llama), tiny_llama, args, train_dataset=dataset, **more)
        draw, rows = trainer.draw, []
        trainer.draw = lambda micro_batch, epoch: (
            rows.append(micro_batch["row_ids"].tolist()) or draw(micro_batch, epoch)
        )
        before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        trainer.train()
        seen.append(rows)
        return trainer, before

    train(DFlashTrainer)
    options = {
        "loss_fn": "ce",
        "per_position_loss_weight": "dpace",
        "optimizer": kind,
        "max_anchors": 512,
    }
    theirs, before = train(SpeculatorsTrainer, peer_options=options)
    # The same rows in the same order.
    assert seen[0] == seen[1] and len(seen[0]) == 3

    trained = {name for name, parameter in theirs.peer.named_parameters() if parameter.requires_grad}
    assert trained == set(before)
    for name, parameter in theirs.model.named_parameters():
        assert theirs.peer.get_parameter(name) is parameter
        assert not torch.equal(parameter, before[name]), name

    # Both models draft the same hidden states from the same blocks.
    (rows,) = [batch for batch, _ in zip(theirs.get_train_dataloader(), range(1), strict=False)]
    batch = theirs.draw(rows, 0)
    features = theirs.target(
        batch.input_ids, batch.lengths, torch.arange(batch.num_tokens), return_label_hidden_states=True
    )
    packed = theirs.pack(batch, features)
    positions = batch.anchor_positions[batch.valid.flatten()]
    monkeypatch.setattr(
        core, "select_anchors", lambda *args: (positions, torch.ones_like(positions, dtype=torch.bool))
    )
    with torch.no_grad():
        hidden_states, *_ = theirs.peer._backbone_forward(**packed, max_anchors=len(positions))
        ours, _ = theirs.draft(theirs.model, batch, theirs.target(batch.input_ids, batch.lengths))
    expected = hidden_states.view(len(positions), batch.block_size, -1)[:, 1:]
    torch.testing.assert_close(ours[batch.valid.flatten()], expected, rtol=0, atol=1e-5)


def test_every_setting_is_one_that_a_run_can_have_and_is_in_the_table_once(quality, tmp_path):
    for setting in (*quality.SETTINGS, "recipe"):
        options = {k: v for k, v in quality.options_of(setting).items() if k not in quality.NOT_FOR_TRAINING}
        DFlashTrainingArguments(str(tmp_path), **options, use_cpu=True)
    assert len(set(quality.PRIORITY)) == len(quality.PRIORITY)
    assert {setting for setting, _ in quality.PRIORITY} == set(quality.SETTINGS)


class ChildProcess:
    """Stands for a run: writes its JSON and ends, or fails."""

    started: list[str] = []

    def __init__(self, command, stdout, **kwargs):
        self.name = command[command.index("--setting") + 1]
        self.started.append(self.name)
        self.returncode = int(self.name == "muon_kl")
        if self.returncode:
            stdout.write("out of memory\n")
            stdout.flush()
        else:
            results = Path(command[command.index("--results") + 1])
            write_run(results, self.name, 0, [1.0, 2.5])

    def poll(self):
        return self.returncode


def write_run(folder, setting, seed, lengths, *, finished=True, tokens=6e6, **options):
    curve = [
        {"step": i, "tokens": i * 10, "acceptance_length": length, "gsm8k_acceptance_length": length + 1, "accuracy_slot_1": 0.5}
        for i, length in enumerate(lengths, start=1)
    ]  # fmt: skip
    run = {
        "setting": setting,
        "seed": seed,
        "tokens": tokens,
        "options": {"num_hidden_layers": 3, "block_size": 2, "token_budget": 16384, **options},
        "target_layer_ids": [1, 2],
        "device": "cpu",
        "versions": {"torch": "2"},
        "finished": finished,
        "steps": 2,
        "max_steps": 2,
        "blocks": 1_500_000,
        "curve": curve,
    }
    (folder / f"{setting}-{tokens / 1e6:g}M-seed{seed}.json").write_text(json.dumps(run))


def test_the_driver_takes_missing_runs_in_order_and_outlives_one_that_fails(quality, tmp_path, monkeypatch, capsys):
    ChildProcess.started = []
    monkeypatch.setattr(quality.subprocess, "Popen", ChildProcess)
    monkeypatch.setattr(quality, "load_data", lambda arguments: None)
    write_run(tmp_path, "dpace", 0, [1.0, 2.0])
    argv = ["--target", "t", "--work", str(tmp_path / "work"), "--results", str(tmp_path), "--jobs", "1"]
    quality.main([*argv, "--only", "muon_lk", "dpace", "muon_kl", "base"])
    assert ChildProcess.started == ["muon_lk", "muon_kl", "base"]
    out = capsys.readouterr().out
    assert "failed with 1" in out and "out of memory" in out and "heldout 2.500" in out


def test_the_report_has_means_spreads_and_the_lead_over_speculators_at_equal_samples_and_time(quality, tmp_path):
    write_run(tmp_path, "base", 0, [1.0, 2.0])
    write_run(tmp_path, "base", 1, [1.0, 2.2])
    write_run(tmp_path, "other_shape", 0, [1.0, 9.0], num_hidden_layers=5)
    write_run(tmp_path, "cut_off", 0, [8.0], finished=False)
    write_run(tmp_path, "speculators", 0, [1.0, 1.75], peer={})
    # In the 3,000 s that speculators takes for 6M tokens.
    write_run(tmp_path, "base", 0, [1.0, 2.625], tokens=9e6)
    write_run(tmp_path, "base", 0, [1.0, 8.0], tokens=9.2e6)
    write_run(tmp_path, "five_layers", 0, [1.0, 8.0], num_hidden_layers=5)
    speeds = [
        {"setting": name, "context_tokens_per_second": speed, "steps_per_second": 1.0}
        for name, speed in (("base", 1), ("base", 3000), ("speculators", 2000), ("five_layers", 3000))
    ]
    more = {"attention": "auto", "compile_layers": "off"}
    (tmp_path / "speed.json").write_text(json.dumps([speed | more for speed in speeds]))
    document = tmp_path / "ablations.md"
    document.write_text(
        "above\n<!-- results: written by `quality.py --report` -->\nold\n<!-- end of results -->\nbelow\n"
    )
    quality.main(["--report", str(document), "--results", str(tmp_path)])
    text = document.read_text()
    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "| `base` | 6M | 1.50M | 0, 1 | 2.10 ± 0.10 | - | 3.10 ± 0.10 |" in text
    assert "- `base` is +20.0% against `speculators`" in text
    assert (
        "In the 3000 s that `speculators` takes for 6M tokens, layers as they are, `base` takes 9M (3000 s) and is +50.0%"
        in text
    )
    assert "| `base` | auto | layers as they are | 3,000 | 1.0 |" in text
    assert text.count("| auto | layers as they are |") == 3
    assert "cut_off" not in text and text.index("other_shape") < text.index("`base` | 6M |")
    for picture in ("curves.png", "settings.png", "equal_time.png"):
        assert (tmp_path / picture).stat().st_size > 0

    document.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        quality.main(["--report", str(document), "--results", str(tmp_path)])


def test_curves_show_speculators_the_best_of_ours_beside_each_and_longer_runs(quality, tmp_path):
    from quality_runs import beside_peers, read_runs

    write_run(tmp_path, "speculators", 0, [1.75], peer={})
    write_run(tmp_path, "speculators_8k", 0, [1.8], peer={}, token_budget=8192)
    for setting, length, budget in (("best", 2.2, 16384), ("second", 2.1, 16384), ("best_8k", 2.5, 8192)):
        write_run(tmp_path, setting, 0, [length], token_budget=budget)
    write_run(tmp_path, "other_shape", 0, [9.0], num_hidden_layers=5)
    write_run(tmp_path, "second", 0, [9.0], tokens=9e6)
    write_run(tmp_path, "recipe", 0, [9.0], tokens=12e6, num_hidden_layers=5)
    shown = [setting for _, setting in beside_peers(read_runs(tmp_path))]
    assert shown == ["best_8k", "best", "speculators_8k", "speculators", "recipe"]


def test_the_recipe_holds_out_what_the_benchmark_holds_out(quality, tmp_path):
    import quality_data

    sys.path.insert(0, str(BENCHMARKS.parent / "recipes"))
    try:
        import train_smollm2
    finally:
        sys.path.pop(0)
    train, heldout = train_smollm2.hold_out(train_smollm2.COMPLETIONS, str(tmp_path))
    ids = [row["id"] for row in quality_data.read_jsonl(Path(train_smollm2.COMPLETIONS))]
    assert [row["id"] for row in quality_data.read_jsonl(Path(heldout))] == ids[:: quality_data.HELD_OUT_EVERY]
    assert len(quality_data.read_jsonl(Path(train))) + len(ids[:: quality_data.HELD_OUT_EVERY]) == len(ids)


def test_the_profile_of_a_small_target_names_functions_and_kernels(quality, tmp_path, capsys):
    import small_target_step

    assert small_target_step.main(["--tiny", "--work", str(tmp_path)]) > 0
    out = capsys.readouterr().out
    assert "Python, 1 steps" in out and "aten::addmm" in out
