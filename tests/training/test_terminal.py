# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import io
import sys

import pytest
from tiny_training import make_dataset, make_trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_dflash.training.terminal import TerminalCallback, abbreviate, describe_evaluation, describe_figures


pytestmark = pytest.mark.compat


class Terminal(io.StringIO):
    def isatty(self):
        return True


def train(tmp_path, **options):
    options = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3, **options}
    trainer = make_trainer(tmp_path, eval_dataset=make_dataset(4, seed=2), **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_ours_takes_the_place_of_the_trainers_own(disable_tqdm, tmp_path):
    trainer = make_trainer(tmp_path, disable_tqdm=disable_tqdm)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(TerminalCallback) == 1
    assert ProgressCallback not in kinds and PrinterCallback not in kinds


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_without_a_terminal_there_are_plain_lines_and_a_summary(disable_tqdm, tmp_path, capsys):
    train(tmp_path, disable_tqdm=disable_tqdm)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split(",")[0] for line in lines if "/6," in line] == ["step 2/6", "step 4/6", "step 6/6"]
    assert [line.split(":")[0] for line in lines if "held-out: " in line] == ["step 3", "step 6"]
    assert "acceptance length" in lines[0] and "tokens/s" in lines[0] and "over anchors" in lines[0]
    assert lines[-1].startswith("Trained 6 steps in ") and "held-out" in lines[-1] and lines[-1].endswith(".")
    assert "{" not in out and "\r" not in out
    assert "Training" not in err


def test_in_a_terminal_there_is_one_bar_with_the_figures_and_evaluations_above_it(tmp_path, capsys, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(tmp_path, disable_tqdm=False)
    shown = terminal.getvalue()
    bars = [part for part in shown.split("\r") if part.startswith("Training")]
    assert "6/6" in bars[-1] and "loss" in bars[-1] and "acceptance length" in bars[-1]
    assert "step 3: held-out: loss" in shown
    assert "step 2/6, " not in shown + capsys.readouterr().out


def test_a_run_that_was_stopped_says_so(tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=10)

    def stop(args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 4

    trainer.callback_handler.callbacks[-1].on_step_end = stop
    trainer.train()
    assert "Stopped after 4 steps in " in capsys.readouterr().out.splitlines()[-1]


def test_the_newest_held_out_figure_is_shown_and_before_it_the_anchors():
    logs = {"loss": 2.34567, "anchor_acceptance_length": 1.5, "tokens_per_second": 12345.6}
    assert describe_figures(logs) == ["loss 2.346", "acceptance length 1.500 over anchors", "12.3K tokens/s"]
    evaluated = {**logs, "eval_anchor_acceptance_length": 9, "eval_acceptance_length": 1.75}
    assert describe_figures(evaluated)[1] == "acceptance length 1.750 held-out"
    assert describe_figures({}) == []


def test_an_evaluation_is_one_line_without_slots_and_runtimes():
    logs = {
        "eval_loss": 2.0,
        "eval_accuracy_slot_1": 0.5,
        "eval_runtime": 3.0,
        "eval_model_preparation_time": 0.0004,
        "eval_steps_per_second": 1.0,
        "epoch": 1.0,
    }
    assert describe_evaluation(logs) == "held-out: loss 2"
    decoded = {"decoded_acceptance_length": 2.5, "simulated_acceptance_length": 2.25}
    assert describe_evaluation(decoded) == "decoded: acceptance length 2.5, simulated acceptance length 2.25"


@pytest.mark.parametrize(
    "value, text", [(12.4, "12"), (1234, "1.2K"), (128_700, "128.7K"), (2.5e6, "2.5M"), (3e9, "3.0G")]
)
def test_large_numbers_are_short(value, text):
    assert abbreviate(value) == text


def test_a_run_that_has_ended_says_so_when_it_is_started_again(tmp_path, capsys):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, **options).train()
    make_trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert capsys.readouterr().out.splitlines()[-1].startswith("The run had ended before, at step 2 of 2")


def test_a_run_of_no_epochs_does_not_say_that_it_had_ended_before(tmp_path, capsys):
    make_trainer(tmp_path, num_train_epochs=0).train()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Trained 0 steps in ")
