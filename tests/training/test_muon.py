# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import copy

import pytest
import torch
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
