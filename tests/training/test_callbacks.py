# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import logging

import pytest
import torch
from tiny_training import assert_same, comparable, heard_by_pytest, make_dataset, make_trainer, training_state

from hf_dflash.training.callbacks import AcceptanceCallback


pytestmark = pytest.mark.compat


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_each_epoch_is_saved_beside_save_steps_and_an_early_end_is_not_an_epoch(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5, "save_each_epoch": True, "num_train_epochs": 3}
    trainer = make_trainer(tmp_path, max_steps=17, **options)
    trainer.train()
    assert trainer.steps_per_epoch == 7
    assert checkpoints(tmp_path) == [5, 7, 10, 14, 15, 17]
    # 17 is the end of training with `save_strategy="steps"`, not of an epoch.
    early = make_trainer(tmp_path / "early", save_each_epoch=True, max_steps=10)
    early.train()
    assert checkpoints(tmp_path / "early") == [7]


def test_the_best_checkpoint_is_the_best_by_acceptance_and_rotation_spares_it(tmp_path, monkeypatch):
    trainer = make_trainer(
        tmp_path,
        eval_dataset=make_dataset(4, seed=2),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        max_steps=10,
        save_total_limit=1,
        load_best_model_at_end=True,
    )
    # Loss falls all the while, acceptance is best at step 4.
    made_up = iter([(5.0, 1.2), (4.0, 1.9), (3.0, 1.5), (2.0, 1.1), (1.0, 1.0)])
    at_the_best = {}
    evaluate = trainer.evaluation_loop

    def evaluation_loop(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        output.metrics["eval_loss"], output.metrics["eval_acceptance_length"] = next(made_up)
        if trainer.state.global_step == 4:
            at_the_best.update({k: v.clone() for k, v in trainer.model.state_dict().items()})
        return output

    monkeypatch.setattr(trainer, "evaluation_loop", evaluation_loop)
    trainer.train()
    assert trainer.args.greater_is_better is True
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    assert_same(dict(trainer.model.state_dict()), at_the_best)
    assert 4 in checkpoints(tmp_path)
    trainer.save_model()
    from safetensors.torch import load_file

    final = load_file(tmp_path / "model.safetensors")
    assert_same(final, {name: value.to(torch.bfloat16) for name, value in at_the_best.items()})


def test_with_several_evaluation_sets_the_first_one_decides(tmp_path):
    sets = {"math": make_dataset(4, seed=2), "chat": make_dataset(4, seed=3)}
    trainer = make_trainer(tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=2, max_steps=2)
    trainer.train()
    assert trainer.args.metric_for_best_model == "eval_math_acceptance_length"
    assert trainer.state.best_metric is not None


# ---- Acceptance by decoding ----


def prompts_dataset():
    """Prompts with replies; only the prompts matter."""
    return make_dataset(6, seed=4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_decoded_and_simulated_acceptance_of_the_same_text_are_one_number(kind, tmp_path):
    # A drafter that has learned something, so that it is not 1.0 on both sides.
    trainer = make_trainer(
        tmp_path,
        kind=kind,
        eval_dataset=prompts_dataset(),
        acceptance_steps=15,
        max_steps=30,
        learning_rate=2e-2,
        dtype=torch.float64,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "decoded_acceptance_length" in entry]
    assert [entry["step"] for entry in logged] == [15, 30]
    for entry in logged:
        assert entry["decoded_acceptance_length"] == entry["simulated_acceptance_length"]


def test_decoding_along_the_way_changes_nothing_of_the_training(tmp_path):
    measured = make_trainer(tmp_path / "a", eval_dataset=prompts_dataset(), acceptance_steps=6, max_steps=13)
    plain = make_trainer(tmp_path / "b", eval_dataset=prompts_dataset(), max_steps=13)
    for trainer in (measured, plain):
        trainer.train()
        assert trainer.model.training
    states = [training_state(trainer) for trainer in (measured, plain)]
    others = [entry for entry in states[0]["log"] if "decoded_acceptance_length" not in entry]
    assert len(others) == len(states[0]["log"]) - 2
    states[0]["log"] = others
    assert_same(*states)


def test_a_gap_between_decoding_and_training_is_warned_about(tmp_path, monkeypatch, caplog):
    trainer = make_trainer(tmp_path, eval_dataset=prompts_dataset())
    callback = AcceptanceCallback(trainer, every=1)
    # Training that sees what decoding does not: every draft is right.
    monkeypatch.setattr(trainer, "simulate_acceptance", lambda sequence, start: [4] * 5)
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        figures = callback.measure()
    assert figures["simulated_acceptance_length"] == 4.0 > figures["decoded_acceptance_length"]
    assert "decoding and training do not agree" in caplog.text


def test_pad_tokens_in_a_prompt_are_decoded_like_others(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=prompts_dataset())
    callback = AcceptanceCallback(trainer, every=1)
    expected = callback.measure()
    prompt = next(prompt for prompt in callback._prompts() if len(prompt) > 1)
    trainer.target.model.generation_config.pad_token_id = int(prompt[-1])
    assert callback.measure() == expected


def test_log_lines_are_plain_numbers(tmp_path):
    trainer = make_trainer(
        tmp_path, eval_dataset=make_dataset(4, seed=2), eval_strategy="steps", eval_steps=2, max_steps=2
    )
    trainer.train()
    assert json.loads(json.dumps(comparable(trainer.state.log_history)))
