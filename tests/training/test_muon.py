# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import copy

import pytest
import torch
from tiny_training import assert_same, make_trainer, training_state
from torch import nn

from hf_dflash.training import muon
from hf_dflash.training.muon import Muon, MuonWithAdamW, orthogonalize


SHAPES = [(24, 24), (8, 40), (40, 8), (1, 16)]


def random_matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_are_those_of_torchs_muon_bit_by_bit_where_both_compute_in_bf16(weight_decay, monkeypatch):
    monkeypatch.setattr(muon, "orthogonalize", lambda matrix, dtype: orthogonalize(matrix, torch.bfloat16))
    ours = [nn.Parameter(matrix) for matrix in random_matrices()]
    theirs = copy.deepcopy(ours)
    pair = (
        Muon(ours, lr=0.01, weight_decay=weight_decay),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(step))
            other.grad = one.grad.clone()
        for optimizer in pair:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_end_near_one_and_the_matrix_is_left_as_it_was(dtype):
    for matrix in random_matrices(dtype):
        before = matrix.clone()
        result = orthogonalize(matrix, dtype)
        assert result.dtype == dtype and torch.equal(matrix, before)
        values = torch.linalg.svdvals(result)
        assert values.max() < 1.3 and values.min() > 0.3


def test_a_cpu_computes_in_the_weights_own_precision(monkeypatch):
    seen = []
    monkeypatch.setattr(muon, "orthogonalize", lambda matrix, dtype: seen.append(dtype) or matrix)
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    Muon([weight], lr=0.1).step()
    assert seen == [torch.float32]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_orthogonalizes_each_matrix_by_its_own_norm(shape):
    sizes = torch.tensor([1.0, 1e3, 0.0, 1e-3])
    batch = torch.randn(4, *shape) * sizes[:, None, None]
    one_by_one = torch.stack([orthogonalize(matrix, torch.float32) for matrix in batch])
    torch.testing.assert_close(orthogonalize(batch, torch.float32), one_by_one, rtol=1e-4, atol=1e-5)


def test_batches_of_a_shape_and_its_transpose_update_as_one_by_one_and_pass_over_what_has_no_gradient(monkeypatch):
    shapes = [(8, 40), (24, 24), (40, 8), (8, 40), (1, 16), (24, 24), (40, 8), (16, 1), (3, 5)]
    without_gradient = {1: {2}, 2: {0, 8}}
    batches = []

    def observed(matrices, dtype):
        batches.append(tuple(matrices.shape))
        return orthogonalize(matrices, dtype)

    def run(num_together):
        monkeypatch.setattr(muon, "_num_together", lambda matrix: num_together)
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = Muon(weights, lr=0.1, weight_decay=0.1)
        for step in range(4):
            for index, weight in enumerate(weights):
                gradient = torch.randn(weight.shape)
                weight.grad = None if index in without_gradient.get(step, ()) else gradient
            optimizer.step()
        return weights, optimizer.state_dict()["state"]

    expected, expected_state = run(1)
    monkeypatch.setattr(muon, "orthogonalize", observed)
    weights, state = run(3)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert state.keys() == expected_state.keys()
    for index, buffers in expected_state.items():
        assert buffers.keys() == state[index].keys()
        assert torch.equal(buffers["momentum_buffer"], state[index]["momentum_buffer"])
    # No more than three together: the fourth of (8, 40) and (40, 8) goes alone, as the matrix that it is.
    assert batches[:5] == [(3, 8, 40), (40, 8), (2, 24, 24), (2, 1, 16), (3, 5)]
    assert batches[5:9] == [(3, 8, 40), (2, 24, 24), (2, 1, 16), (3, 5)], "the third has no gradient"


def test_small_matrices_share_a_batch_of_bounded_size_and_on_a_cpu_none_does():
    def num_together(*shape, device="meta"):
        return muon._num_together(torch.empty(shape, device=device))

    assert num_together(17408, 5120) == 1
    assert num_together(576, 576) * 576 * 576 <= 2**26 < (num_together(576, 576) + 1) * 576 * 576
    assert num_together(2, 3, device="cpu") == 1


def test_matrices_and_vectors_share_one_schedule_and_a_reloaded_state_goes_on_bit_equal():
    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 6), float(step))).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    options = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = MuonWithAdamW(model, **options)
    run(model, optimizer, range(3))
    again = copy.deepcopy(model)
    resumed = MuonWithAdamW(again, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, resumed):
        for group in one.param_groups:
            group["lr"] = 0.01
    run(model, optimizer, range(3, 6))
    run(again, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert {group["lr"] for part in resumed.parts for group in part.param_groups} == {0.01}


@pytest.mark.compat
def test_muon_takes_the_matrices_and_adamw_the_rest_with_one_schedule(tmp_path):
    trainer = make_trainer(tmp_path, matrix_optimizer="muon", num_train_epochs=3, weight_decay=0.1)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MuonWithAdamW)
    muon, adamw = optimizer.parts
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    vectors = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert matrices == {id(p) for p in trainer.model.parameters() if p.dim() == 2}
    assert vectors == {id(p) for p in trainer.model.parameters() if p.dim() == 1}
    rate = trainer.lr_scheduler.get_last_lr()[0]
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {rate} != {1e-2}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@pytest.mark.compat
def test_muon_resumes_bit_equal(tmp_path):
    options = {"matrix_optimizer": "muon", "save_strategy": "steps", "save_steps": 6, "max_steps": 10}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(training_state(resumed), training_state(whole))


def test_a_step_that_is_lost_leaves_weights_and_state_and_the_next_goes_on_as_without_it():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 6))
        return model, MuonWithAdamW(model, lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)

    def step(model, optimizer, number, is_lost=None):
        torch.manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * (torch.nan if is_lost else 1)
        if is_lost is not None:
            optimizer.pass_over(torch.tensor(is_lost))
        optimizer.step()

    (one, without), (other, with_lost) = make(), make()
    for number in range(4):
        step(one, without, number)
        step(other, with_lost, number, is_lost=False)
        kept = copy.deepcopy((other.state_dict(), with_lost.state_dict()))
        step(other, with_lost, 100 + number, is_lost=True)
        torch.testing.assert_close((other.state_dict(), with_lost.state_dict()), kept, rtol=0, atol=0)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)
