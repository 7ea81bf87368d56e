# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The host waits for the device once a block."""

import warnings

import pytest
import torch
from oracle_drafter import make_oracle
from tiny_models import make_target

from hf_dflash.decoding.speculative import speculative_generate


def decode(target, oracle, input_ids, max_new_tokens, **kwargs):
    return speculative_generate(
        target,
        oracle,
        input_ids,
        torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=10_000,
        **kwargs,
    )


def make_case(kind, device="cpu"):
    target = make_target(kind).to(device)
    input_ids = torch.randint(3, 95, (1, 9), device=device)
    plain = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=60, eos_token_id=10_000
    )
    oracle = make_oracle(make_target(kind), block_size=4).to(device)
    oracle.head, oracle.embedding = oracle.head.to(device), oracle.embedding.to(device)
    oracle.plan([plain[0].tolist()], lambda: 1)
    return target, oracle, input_ids


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_values_are_read_once_a_block(kind, do_sample, monkeypatch):
    target, oracle, input_ids = make_case(kind)
    # The planned drafts read values themselves: a random drafter is what runs here.
    oracle.forward = super(type(oracle), oracle).forward
    reads = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def read(self, *args, original=original, name=name):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, read)

    counts = []
    for max_new_tokens in (8, 24):
        reads.clear()
        out = decode(target, oracle, input_ids, max_new_tokens, do_sample=do_sample)
        counts.append((len(reads), len(out.acceptance_lengths[0])))
    (short_reads, short_blocks), (long_reads, long_blocks) = counts
    assert long_blocks > short_blocks
    assert long_reads - short_reads == long_blocks - short_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5"])
def test_cuda_is_waited_for_once_a_block(kind):
    target, oracle, input_ids = make_case(kind, "cuda")
    oracle.forward = super(type(oracle), oracle).forward
    decode(target, oracle, input_ids, 8)
    counts = []
    for max_new_tokens in (8, 24):
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = decode(target, oracle, input_ids, max_new_tokens)
        torch.cuda.set_sync_debug_mode("default")
        waits = sum("synchronizing" in str(warning.message) for warning in caught)
        counts.append((waits, len(out.acceptance_lengths[0])))
    (short_waits, short_blocks), (long_waits, long_blocks) = counts
    assert long_waits - short_waits == long_blocks - short_blocks
