# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Compiled decoder layers, by a backend that runs the captured graphs as they are: what dynamo does is the same on CUDA."""

import copy

import pytest
import torch
from tiny_drafters import BLOCK_SIZE, MASK_TOKEN_ID, make_drafter, make_rows, run_drafter
from tiny_models import HIDDEN_SIZE
from torch._dynamo.utils import counters

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter import modeling_dflash
from hf_dflash.training.block_batch import draw_blocks


# Code that one test has compiled serves the next: tests count what comes on top.
@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    torch._dynamo.reset()
    modeling_dflash._compiled_call.cache_clear()
    yield
    torch._dynamo.reset()
    modeling_dflash._compiled_call.cache_clear()


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def embedding(tiny_qwen3):
    return tiny_qwen3.get_input_embeddings()


def make_batch(index: int):
    """Documents, blocks and features whose widths depend on `index`."""
    generator = torch.Generator().manual_seed(index)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    masks = ["0" * draw(1, 40) + "1" * draw(12, 90) for _ in range(draw(2, 6))]
    batch = draw_blocks(
        collate_rows(make_rows(masks, seed=index)),
        block_size=BLOCK_SIZE,
        mask_token_id=MASK_TOKEN_ID,
        num_anchors=draw(2, 20),
        anchor_ratio=None,
        seed=index,
        epoch=0,
        packed=True,
    )
    return batch, torch.randn(sum(map(len, masks)), 2 * HIDDEN_SIZE, generator=generator)


def loss_and_gradients(drafter, embedding, batch, features):
    drafter.zero_grad()
    loss = run_drafter(drafter, embedding, batch, features).square().sum()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in drafter.parameters()]


def test_numbers_and_gradients_are_the_same_and_nothing_is_compiled_anew_over_50_varied_batches(tiny_qwen3, embedding):
    plain = make_drafter(tiny_qwen3, layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    compiled = copy.deepcopy(plain).compile_layers(backend="eager")
    before, known, widths, breaks = count_graphs(), None, set(), sum(counters["graph_break"].values())
    for index in range(53):
        batch, features = make_batch(index)
        result = loss_and_gradients(compiled, embedding, batch, features)
        expected = loss_and_gradients(plain, embedding, batch, features)
        assert torch.equal(result[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(result[1], expected[1], strict=True))
        if index == 2:
            known = count_graphs()
            assert known > before
        elif index > 2:
            widths.add((batch.context_index.shape, batch.anchors.shape, len(features)))
    assert len(widths) > 20
    assert count_graphs() == known
    assert sum(counters["graph_break"].values()) == breaks


def test_layers_of_equal_shape_share_their_code(tiny_qwen3, embedding):
    for num_layers in (2, 4):
        drafter = make_drafter(tiny_qwen3, num_hidden_layers=num_layers, seed=num_layers)
        loss_and_gradients(drafter.compile_layers(backend="eager"), embedding, *make_batch(0))
        if num_layers == 2:
            known = count_graphs()
    assert count_graphs() == known


def test_a_copy_runs_its_own_weights_and_weights_keep_their_names(tiny_qwen3, embedding):
    drafter = make_drafter(tiny_qwen3)
    names = list(drafter.state_dict())
    drafter.compile_layers(backend="eager")
    inputs = make_batch(0)
    before = run_drafter(drafter, embedding, *inputs)
    other = copy.deepcopy(drafter)
    assert list(other.state_dict()) == names
    with torch.no_grad():
        for parameter in drafter.layers.parameters():
            parameter.zero_()
    assert torch.equal(run_drafter(other, embedding, *inputs), before)
    assert not torch.equal(run_drafter(drafter, embedding, *inputs), before)


def test_hooks_of_layers_run_outside_of_what_is_compiled(tiny_qwen3, embedding):
    drafter = make_drafter(tiny_qwen3).compile_layers(backend="eager")
    seen = []
    drafter.layers[0].register_forward_hook(lambda *args: seen.append(torch.compiler.is_compiling()))
    run_drafter(drafter, embedding, *make_batch(0))
    assert seen == [False]


def test_layers_decode_uncompiled(tiny_qwen3, embedding):
    plain = make_drafter(tiny_qwen3)
    drafter = copy.deepcopy(plain).compile_layers(backend="eager")
    block = drafter.config.block_size
    compiled = []
    drafter.layers[0].self_attn.register_forward_hook(lambda *args: compiled.append(torch.compiler.is_compiling()))
    noise = embedding(torch.randint(6, 90, (1, block)))
    for context_length in (3, 5, 9):
        features = torch.randn(1, context_length, 64)
        positions = torch.arange(context_length + block)[None]
        expected = plain(noise, features, positions).last_hidden_state
        assert torch.equal(drafter(noise, features, positions).last_hidden_state, expected)
    assert compiled == [False] * 3
