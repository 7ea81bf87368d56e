# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A verify pass that is recorded once and replayed gives the same output; what cannot be recorded is refused."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from oracle_drafter import make_drafter, make_oracle
from tiny_models import make_target

from hf_dflash.decoding import graphed_pass
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.decoding.target_cache import RollbackCache


NEVER = 10_000


def make_case(kind, device="cpu", dtype=torch.float64, **overrides):
    target = make_target(kind, dtype, **overrides).to(device)
    input_ids = torch.randint(3, 95, (1, 9), device=device)
    kwargs = {"max_new_tokens": 40, "eos_token_id": NEVER, "do_sample": False}
    plain = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **kwargs)
    oracle = make_oracle(make_target(kind, dtype, **overrides), block_size=5).to(device)
    oracle.head, oracle.embedding = oracle.head.to(device), oracle.embedding.to(device)
    rights = iter([0, 4, 2, 3, 1] * 20)
    oracle.plan([plain[0].tolist()], lambda: next(rights))
    return target, oracle, input_ids, plain, kwargs


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5"])
def test_replayed_passes_on_cuda_give_what_plain_decoding_gives(kind):
    # `fla`'s kernels, which plain decoding takes where they are installed, have no fp64, and no heads narrower than 16.
    narrower = {"dtype": torch.float32, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    target, oracle, input_ids, plain, kwargs = make_case(kind, "cuda", **(narrower if kind == "qwen3_5" else {}))
    out = speculative_generate(target, oracle, input_ids, cuda_graph=True, **kwargs)
    assert torch.equal(out.sequences, plain)


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_everything_a_replay_reads_and_writes_has_its_own_place(kind, monkeypatch):
    target, oracle, input_ids, plain, kwargs = make_case(kind)
    recorded, caches = [], []
    start = RollbackCache.record
    monkeypatch.setattr(RollbackCache, "record", lambda cache: caches.append(cache) or start(cache))

    def record(run, device):
        """A stand-in for CUDA: a replay does the recorded call again, and its results are in the tensors of the recording."""
        lengths = [layer.cumulative_length for layer in caches[-1].attention_layers]
        before = [length.clone() for length in lengths]
        outputs = run()
        for length, earlier in zip(lengths, before, strict=True):
            length.copy_(earlier)
        recorded.append(run)

        def replay():
            for output, value in zip(outputs, run(), strict=True):
                output.copy_(value)

        return replay, outputs

    monkeypatch.setattr(graphed_pass, "record", record)
    monkeypatch.setattr("hf_dflash.decoding.speculative_loop.SpeculativeLoop.check_graph_is_possible", lambda *_: None)
    out = speculative_generate(target, oracle, input_ids, cuda_graph=True, **kwargs)
    assert torch.equal(out.sequences, plain)
    assert len(recorded) == 1
    assert {1, 5} < set(out.acceptance_lengths[0])


def test_pass_that_cannot_be_recorded_is_refused_with_the_reason(monkeypatch):
    def record(run, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_pass, "record", record)
    graphed = graphed_pass.GraphedPass(lambda input_ids, position_ids: input_ids)
    graphed(torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="leave `cuda_graph` out. .operation not permitted"):
        graphed(torch.zeros(1, 3), torch.zeros(1, 3))


def test_cuda_graph_without_cuda_is_refused():
    target = make_target("qwen3")
    with pytest.raises(ValueError, match="`cuda_graph` needs a target on CUDA, this one is on cpu"):
        speculative_generate(target, make_drafter(target), torch.tensor([[5, 6]]), max_new_tokens=4, cuda_graph=True)


class OneCudaDevice:
    """What PyTorch remembers of a recording, and how one that fails leaves it behind."""

    def __init__(self, monkeypatch):
        self.before = SimpleNamespace(name="before", device=torch.device("cpu"), device_index=1)
        self.stream = SimpleNamespace(name="recording", device=torch.device("cpu"), device_index=1)
        self.current_stream, self.current_device = self.before, 0
        self.pools_in_use, self.num_pool_users, self.draws_random_numbers = set(), 0, True
        self.ends_badly = False
        for name in ("graph", "device", "set_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay="the replay"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current_stream)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool)

    @contextlib.contextmanager
    def device(self, device):
        before, self.current_device = self.current_device, device.index
        try:
            yield
        finally:
            self.current_device = before

    def set_stream(self, stream):
        self.current_stream, self.current_device = stream, stream.device_index

    @contextlib.contextmanager
    def graph(self, graph, pool="of its own", stream=None, capture_error_mode="global"):
        before = self.current_stream
        self.set_stream(stream)
        self.pools_in_use.add(pool)
        self.num_pool_users += 1
        self.draws_random_numbers = False
        try:
            yield
        finally:
            if self.ends_badly:
                self.ends_badly = False
                raise RuntimeError("operation failed due to a previous error during capture")
            self.pools_in_use.remove(pool)
            # Here a graph lets go of its pool at once.
            self.num_pool_users -= 1
            self.draws_random_numbers = True
            self.set_stream(before)

    def end_allocation(self, device, pool):
        if pool not in self.pools_in_use:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools_in_use.remove(pool)

    def release_pool(self, device, pool):
        self.num_pool_users -= 1


@pytest.mark.parametrize("ends_badly", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_recording_that_fails_gives_the_reason_and_leaves_everything_as_before(kind, ends_badly, monkeypatch):
    cuda = OneCudaDevice(monkeypatch)

    def ask_for_a_number():
        cuda.ends_badly = ends_badly
        raise kind("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=f"^{kind.__name__}: operation not permitted when stream is capturing"):
        graphed_pass.record(ask_for_a_number, torch.device("cuda", 1), "pool", cuda.stream)
    assert cuda.current_stream is cuda.before and cuda.current_device == 0
    assert not cuda.pools_in_use and cuda.num_pool_users == 0
    assert cuda.draws_random_numbers


def test_the_reason_is_given_where_pytorch_has_other_functions_for_the_pool(monkeypatch):
    cuda = OneCudaDevice(monkeypatch)
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")

    def ask_for_a_number():
        cuda.ends_badly = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted"):
        graphed_pass.record(ask_for_a_number, torch.device("cuda", 1), "pool", cuda.stream)
    assert cuda.current_stream is cuda.before


def test_a_recording_is_of_the_device_that_it_is_asked_for(monkeypatch):
    cuda, seen = OneCudaDevice(monkeypatch), []
    device = torch.device("cuda", 1)
    replay, outputs = graphed_pass.record(
        lambda: seen.append((cuda.current_stream, cuda.current_device)) or ("output",), device, "pool", cuda.stream
    )
    assert seen == [(cuda.stream, 1)] and (replay, outputs) == ("the replay", ("output",))
    assert cuda.current_stream is cuda.before and cuda.current_device == 0
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device, device_index=device.index))
    graphed_pass._recording_stream.cache_clear()
    try:
        streams = [graphed_pass._recording_stream(torch.device("cuda", index)) for index in (0, 1, 1)]
    finally:
        graphed_pass._recording_stream.cache_clear()
    assert [stream.device_index for stream in streams] == [0, 1, 1] and streams[1] is streams[2]
