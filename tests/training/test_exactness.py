# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Nothing depends on how the work is split (one process here; several in tests/distributed) or on what is computed twice."""

from functools import partial

import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from tiny_training import (
    GradientRecorder,
    assert_same,
    make_dataset,
    make_trainer,
    relative_difference,
    training_state,
)

from hf_dflash.data.batching import TokenBudgetBatchSampler
from hf_dflash.training.target_loading import load_targets


pytestmark = pytest.mark.compat

# What rounding may cost: gradients of the first step in fp32, and weights after several steps in fp64.
FIRST_STEP_FP32 = 2e-6
WEIGHTS_FP64 = 1e-10

# One optimizer step an epoch: all documents as one micro-batch, or as several.
ALL_AT_ONCE = {"token_budget": 100_000, "gradient_accumulation_steps": 1}


def all_in_one_step(token_budget):
    num_batches = TokenBudgetBatchSampler(make_dataset()["length"], token_budget).num_batches
    assert num_batches > 2
    return {"token_budget": token_budget, "gradient_accumulation_steps": num_batches}


def first_gradients(tmp_path, dtype=torch.float32, **options):
    recorder = GradientRecorder()
    trainer = make_trainer(tmp_path, dtype=dtype, callbacks=[recorder], max_steps=1, max_grad_norm=0.0, **options)
    trainer.train()
    return recorder.first, trainer


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize("token_budget", [64, 128])
def test_accumulated_micro_batches_give_the_gradient_of_one_large_batch(kind, token_budget, tmp_path):
    reference, one = first_gradients(tmp_path / "a", kind=kind, **ALL_AT_ONCE)
    gradients, many = first_gradients(tmp_path / "b", kind=kind, **all_in_one_step(token_budget))
    # Recurrent states of the target add up the rounding of other batch shapes; how much depends on the processor.
    limit = 3 * FIRST_STEP_FP32 if kind == "qwen3_5" else FIRST_STEP_FP32
    assert relative_difference(gradients, reference) <= limit
    first, second = one.state.log_history[0], many.state.log_history[0]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    for name in ("accuracy", "anchor_acceptance_length", "blocks", "context_tokens"):
        assert first[name] == second[name]


@pytest.mark.parametrize(
    "options", [{"loss_weighting": "dpace"}, {"loss_type": "kl"}, {"loss_type": "lk"}, {"labels": "data"}], ids=str
)
def test_every_loss_is_one_number_however_it_is_accumulated(options, tmp_path):
    reference, _ = first_gradients(tmp_path / "a", dtype=torch.float64, **ALL_AT_ONCE, **options)
    gradients, _ = first_gradients(tmp_path / "b", dtype=torch.float64, **all_in_one_step(64), **options)
    assert relative_difference(gradients, reference) <= 1e-12


def test_weights_after_several_steps_do_not_depend_on_the_grouping(tmp_path):
    options = {"dtype": torch.float64, "num_train_epochs": 4}
    reference = make_trainer(tmp_path / "a", **ALL_AT_ONCE, **options)
    trainer = make_trainer(tmp_path / "b", **all_in_one_step(64), **options)
    for one in (reference, trainer):
        start = one.model.fc.weight.clone()
        one.train()
        assert one.state.global_step == 4 and not torch.equal(one.model.fc.weight, start)
    for name, weight in reference.model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], weight, rtol=0, atol=WEIGHTS_FP64)


def test_the_last_and_partial_accumulation_window_counts_in_full(tmp_path):
    # Three micro-batches in windows of two: the second step has one micro-batch, and its gradient is that one's alone.
    dataset = make_dataset(3)
    lengths = dataset["length"]
    options = {"dataset": dataset, "dtype": torch.float64, "token_budget": max(lengths), "max_grad_norm": 0.0}
    assert TokenBudgetBatchSampler(lengths, max(lengths)).num_batches == 3

    class LastWindow(GradientRecorder):
        def on_pre_optimizer_step(self, *args, **kwargs):
            self.first = None
            super().on_pre_optimizer_step(*args, **kwargs)

    def run(folder, accumulation):
        recorder = LastWindow()
        # No learning rate: both see the same weights.
        trainer = make_trainer(
            tmp_path / folder,
            callbacks=[recorder],
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=0.0,
            **options,
        )
        trainer.train()
        return recorder.first, trainer.state

    in_a_window, state = run("a", 2)
    alone, alone_state = run("b", 1)
    assert (state.global_step, alone_state.global_step) == (2, 3)
    assert relative_difference(in_a_window, alone) <= 1e-12
    assert state.log_history[1]["loss"] == pytest.approx(alone_state.log_history[2]["loss"], rel=1e-12)


def test_micro_batches_without_anchors_change_nothing(tmp_path):
    reference, _ = first_gradients(tmp_path / "a", dtype=torch.float64, **ALL_AT_ONCE)
    # Documents without supervision, as many as there are others.
    dataset = make_dataset()
    silent = dataset.map(lambda row: {"loss_mask": [0] * row["length"], "row_id": row["row_id"] + 1000})
    from datasets import concatenate_datasets

    both = concatenate_datasets([dataset, silent])
    num_batches = TokenBudgetBatchSampler(both["length"], 40).num_batches
    gradients, _ = first_gradients(
        tmp_path / "b",
        dtype=torch.float64,
        dataset=both,
        token_budget=40,
        # Beyond the number of micro-batches: the rest of the window is empty.
        gradient_accumulation_steps=num_batches + 3,
    )
    assert relative_difference(gradients, reference) <= 1e-12


def test_the_logged_norm_is_that_of_the_accumulated_gradient(tmp_path):
    recorder = GradientRecorder()
    options = {"max_steps": 3, "gradient_accumulation_steps": 3, "max_grad_norm": 1e9}
    trainer = make_trainer(tmp_path, callbacks=[recorder], **options)
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == 3
    assert logged == pytest.approx(recorder.norms, rel=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    gradients = {}
    for checkpointing in (False, True):
        recorder = GradientRecorder()
        trainer = make_trainer(
            tmp_path,
            dtype=torch.float64,
            gradient_checkpointing=checkpointing,
            max_steps=1,
            max_grad_norm=0.0,
            callbacks=[recorder],
        )
        calls = []
        trainer.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.train()
        gradients[checkpointing] = recorder.first
        assert len(calls) == (2 if checkpointing else 1)
    assert relative_difference(gradients[True], gradients[False]) <= 1e-12


def count(counts, i, *_):
    counts[i] += 1


def test_two_targets_that_take_turns_teach_what_one_does(tmp_path):
    states = []
    for number in (1, 2):
        targets = load_targets(make_target("qwen3"), [1, 3], ["cpu"] * number)
        assert len({id(target.model) for target in targets}) == number
        read = [0] * number
        for i, target in enumerate(targets):
            target.decoder.register_forward_hook(partial(count, read, i))
        drafter = make_drafter(make_target("qwen3"))
        trainer = make_trainer(
            tmp_path, target=targets, drafter=drafter, gradient_accumulation_steps=2, num_train_epochs=1
        )
        trainer.train()
        # Seven micro-batches in windows of two.
        assert read == ([7] if number == 1 else [4, 3])
        states.append(training_state(trainer))
    assert_same(*states)
