# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from oracle_drafter import make_oracle
from tiny_models import make_target

from hf_dflash.decoding.adaptive_block import AdaptiveBlockLength
from hf_dflash.decoding.speculative import speculative_generate


def simulate(acceptance, fixed, per_draft, blocks=400):
    """The choices of the last hundred blocks, with a drafter whose slots are right with the given probability."""
    generator = torch.Generator().manual_seed(0)
    length = AdaptiveBlockLength(len(acceptance))
    choices = []
    for _ in range(blocks):
        drafts = length.choose()
        right = (torch.rand(len(acceptance), generator=generator) < torch.tensor(acceptance)).long()
        length.observe(drafts, [min(drafts, int(right.cumprod(0).sum()))], fixed + per_draft * drafts)
        choices.append(drafts)
    return choices[-100:]


def best_length(acceptance, fixed, per_draft):
    speeds, tokens, survival = [], 1.0, 1.0
    for drafts, rate in enumerate(acceptance, start=1):
        survival *= rate
        tokens += survival
        speeds.append(tokens / (fixed + per_draft * drafts))
    return 1 + speeds.index(max(speeds))


@pytest.mark.parametrize(
    ("acceptance", "fixed", "per_draft"),
    [
        ([0.95] * 7, 1.0, 0.001),
        ([0.5] * 7, 1.0, 0.3),
        ([0.9, 0.9, 0.05, 0.9, 0.9, 0.9, 0.9], 1.0, 0.1),
        ([0.1] * 15, 1.0, 0.5),
    ],
)
def test_choice_settles_on_the_length_of_most_tokens_per_second(acceptance, fixed, per_draft):
    choices = simulate(acceptance, fixed, per_draft)
    best = best_length(acceptance, fixed, per_draft)
    assert sum(abs(choice - best) <= 1 for choice in choices) >= 80
    # The whole block is still looked at now and then.
    assert len(acceptance) in choices


def test_all_drafts_are_verified_while_they_are_free():
    assert set(simulate([0.8] * 7, 1.0, 0.0)) == {7}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_output_does_not_depend_on_the_choice(kind):
    target = make_target(kind, torch.float64)
    input_ids = torch.randint(3, 95, (1, 9))
    plain = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=70, eos_token_id=10_000
    )
    generator = torch.Generator().manual_seed(0)
    oracle = make_oracle(target, block_size=8)
    oracle.plan([plain[0].tolist()], lambda: int(torch.randint(8, (), generator=generator)))
    out = speculative_generate(target, oracle, input_ids, max_new_tokens=60, eos_token_id=10_000, adaptive_block=True)
    assert out.sequences.tolist() == plain[:, :69].tolist()
    assert 1 + sum(out.acceptance_lengths[0]) == 60
