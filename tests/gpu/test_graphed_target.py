# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: features from graphs are those of the passes that were recorded, whoever else is at work."""

import logging
import threading

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_target

from hf_dflash.target.frozen_target import FrozenTarget
from hf_dflash.target.graphed_decoder import launches_outweigh
from hf_dflash.target.pipeline import FeaturePipeline, FeatureRequest


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IDS = [0, 2, 4]
SHAPES = [(3, 200), (16, 64), (1, 7), (40, 20), (3, 200)]


def make_batch(rows, length, seed=0):
    generator = torch.Generator().manual_seed(rows * length + seed)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    return torch.randint(6, VOCAB_SIZE, (rows, length), generator=generator), lengths


def make_model(kind="llama"):
    return make_target(kind, torch.bfloat16, hidden_size=128, head_dim=32).cuda()


def ask(target, batch):
    positions = torch.arange(0, int(batch[1].sum()), 2)
    return target(*batch, positions, return_label_hidden_states=True)


def assert_equal(one, other):
    assert torch.equal(one.context_hidden_states, other.context_hidden_states)
    assert torch.equal(one.label_ids, other.label_ids)
    assert torch.equal(one.label_hidden_states, other.label_hidden_states)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_sliding"])
def test_features_from_graphs_are_those_of_the_same_padded_batch_bit_for_bit_unless_compiled(kind, compiled):
    model = make_model(kind)
    plain, graphed = FrozenTarget(model, IDS), FrozenTarget(model, IDS)
    if compiled:
        plain.compile_layers()
    graphed.record_graphs()
    for seed in range(3):
        for shape in SHAPES:
            input_ids, lengths = make_batch(*shape, seed)
            expected = ask(plain, (graphed._graphed.pad(input_ids), lengths))
            features = ask(graphed, (input_ids, lengths))
            if not compiled:
                assert_equal(features, expected)
            # Compiled layers have code for several kinds of shapes, and while it is being compiled one shape may run in two of them.
            difference = features.context_hidden_states - expected.context_hidden_states
            assert difference.float().norm() < 0.02 * expected.context_hidden_states.float().norm()
            context = graphed(input_ids, lengths).context_hidden_states
            assert (context - features.context_hidden_states).float().norm() <= (
                0.02 * context.float().norm() if compiled else 0
            )
    assert graphed._graphed.is_on and len(graphed._graphed._graphs) == 8


def test_a_thread_records_while_another_trains_on_the_device():
    """Its allocations, frees and waits must not break a recording."""
    model = make_model()
    plain, graphed = FrozenTarget(model, IDS), FrozenTarget(model, IDS).record_graphs()
    expected = [
        ask(plain, (graphed._graphed.pad(batch[0]), batch[1]))
        for batch in (make_batch(*shape) for shape in SHAPES * 6)
    ]
    is_done, steps = threading.Event(), []

    def train():
        weight = torch.randn(512, 512, device="cuda", requires_grad=True)
        while not is_done.is_set():
            (torch.randn(64, 512).pin_memory().to("cuda", non_blocking=True) @ weight).square().mean().backward()
            steps.append(weight.grad.norm().item())

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with FeaturePipeline([graphed], asynchronous=True) as pipeline:
            requests = []
            for shape in SHAPES * 6:
                input_ids, lengths = make_batch(*shape)
                positions = torch.arange(0, int(lengths.sum()), 2)
                requests.append(FeatureRequest(input_ids, lengths, positions, return_label_hidden_states=True))
            for number, request in enumerate(requests):
                pipeline.submit(request)
                if number >= 2:
                    assert_equal(pipeline.take()[0], expected[number - 2])
                if number % 7 == 6:
                    # An evaluation between two steps uses the same graphs on another stream.
                    with pipeline.exclusive():
                        assert_equal(ask(graphed, make_batch(*SHAPES[0])), expected[0])
    finally:
        is_done.set()
        thread.join()
    assert graphed._graphed.is_on and len(graphed._graphed._graphs) == 4 and steps


def test_a_pass_that_asks_the_device_for_a_number_runs_without_graphs_and_leaves_nothing_behind(caplog):
    model = make_model()
    plain, graphed = FrozenTarget(model, IDS), FrozenTarget(model, IDS).record_graphs()

    def ask_for_a_number(module, args, output):
        output[0].sum().item()

    model.model.layers[1].register_forward_hook(ask_for_a_number)
    batch = make_batch(3, 200)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            features = ask(graphed, batch)
    assert not graphed._graphed.is_on and "cannot be recorded" in caplog.text
    assert_equal(features, ask(plain, batch))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    # Older releases of PyTorch would refuse.
    torch.rand(1, device="cuda")
    # Memory that another stream has read comes back once it is through, as without a recording.
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        lent = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        lent.record_stream(other)
        del lent
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + (256 << 20)
    # And what can be recorded still is.
    again = FrozenTarget(make_model(), IDS).record_graphs()
    for _ in range(3):
        ask(again, batch)
    assert again._graphed.is_on and len(again._graphed._graphs) == 1


def test_a_small_target_is_recorded_by_itself_and_a_large_budget_is_not():
    model = make_model()
    assert launches_outweigh(model, 8192)
    assert not launches_outweigh(model, 3_000_000_000_000 // model.num_parameters() + 1)
