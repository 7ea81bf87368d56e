# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A target from recorded passes: shapes, rooms and what cannot be recorded, with a stand-in for CUDA. The real graphs are in
tests/gpu/test_graphed_target.py."""

import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, make_target

from hf_dflash.target import frozen_target, graphed_decoder
from hf_dflash.target.fp8 import quantize_to_fp8
from hf_dflash.target.frozen_target import FrozenTarget
from hf_dflash.target.graphed_decoder import GraphedDecoder, Recorder, launches_outweigh, round_up


pytestmark = pytest.mark.compat

IDS = [0, 2, 4]


class RunAgain:
    """A replay does the recorded call again, and its results are in the tensors of the recording."""

    def __init__(self, device):
        self.num_recorded = self.num_replayed = self.num_followed = 0

    def record(self, run):
        outputs = run()
        for output in outputs:
            # A recording computes nothing.
            output.fill_(torch.nan)
        self.num_recorded += 1

        def replay():
            self.num_replayed += 1
            assert self.num_followed == self.num_replayed, "what the last pass left may still be read"
            for output, value in zip(outputs, run(), strict=True):
                output.copy_(value)

        return replay, outputs

    def follow_last_reader(self):
        self.num_followed += 1


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(graphed_decoder, "Recorder", RunAgain)
    monkeypatch.setattr(frozen_target, "is_on_one_cuda_device", lambda model: True)


def make_batch(rows, length):
    lengths = torch.randint(1, length + 1, (rows,))
    lengths[-1] = length
    return torch.randint(6, VOCAB_SIZE, (rows, length)), lengths


@given(st.integers(1, 100_000))
def test_sizes_are_rounded_up_by_a_quarter_at_most_to_four_an_octave(size):
    rounded = round_up(size)
    assert size <= rounded <= max(8, 1.25 * size) and round_up(rounded) == rounded
    assert len({round_up(one) for one in range(size, 2 * size)}) <= 5 or size < 9
    if size <= 8:
        assert rounded == size


@pytest.mark.parametrize("kind", ["llama", "qwen3_sliding", "qwen3_5"])
def test_features_are_those_of_the_target_without_graphs(kind, recorder):
    model = make_target(kind, torch.float64)
    plain, graphed = FrozenTarget(model, IDS), FrozenTarget(model, IDS).record_graphs()
    batches = [make_batch(rows, length) for rows, length in ((3, 17), (2, 30), (3, 18), (9, 33), (1, 5), (3, 19)) * 2]
    for number, (input_ids, lengths) in enumerate(batches):
        total = int(lengths.sum())
        positions = torch.arange(0, total, 3) if number % 3 else None
        expected, features = (
            target(input_ids, lengths, positions, return_label_hidden_states=True) for target in (plain, graphed)
        )
        torch.testing.assert_close(features.context_hidden_states, expected.context_hidden_states)
        if positions is not None:
            assert torch.equal(features.label_ids, expected.label_ids)
            torch.testing.assert_close(features.label_hidden_states, expected.label_hidden_states)
    assert graphed._graphed._recorder.num_recorded >= 3
    assert graphed._graphed._recorder.num_replayed > graphed._graphed._recorder.num_recorded


def test_a_shape_is_recorded_when_it_comes_again_and_labels_or_not_are_two_shapes(recorder, tiny_qwen3):
    target = FrozenTarget(tiny_qwen3, IDS).record_graphs()
    recorded = target._graphed._recorder
    input_ids, lengths = make_batch(3, 17)
    for expected in (0, 1, 1):
        target(input_ids, lengths)
        assert recorded.num_recorded == expected
    for expected in (1, 2, 2):
        target(input_ids, lengths, torch.tensor([1]))
        assert recorded.num_recorded == expected
    target(*make_batch(3, 20))
    assert recorded.num_recorded == 2, "17 to 20 are one shape"
    for expected, rows in ((2, 9), (3, 10)):
        target(*make_batch(rows, 20))
        assert recorded.num_recorded == expected, "9 and 10 rows are one shape"
    assert (
        target(torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long)).context_hidden_states.numel()
        == 0
    )


def test_features_are_no_views_of_what_the_next_pass_writes_to(recorder, tiny_qwen3):
    target = FrozenTarget(tiny_qwen3, IDS).record_graphs()
    batches = [make_batch(3, 20) for _ in range(4)]
    positions = torch.arange(5)
    features = [target(*batch, positions, return_label_hidden_states=True) for batch in batches]
    for batch, one in zip(batches, features, strict=True):
        again = target(*batch, positions, return_label_hidden_states=True)
        assert torch.equal(one.context_hidden_states, again.context_hidden_states)
        assert torch.equal(one.label_hidden_states, again.label_hidden_states)


def test_graphs_recorded_before_a_larger_room_was_made_still_have_theirs(recorder):
    decoder = GraphedDecoder(lambda ids, to_the_end: [ids[..., None].double()], torch.device("cpu"))
    small, large = torch.arange(4).view(1, 4), torch.arange(80).view(8, 10)
    for ids in (small, small, large, large, small, large, small):
        (output,) = decoder(ids, True)
        assert torch.equal(output[..., 0], ids.double())
    assert len(decoder._graphs) == 2
    (room,), (output,) = decoder._rooms, decoder(small, True)
    assert room.numel() == 80 and output.untyped_storage().nbytes() == 4 * 8, "a graph writes where it was recorded"


def test_shapes_with_as_many_tokens_are_two_shapes(recorder):
    decoder = GraphedDecoder(lambda ids, to_the_end: [ids[..., None].double()], torch.device("cpu"))
    for shape in ((8, 10), (10, 8)) * 3:
        ids = torch.arange(80).view(shape)
        assert torch.equal(decoder(ids, True)[0][..., 0], ids.double())
    assert len(decoder._graphs) == 2


def test_memory_for_graphs_has_an_end(recorder, monkeypatch):
    monkeypatch.setattr(graphed_decoder, "_MAX_GRAPHS", 2)
    decoder = GraphedDecoder(lambda ids, to_the_end: [ids[..., None].double()], torch.device("cpu"))
    for _ in range(3):
        for length in (3, 4, 5, 6):
            ids = torch.arange(length)[None]
            assert torch.equal(decoder(ids, True)[0][..., 0], ids.double())
    assert len(decoder._graphs) == 2
    decoder(torch.zeros(9, 9, dtype=torch.long), True)
    assert sum(room.numel() for room in decoder._rooms) <= 6, "there is no graph that would write to a larger one"


def test_a_target_that_cannot_be_recorded_says_why_and_runs_without_graphs(recorder, tiny_qwen3, monkeypatch, caplog):
    plain, target = FrozenTarget(tiny_qwen3, IDS), FrozenTarget(tiny_qwen3, IDS).record_graphs()

    def refuse(self, run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RunAgain, "record", refuse)
    batch = make_batch(3, 17)
    with caplog.at_level(logging.WARNING, logger=graphed_decoder.__name__):
        for _ in range(3):
            features = target(*batch)
    assert torch.equal(features.context_hidden_states, plain(*batch).context_hidden_states)
    (record,) = caplog.records
    assert "operation not permitted" in record.message and "--target_cuda_graphs off" in record.message


def test_graphs_that_are_there_are_let_go_when_a_shape_cannot_be_recorded(recorder, monkeypatch):
    decoder = GraphedDecoder(lambda ids, to_the_end: [ids[..., None].double()], torch.device("cpu"))
    recorded, refused = torch.arange(8).view(2, 4), torch.arange(10).view(2, 5)
    for _ in range(2):
        decoder(recorded, True)
    assert len(decoder._graphs) == 1

    def refuse(self, run):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RunAgain, "record", refuse)
    for ids in (refused, refused, recorded, refused, recorded):
        assert torch.equal(decoder(ids, True)[0][..., 0], ids.double())
    assert not (decoder.is_on or decoder._graphs or decoder._rooms or decoder._warm)
    assert decoder.pad(torch.zeros(2, 9)).shape == (2, 9), "a shape that gets no graph is not padded"


def test_another_stream_waits_for_the_last_one_that_has_something_to_read(monkeypatch):
    recorder, waits = Recorder.__new__(Recorder), []
    recorder.device, recorder._last_reader = torch.device("cuda", 0), None
    streams = [SimpleNamespace(wait_stream=lambda other, i=i: waits.append((i, streams.index(other)))) for i in (0, 1)]
    for number in (0, 0, 1, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, number=number: streams[number])
        recorder.follow_last_reader()
    assert waits == [(1, 0), (0, 1)]


def test_transformers_writes_out_no_mask_while_a_pass_is_recorded(monkeypatch):
    target, masks = FrozenTarget(make_target("qwen3"), IDS), []
    for layer in target.decoder.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    target(*make_batch(3, 17))
    assert len(masks) == 5 and all(mask is None for mask in masks)


def test_matrices_in_fp8_count_as_parameters_of_a_target_that_keeps_its_device_busy(recorder, monkeypatch):
    monkeypatch.setattr(graphed_decoder, "is_on_one_cuda_device", lambda model: True)
    target = make_target("llama")
    num_weights = target.num_parameters()
    too_many = 3_000_000_000_000 // num_weights + 1
    assert launches_outweigh(target, too_many // 2) and not launches_outweigh(target, too_many)
    assert quantize_to_fp8(target.model, smallest=16) and target.num_parameters() < num_weights / 2
    assert not launches_outweigh(target, too_many)


def test_graphs_are_for_one_cuda_device_and_for_passes_that_end_before_they_are_launched(tiny_qwen3):
    with pytest.raises(ValueError, match="--target_cuda_graphs on"):
        FrozenTarget(tiny_qwen3, IDS).record_graphs()
    assert not launches_outweigh(tiny_qwen3, 1)
