# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from tiny_training import assert_same, make_dataset, make_trainer, training_state
from transformers import TrainerCallback

from hf_dflash.training.checkpoint import CHECKPOINT_FILE, find_last_checkpoint


pytestmark = pytest.mark.compat

# Windows of two micro-batches, three steps to a log line, four steps to an epoch: nothing falls together.
OPTIONS = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "logging_steps": 3, "eval_strategy": "epoch"}
STEPS_OF_EPOCH = 4


def trainer_of(tmp_path, **options):
    return make_trainer(tmp_path, **{**OPTIONS, "eval_dataset": make_dataset(4, seed=2), **options})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("undisturbed"))
    trainer.train()
    assert trainer.state.global_step == 3 * STEPS_OF_EPOCH
    return training_state(trainer)


class StopAt(TrainerCallback):
    """Stops at a step, or with `micro_step`, inside the accumulation window that follows it."""

    def __init__(self, step, how, micro_step=False):
        self.step, self.how, self.micro_step = step, how, micro_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.micro_step:
            self.how(control)

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and self.micro_step:
            self.how(control)


def by_control(control):
    control.should_training_stop = control.should_save = True


def by_signal(control):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "step, inside_window",
    [(1, False), (3, False), (STEPS_OF_EPOCH, False), (7, False), (0, True), (2, True), (STEPS_OF_EPOCH + 1, True)],
)
def test_a_run_that_stopped_anywhere_ends_bit_equal_to_one_that_did_not(step, inside_window, undisturbed, tmp_path):
    stopped = trainer_of(tmp_path, callbacks=[StopAt(step, by_control, inside_window)])
    stopped.train()
    assert stopped.state.global_step == step
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    state = training_state(resumed)
    if inside_window:
        # Trainer takes such a stop for the end of an epoch, and evaluates there: one line more.
        state["log"] = [entry for entry in state["log"] if not ("eval_loss" in entry and entry["step"] == step)]
        reference = [entry for entry in undisturbed["log"] if not ("eval_loss" in entry and entry["step"] == step)]
        undisturbed = {**undisturbed, "log": reference}
    assert_same(state, undisturbed)


def test_sigterm_saves_leaves_with_an_error_status_and_loses_nothing(undisturbed, tmp_path):
    previous = signal.getsignal(signal.SIGTERM)
    for step, inside in ((2, True), (STEPS_OF_EPOCH, False), (6, False)):
        trainer = trainer_of(tmp_path, callbacks=[StopAt(step, by_signal, inside)])
        with pytest.raises(SystemExit) as exit_:
            trainer.train(resume_from_checkpoint=True if step > 2 else None)
        assert exit_.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is previous
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in undisturbed["log"] if "eval_loss" in entry] == [4, 8, 12]
    assert_same(training_state(resumed), undisturbed)


def test_a_signal_in_the_last_step_still_saves_and_still_leaves(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=2, callbacks=[StopAt(2, by_signal)])
    with pytest.raises(SystemExit):
        trainer.train()
    assert find_last_checkpoint(tmp_path).endswith("checkpoint-2")


def test_ctrl_c_is_a_keyboard_interrupt_behind_the_checkpoint(tmp_path):
    def press(control):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, callbacks=[StopAt(1, press)]).train()
    # The window in which the signal came is the last.
    assert find_last_checkpoint(tmp_path).endswith("checkpoint-1")


def test_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time\n"
        "from hf_dflash.training.interruption import StopSignals, _ECHO_SECONDS\n"
        "with StopSignals():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('an echo does not count', flush=True)\n"
        "    time.sleep(_ECHO_SECONDS + 0.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('never', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 143
    assert done.stdout.split("\n") == ["an echo does not count", ""]


def test_a_signal_cuts_an_evaluation_short_and_the_resumed_run_makes_up_for_it(undisturbed, tmp_path):
    evaluated = []

    class SignalInEvaluation(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            evaluated.append(state.global_step)
            if len(evaluated) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = trainer_of(tmp_path, callbacks=[SignalInEvaluation()], eval_token_budget=16)
    drafted = []
    draft = stopped.draft
    stopped.draft = lambda *args: drafted.append(stopped.model.training) or draft(*args)
    with pytest.raises(SystemExit):
        stopped.train()
    assert len(evaluated) > 2 and set(evaluated) == {STEPS_OF_EPOCH}
    assert drafted.count(False) <= 1
    assert not any("eval_loss" in entry for entry in stopped.state.log_history)
    assert stopped.state.best_metric is None or stopped.state.best_metric < 1
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), undisturbed)


# ---- What a checkpoint holds, and when it is one ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trainer = trainer_of(folder, save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    return folder


@pytest.fixture
def output_dir(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def test_checkpoints_hold_fp32_masters_and_nothing_of_the_target(output_dir):
    from safetensors.torch import load_file

    weights = load_file(output_dir / "checkpoint-4" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    target = make_target("qwen3")
    assert weights.keys() == make_drafter(target).state_dict().keys()
    assert not any("embed" in name or "lm_head" in name for name in weights)


def test_any_missing_or_short_file_makes_a_checkpoint_half(output_dir):
    last = output_dir / "checkpoint-4"
    files = sorted(path for path in last.rglob("*") if path.is_file() and path.name != "trainer_state.json")
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "metric_sums_0.pt"} <= {
        path.name for path in files
    }
    for path in [*files, last / "trainer_state.json"]:
        content = path.read_bytes()
        path.unlink()
        assert find_last_checkpoint(output_dir).endswith("checkpoint-2"), path
        if path.name not in ("trainer_state.json", CHECKPOINT_FILE):
            path.write_bytes(content[:-1])
            assert find_last_checkpoint(output_dir).endswith("checkpoint-2"), path
        path.write_bytes(content)
        assert find_last_checkpoint(output_dir).endswith("checkpoint-4")


def test_half_a_checkpoint_that_is_asked_for_by_name_is_an_error(output_dir):
    (output_dir / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-4 is no whole checkpoint"):
        trainer_of(output_dir).train(resume_from_checkpoint=str(output_dir / "checkpoint-4"))
    with pytest.raises(FileNotFoundError, match="checkpoint-5"):
        trainer_of(output_dir).train(resume_from_checkpoint=str(output_dir / "checkpoint-5"))


def test_a_run_without_any_whole_checkpoint_does_not_silently_start_over(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def other_target():
    target = make_target("qwen3")
    target.model.layers[2].mlp.up_proj.weight.view(-1)[-1] += 1e-3
    return target


@pytest.mark.parametrize(
    "change, named",
    [
        ({"drafter_options": {"block_size": 5}}, "block_size is 5, the checkpoint has 4"),
        ({"drafter_options": {"mask_token_id": 6}}, "mask_token_id is 6, the checkpoint has 5"),
        ({"drafter_options": {"target_layer_ids": [1, 2]}}, r"target_layer_ids is \[1, 2\], .* \[1, 3\]"),
        ({"drafter_options": {"is_causal": True}}, "is_causal is True, the checkpoint has False"),
        ({"target": other_target}, "target is [0-9a-f]{16}, the checkpoint has [0-9a-f]{16}"),
        ({"dataset": lambda: make_dataset(22)}, "dataset is [0-9a-f]{16}, the checkpoint has [0-9a-f]{16}"),
        ({"seed": 43}, "seed is 43, the checkpoint has 42"),
        ({"token_budget": 65}, "token_budget is 65, the checkpoint has 64"),
        ({"num_anchors": 7}, "num_anchors is 7, the checkpoint has 512"),
        ({"anchor_ratio": 0.5}, "anchor_ratio is 0.5, the checkpoint has 0.25"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, the checkpoint has 2"),
        ({"optim": "sgd"}, "optimizer is sgd, the checkpoint has adamw_torch"),
        ({"matrix_optimizer": "muon"}, "optimizer is muon, the checkpoint has adamw_torch"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_another_run_is_refused_naming_both_values(change, named, output_dir):
    change = {name: value() if callable(value) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=named):
        trainer_of(output_dir, **change).train(resume_from_checkpoint=True)


def test_what_may_change_half_way_is_not_refused(output_dir):
    trainer = trainer_of(output_dir, learning_rate=1e-3, max_steps=5, logging_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def learning_rates(trainer):
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize("matrix_optimizer", ["same", "muon"])
def test_options_of_the_optimizer_that_change_half_way_hold_from_there(matrix_optimizer, tmp_path):
    old = {"matrix_optimizer": matrix_optimizer, "logging_steps": 1}
    new = {**old, "learning_rate": 1e-3, "weight_decay": 0.5, "adam_beta2": 0.9, "lr_scheduler_type": "linear"}
    trainer_of(tmp_path / "run", **old, callbacks=[StopAt(5, by_control)]).train()
    resumed, reference = trainer_of(tmp_path / "run", **new), trainer_of(tmp_path / "reference", **new)
    resumed.train(resume_from_checkpoint=True)
    reference.train()
    assert learning_rates(resumed)[5:] == learning_rates(reference)[5:]
    names = ("initial_lr", "weight_decay", "betas")
    groups, wanted = (
        [{name: group.get(name) for name in names} for group in trainer.optimizer.param_groups]
        for trainer in (resumed, reference)
    )
    assert groups == wanted


@pytest.mark.parametrize("matrix_optimizer", ["same", "muon"])
def test_a_fused_optimizer_goes_on_from_the_state_of_one_that_was_not(matrix_optimizer, tmp_path):
    options = {"matrix_optimizer": matrix_optimizer}
    trainer_of(tmp_path, **options, callbacks=[StopAt(5, by_control)]).train()
    path = tmp_path / "checkpoint-5" / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    *_, adamw = state.get("parts", [state])
    for group in adamw["param_groups"]:
        group["fused"] = None
    torch.save(state, path)
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3 * STEPS_OF_EPOCH
    assert resumed.optimizer.param_groups[-1]["fused"] is True


def test_steps_between_logs_evaluations_and_saves_that_change_half_way_hold_from_there(tmp_path):
    old = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5, "logging_steps": 1}
    trainer_of(tmp_path, **old, callbacks=[StopAt(5, by_control)]).train()
    resumed = trainer_of(tmp_path, **{**old, "eval_steps": 4, "save_steps": 3, "logging_steps": 2})
    resumed.train(resume_from_checkpoint=True)
    log = resumed.state.log_history
    assert [entry["step"] for entry in log if "learning_rate" in entry] == [1, 2, 3, 4, 5, 6, 8, 10, 12]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [5, 8, 12]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (5, 6, 9, 12)}


def test_a_run_does_not_go_on_from_weights_without_the_state_of_their_optimizer(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_only_model": True}
    trainer_of(tmp_path, **options).train()
    with pytest.raises(ValueError, match="checkpoint-4 holds weights alone .*--save_only_model.*--drafter"):
        trainer_of(tmp_path, **{**options, "max_steps": 6}).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_an_earlier_release_may_say_less(output_dir):
    path = output_dir / "checkpoint-4" / CHECKPOINT_FILE
    content = json.loads(path.read_text())
    del content["contract"]["optimizer"]
    path.write_text(json.dumps(content))
    trainer_of(output_dir, max_steps=5).train(resume_from_checkpoint=str(path.parent))


def test_the_same_rows_in_another_folder_are_the_same_dataset(output_dir, tmp_path):
    from datasets import load_from_disk

    make_dataset().save_to_disk(tmp_path / "elsewhere", num_shards=3)
    trainer = trainer_of(output_dir, dataset=load_from_disk(str(tmp_path / "elsewhere")), max_steps=5)
    trainer.train(resume_from_checkpoint=True)


# ---- Saving ----


def test_rotation_keeps_the_newest_and_clears_away_half_ones(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    trainer = trainer_of(
        tmp_path, save_strategy="steps", save_steps=1, max_steps=4, save_total_limit=2, eval_strategy="no"
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert trainer.args.save_total_limit == 2


def test_rotation_behind_an_earlier_checkpoint_keeps_what_the_run_saves_itself(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "eval_strategy": "no"}
    trainer_of(tmp_path, **options, max_steps=8).train()
    again = trainer_of(tmp_path, **{**options, "save_steps": 1, "max_steps": 7}, learning_rate=1e-3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-7"]


def test_the_older_checkpoint_goes_only_when_the_newer_one_is_whole(tmp_path, monkeypatch):
    import hf_dflash.training.trainer as module

    seen = []
    mark_whole = module.mark_whole

    def spy(folder, contract):
        seen.append(find_last_checkpoint(tmp_path))
        mark_whole(folder, contract)

    monkeypatch.setattr(module, "mark_whole", spy)
    trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=3, save_total_limit=1).train()
    assert seen == [None, str(tmp_path / "checkpoint-1"), str(tmp_path / "checkpoint-2")]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_an_evaluation_behind_the_save_of_an_epochs_last_step_is_in_the_checkpoint(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="epoch", num_train_epochs=1, callbacks=[SaveAtStep(STEPS_OF_EPOCH)])
    trainer.train()
    state = json.loads((tmp_path / f"checkpoint-{STEPS_OF_EPOCH}" / "trainer_state.json").read_text())
    assert any("eval_loss" in entry for entry in state["log_history"])
    assert find_last_checkpoint(tmp_path).endswith(f"checkpoint-{STEPS_OF_EPOCH}")


class SaveAtStep(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == self.step


def test_a_signal_is_answered_within_one_step(tmp_path):
    # By steps, not seconds: the machine may be slow, but no further step may begin.
    began = []

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            began.append(state.global_step)
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)

    with pytest.raises(SystemExit):
        trainer_of(tmp_path, callbacks=[Count()]).train()
    assert began == [0, 1, 2, 3]
    assert find_last_checkpoint(tmp_path).endswith("checkpoint-4")


# ---- Which run goes on ----


def test_a_run_that_went_back_goes_on_where_it_was_not_where_it_had_been_before(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "eval_strategy": "no"}
    trainer_of(tmp_path, **options).train()
    again = trainer_of(tmp_path, **options, learning_rate=1e-3, callbacks=[StopAt(5, by_signal)])
    with pytest.raises(SystemExit):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # Nothing is deleted, and what the run has left behind can still be asked for by name.
    assert (tmp_path / "checkpoint-8").is_dir()
    assert find_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")

    resumed = trainer_of(tmp_path, **options, learning_rate=1e-3)
    resumed.train(resume_from_checkpoint=True)
    assert find_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")
    straight = trainer_of(tmp_path, **{**options, "save_strategy": "no"}, learning_rate=1e-3)
    straight.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(training_state(resumed), training_state(straight))


@pytest.mark.parametrize("stops", [False, True])
def test_with_room_for_one_checkpoint_the_last_step_stays_beside_the_best(stops, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    # The first evaluation is the best.
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    options |= {"save_total_limit": 1, "load_best_model_at_end": True, "learning_rate": 1e-3}
    trainer = trainer_of(tmp_path, **options, callbacks=[StopAt(3, by_signal)] if stops else [])
    if stops:
        with pytest.raises(SystemExit):
            trainer.train()
    else:
        trainer.train()
    last = 3 if stops else 5
    assert trainer.state.best_global_step == 1
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", f"checkpoint-{last}"]

    began = []

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            began.append(state.global_step)

    again = trainer_of(tmp_path, **options, callbacks=[Count()])
    again.train(resume_from_checkpoint=True)
    assert began == list(range(last, 5))
    assert again.state.best_global_step == 1
