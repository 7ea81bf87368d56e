# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Training with targets that compute ahead in threads, against targets that compute when they are asked."""

from functools import partialmethod

import pytest
import torch
from tiny_models import make_target
from tiny_training import assert_same, make_dataset, make_trainer, training_state
from transformers import TrainerCallback

from hf_dflash import DFlashForSpeculation, FrozenTarget
from hf_dflash.target.pipeline import TargetForwardError
from hf_dflash.training.callbacks import AcceptanceCallback
from hf_dflash.training.checkpoint import find_last_checkpoint


pytestmark = pytest.mark.compat

# Nothing falls together: three micro-batches to a step, an evaluation at every third step, a log at every second.
OPTIONS = {
    "gradient_accumulation_steps": 3,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "num_train_epochs": 2,
}


def trainer_of(folder, **options):
    return make_trainer(folder, **{**OPTIONS, "eval_dataset": make_dataset(4, seed=2), **options})


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("inline"))
    assert not trainer.pipeline.is_asynchronous
    trainer.train()
    return training_state(trainer)


@pytest.mark.parametrize("targets, depth", [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_weights_optimizer_and_logs_are_bit_equal_to_inline(targets, depth, inline, tmp_path):
    trainer = trainer_of(tmp_path, pipeline="on", targets_per_process=targets, pipeline_depth=depth)
    assert len(trainer.pipeline.targets) == targets and trainer.pipeline.capacity == targets * depth
    trainer.train()
    assert_same(training_state(trainer), inline)


@pytest.mark.parametrize("kind, loss_type", [("qwen3_5", "ce"), ("qwen3", "lk")])
def test_hybrid_targets_and_losses_that_read_hidden_states_are_bit_equal_too(kind, loss_type, tmp_path):
    states = []
    for mode in ("off", "on"):
        trainer = make_trainer(tmp_path / mode, kind=kind, loss_type=loss_type, pipeline=mode, max_steps=5)
        trainer.train()
        states.append(training_state(trainer))
    assert_same(*states)


def test_mixed_precision_is_the_drafters_alone_so_ahead_and_inline_are_bit_equal(tmp_path):
    """Autocast belongs to a thread: a target that runs inside the drafter's would hand over other features."""
    states = []
    for mode in ("off", "on"):
        trainer = make_trainer(tmp_path / mode, kind="qwen3_5", bf16=True, pipeline=mode, max_steps=5)
        trainer.train()
        states.append(training_state(trainer))
    assert_same(*states)


def test_compiled_layers_are_bit_equal_too_and_compiled_before_anything_runs_ahead(tmp_path, monkeypatch):
    for one in (DFlashForSpeculation, FrozenTarget):
        monkeypatch.setattr(one, "compile_layers", partialmethod(one.compile_layers, backend="eager"))
    states = []
    for mode in ("off", "on"):
        torch._dynamo.reset()
        trainer = make_trainer(
            tmp_path / mode,
            compile_layers="on",
            pipeline=mode,
            gradient_accumulation_steps=2,
            targets_per_process=3 if mode == "on" else 1,
            max_steps=3,
        )
        assert trainer.pipeline.in_turn == (3 if mode == "on" else 2)
        trainer.train()
        states.append(training_state(trainer))
    assert_same(*states)


class Do(TrainerCallback):
    """Something at the end of a step."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.how(control)


@pytest.mark.parametrize("stop_at, modes", [(1, ("on", "on")), (2, ("on", "off")), (3, ("off", "on"))])
def test_a_run_that_stops_and_goes_on_sees_the_rows_of_one_that_does_not(stop_at, modes, inline, tmp_path):
    def stop(control):
        control.should_training_stop = control.should_save = True

    stopped = trainer_of(tmp_path, pipeline=modes[0], callbacks=[Do(stop_at, stop)])
    stopped.train()
    assert stopped.pipeline.num_waiting == 0
    resumed = trainer_of(tmp_path, pipeline=modes[1])
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), inline)


def test_an_epoch_that_is_left_early_leaves_nothing_behind_in_the_next(tmp_path):
    def leave(control):
        control.should_epoch_stop = True

    states = []
    for mode in ("off", "on"):
        trainer = trainer_of(tmp_path / mode, pipeline=mode, callbacks=[Do(1, leave)], num_train_epochs=3)
        trainer.train()
        states.append(training_state(trainer))
    assert states[0]["step"] < 9
    assert_same(*states)


def test_no_target_reads_what_is_never_trained_on(tmp_path):
    trainer = make_trainer(tmp_path, pipeline="on", max_steps=3)
    requests = []
    submit = trainer.pipeline.submit
    trainer.pipeline.submit = lambda request: requests.append(request) or submit(request)
    trainer.train()
    assert len(requests) == 3
    # A finished run that is started again does not even begin.
    trainer.args.max_steps = trainer.state.max_steps = 3
    trainer.train()
    assert len(requests) == 6


def test_micro_batches_without_rows_at_the_end_of_an_epoch_are_bit_equal(tmp_path):
    states = []
    for mode in ("off", "on"):
        trainer = make_trainer(
            tmp_path / mode,
            dataset=make_dataset(3),
            gradient_accumulation_steps=5,
            pipeline=mode,
            targets_per_process=2,
            loss_type="kl",
        )
        trainer.train()
        states.append(training_state(trainer))
    assert states[0]["step"] == 2
    assert_same(*states)


def test_decoding_with_the_target_in_between_disturbs_neither(tmp_path):
    states = []
    for mode in ("off", "on"):
        trainer = trainer_of(tmp_path / mode, pipeline=mode, pipeline_depth=3, acceptance_steps=1, max_steps=3)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, AcceptanceCallback):
                callback.num_prompts, callback.max_new_tokens = 2, 8
        trainer.train()
        states.append(training_state(trainer))
    assert any("decoded_acceptance_length" in entry for entry in states[0]["log"])
    assert_same(*states)


# ---- A target that fails ----


class FailingTarget(FrozenTarget):
    """Runs out of memory at its n-th forward pass over training rows."""

    def __init__(self, fails_at):
        super().__init__(make_target("qwen3"), [1, 3])
        self.fails_at, self.count = fails_at, 0

    def __call__(self, *args, **kwargs):
        self.count += kwargs.get("device") is not None
        if self.count == self.fails_at and kwargs.get("device") is not None:
            raise torch.OutOfMemoryError("no room")
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("fails_at, step", [(2, 0), (4, 1), (8, 2)])
def test_a_target_that_fails_names_its_rows_and_leaves_a_checkpoint_of_the_last_whole_step(
    mode, fails_at, step, inline, tmp_path
):
    trainer = trainer_of(tmp_path, pipeline=mode, target=FailingTarget(fails_at))
    drawn = []
    draw = trainer.draw
    trainer.draw = lambda *args: drawn.append(draw(*args)) or drawn[-1]
    with pytest.raises(TargetForwardError, match="OutOfMemoryError: no room") as failure:
        trainer.train()
    rows = ", ".join(map(str, drawn[fails_at - 1].row_ids.tolist()))
    assert f"[{rows}]" in str(failure.value)
    assert trainer.state.global_step == step
    assert find_last_checkpoint(tmp_path).endswith(f"checkpoint-{step}")

    resumed = trainer_of(tmp_path, pipeline=mode)
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), inline)


# ---- What the log says ----


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_log_says_where_the_time_goes(mode, tmp_path):
    trainer = make_trainer(tmp_path, pipeline=mode, logging_steps=2, max_steps=4)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        parts = [entry[f"time/{name}"] for name in ("target", "drafter", "transfer", "wait")]
        assert all(part >= 0 for part in parts) and entry["time/target"] > 0 and entry["time/drafter"] > 0
        assert entry["time/drafter"] + entry["time/wait"] <= entry["time/step"]
        seconds = 2 * entry["time/step"]
        assert entry["tokens_per_second"] == pytest.approx(entry["context_tokens"] / seconds)
        assert entry["anchor_updates_per_second"] == pytest.approx(entry["blocks"] / seconds)
        assert 0 <= entry["padding_waste"] < 1
        if mode == "off":
            assert entry["time/wait"] == 0


def test_padding_waste_is_the_share_of_positions_that_hold_no_token(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=1, logging_steps=1000, logging_strategy="epoch")
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["padding_waste"] == pytest.approx(trainer.get_train_dataloader().batch_sampler.padding_share)


def test_evaluation_and_saving_are_no_part_of_a_step(tmp_path, monkeypatch):
    import hf_dflash.training.step_times as module

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    trainer = trainer_of(tmp_path, eval_steps=1, save_strategy="steps", save_steps=1, max_steps=4, logging_steps=2)

    def taking(seconds, function):
        def slow(*args, **kwargs):
            clock.now += seconds
            return function(*args, **kwargs)

        return slow

    trainer.training_step = taking(2.0, trainer.training_step)
    trainer._evaluate_rows = taking(100.0, trainer._evaluate_rows)
    trainer._save_step = taking(1000.0, trainer._save_step)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["time/step"] for entry in logs] == [6.0, 6.0]
