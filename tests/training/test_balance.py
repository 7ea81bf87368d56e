# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_training import assert_same, make_trainer, training_state

import hf_dflash.training.balance as balance
from hf_dflash import DFlashTrainingArguments
from hf_dflash.training.balance import PAPER_ANCHORS, SCALES, choose_scale, scaled
from hf_dflash.training.resume_contract import read_contract


pytestmark = pytest.mark.compat


# ---- The decision ----


def linear(blocks_at_paper=1800):
    return {scale: blocks_at_paper * scale for scale in SCALES}


def seconds(fixed, per_block, blocks):
    return {0.5: fixed + per_block * blocks[0.5], 1.0: fixed + per_block * blocks[1.0]}


@pytest.mark.parametrize("wanted", SCALES)
def test_the_drafter_is_given_as_many_blocks_as_take_the_targets_time(wanted):
    blocks = linear()
    fixed, per_block = 0.05, 3e-4
    target = fixed + per_block * blocks[wanted]
    assert choose_scale(target, seconds(fixed, per_block, blocks), blocks) == wanted
    # A target that is a little faster or slower changes nothing, one twice as fast or slow runs into the bounds at last.
    assert choose_scale(1.01 * target, seconds(fixed, per_block, blocks), blocks) == wanted


def test_targets_far_slower_or_faster_than_the_drafter_meet_the_bounds():
    blocks = linear()
    assert choose_scale(100.0, seconds(0.05, 3e-4, blocks), blocks) == max(SCALES)
    assert choose_scale(0.0, seconds(0.05, 3e-4, blocks), blocks) == min(SCALES)


def test_documents_that_bring_no_more_blocks_keep_the_smallest_scale_that_does_the_same():
    # Short documents: from some scale on every position is an anchor.
    blocks = {scale: min(100.0, 200 * scale) for scale in SCALES}
    chosen = choose_scale(100.0, seconds(0.05, 3e-4, blocks), blocks)
    assert blocks[chosen] == 100 and chosen == min(scale for scale in SCALES if blocks[scale] == 100)


def test_a_noisy_clock_gives_blocks_no_negative_cost():
    blocks = linear()
    assert choose_scale(0.1, {0.5: 0.2, 1.0: 0.1}, blocks) == 1.0
    assert choose_scale(0.2, {0.5: 0.2, 1.0: 0.1}, blocks) == 2.0


def test_anchors_and_ratio_turn_together_and_no_ratio_stays_none():
    assert scaled(1.0, 0.25) == (PAPER_ANCHORS, 0.25)
    assert scaled(0.25, 0.25) == (128, 0.0625) and scaled(2.0, 0.25) == (1024, 0.5)
    assert scaled(2.0, 0.0) == (1024, 0.0)


# ---- In a run ----


def test_an_automatic_run_equals_one_that_is_given_the_chosen_numbers_and_a_resumed_one_measures_nothing(
    tmp_path, monkeypatch
):
    auto = make_trainer(tmp_path / "auto", num_anchors="auto", max_steps=4, save_steps=2, save_strategy="steps")
    auto.train()
    chosen = auto.args.num_anchors, auto.args.anchor_ratio
    assert chosen in {scaled(scale, 0.25) for scale in SCALES}
    contract = read_contract(tmp_path / "auto" / "checkpoint-2")
    assert (contract["num_anchors"], contract["anchor_ratio"]) == chosen

    given = make_trainer(tmp_path / "given", num_anchors=chosen[0], anchor_ratio=chosen[1], max_steps=4)
    given.train()
    assert_same(training_state(auto), training_state(given))

    monkeypatch.setattr(balance, "_Probe", None)
    resumed = make_trainer(tmp_path / "resumed", num_anchors="auto", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "auto" / "checkpoint-2"))
    assert (resumed.args.num_anchors, resumed.args.anchor_ratio) == chosen
    assert_same(training_state(resumed), training_state(given))


def test_measuring_leaves_weights_gradients_and_random_state_alone(tmp_path):
    trainer = make_trainer(tmp_path, num_anchors="auto")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    random_state = torch.get_rng_state()
    num_anchors, anchor_ratio = balance.balance_anchors(trainer)
    assert isinstance(num_anchors, int) and trainer.args.num_anchors == "auto"
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_scale_that_does_not_fit_into_memory_is_left(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, num_anchors="auto")
    monkeypatch.setattr(balance, "choose_scale", lambda *measured: max(SCALES))
    draft, tried = trainer.draft, []

    def draft_or_run_out(model, batch, features):
        if isinstance(tried, list) and balance_is_fitting():
            tried.append(batch.num_blocks)
            if len(tried) < 4:
                raise torch.OutOfMemoryError("no room")
        return draft(model, batch, features)

    fit = balance._Probe._fit
    state = {"fitting": False}

    def balance_is_fitting():
        return state["fitting"]

    def watched_fit(self, *args):
        state["fitting"] = True
        return fit(self, *args)

    monkeypatch.setattr(balance._Probe, "_fit", watched_fit)
    trainer.draft = draft_or_run_out
    assert balance.balance_anchors(trainer) == scaled(SCALES[-4], 0.25)
    assert tried == sorted(tried, reverse=True)


def test_options_take_a_number_or_auto(tmp_path):
    def options(value):
        return DFlashTrainingArguments(str(tmp_path), use_cpu=True, num_anchors=value)

    assert options("7").num_anchors == options(7).num_anchors == 7
    assert options("auto").num_anchors == "auto"
    assert DFlashTrainingArguments(str(tmp_path), use_cpu=True).num_anchors == PAPER_ANCHORS
    for wrong in ("many", 0, "-3"):
        with pytest.raises(ValueError, match=f"num_anchors.*{wrong}"):
            options(wrong)
