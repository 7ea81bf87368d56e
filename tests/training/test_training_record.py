# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from tiny_training import make_dataset, make_trainer
from transformers import EarlyStoppingCallback

from hf_dflash.training.training_record import describe_training


pytestmark = pytest.mark.compat


def make_run(folder, monkeypatch, acceptance: list[float], **options):
    """A run that is evaluated every two steps, with acceptance lengths that a test decides."""
    trainer = make_trainer(
        folder,
        eval_dataset=make_dataset(4, seed=2),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        **options,
    )
    evaluate, made_up = trainer.evaluation_loop, iter(acceptance)

    def evaluation_loop(*args, **kwargs):
        output = evaluate(*args, **kwargs)
        output.metrics["eval_acceptance_length"] = next(made_up)
        return output

    monkeypatch.setattr(trainer, "evaluation_loop", evaluation_loop)
    return trainer


def test_the_figure_is_that_of_the_weights_which_were_put_back(tmp_path, monkeypatch):
    trainer = make_run(tmp_path, monkeypatch, [1.2, 1.9, 1.5, 1.8], max_steps=6)
    trainer.train()
    # Evaluated anew or not, the weights are those of step 4.
    for expected in (1.9, 1.8):
        record = describe_training(trainer)
        assert [figure.acceptance_length for figure in record.acceptance] == [expected]
        assert "simulated at step 4:" in record.acceptance[0].setting
        assert record.progress == "6 steps. The weights are those of step 4, the best by `eval_acceptance_length`."
        if expected == 1.9:
            trainer.evaluate()


def test_a_run_that_ended_early_is_not_under_way(tmp_path, monkeypatch):
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = make_run(tmp_path, monkeypatch, [1.9, 1.5], max_steps=8, callbacks=[stopping])
    trainer.train()
    assert describe_training(trainer).progress.startswith("Ended at step 4 of 8. The weights are those of step 2")


def test_steps_that_count_in_place_of_epochs_are_the_ones_on_the_card(tmp_path):
    names = [name for name in describe_training(make_trainer(tmp_path)).hyperparameters if name != "max_steps"]
    by_steps = describe_training(make_trainer(tmp_path, max_steps=7)).hyperparameters
    assert "num_train_epochs" in names and "num_train_epochs" not in by_steps
    assert by_steps["max_steps"] == 7 and len(by_steps) == len(names)
