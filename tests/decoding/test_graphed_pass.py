# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A verify pass that is recorded once and replayed gives the same output; what cannot be recorded is refused."""

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

    def record(run):
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
    def record(run):
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
