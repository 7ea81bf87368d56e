# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Sampling leaves the target's distribution as it is, with good drafts and bad ones, likely ones and drawn ones."""

import itertools

import pytest
import torch
from tiny_models import make_target
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.decoding.token_selection import count_agreeing, process_logits, verify_drafts


VOCAB_SIZE = 5
SAMPLING = {
    "temperature": ({"temperature": 0.7, "top_k": 0}, [TemperatureLogitsWarper(0.7)]),
    "top_p": ({"top_p": 0.8, "top_k": 0}, [TopPLogitsWarper(0.8)]),
    "top_k": ({"top_k": 3, "temperature": 1.5}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(3)]),
}


class TableDrafter(DFlashForSpeculation):
    """Its logits at each slot are what the test says."""

    def set_logits(self, target, logits):
        self.states = logits @ torch.linalg.pinv(target.get_output_embeddings().weight).T
        return self

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.last_hidden_state[:, 1:] = self.states
        return out


@pytest.fixture(scope="module")
def small_target():
    return make_target(
        "qwen3",
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        head_dim=4,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.4,
    )


def enumerate_distribution(target, prompt, length, processors):
    """Probability of each of the `VOCAB_SIZE ** length` continuations."""
    continuations = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=length)))
    ids = torch.cat([prompt.expand(len(continuations), -1), continuations], dim=1)
    logits = target(ids).logits[:, prompt.shape[1] - 1 : -1]
    probability = torch.ones(len(continuations), dtype=torch.float64)
    for position in range(length):
        scores = LogitsProcessorList(processors)(ids, logits[:, position].clone())
        chosen = scores.softmax(-1).gather(1, continuations[:, position : position + 1])[:, 0]
        probability *= chosen.double()
    return probability


def chi_square_p_value(observed, probability):
    assert observed[probability == 0].sum() == 0
    expected = probability * observed.sum()
    # Rare continuations are counted together: the approximation needs five of each.
    rare = expected < 5
    pairs = [(observed[rare].sum(), expected[rare].sum())] if expected[rare].sum() >= 5 else []
    pairs += list(zip(observed[~rare], expected[~rare], strict=True))
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    degrees = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.as_tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_draws_follow_the_targets_distribution(small_target, sampling, quality, sample_drafts):
    arguments, processors = SAMPLING[sampling]
    prompt = torch.tensor([[3, 1, 4]])
    # The first token comes from the prompt; the two that are compared behind it from drafts, residuals and bonus tokens.
    probability = enumerate_distribution(small_target, prompt, 3, processors)
    marginals = probability.view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    good = torch.stack([marginals.sum((0, 2)), marginals.sum((0, 1))]).clamp(min=1e-4).log().float()
    slots = torch.cat([good, good.new_zeros(1, VOCAB_SIZE)])
    config = create_drafter_config(
        small_target.config, num_hidden_layers=1, block_size=4, mask_token_id=2, target_layer_ids=[0]
    )
    drafter = TableDrafter(config).eval().set_logits(small_target, slots if quality == "good" else -slots)

    generator = torch.Generator().manual_seed(0)
    observed = torch.zeros(VOCAB_SIZE**3, dtype=torch.float64)
    lengths = []
    for _ in range(10 if not sample_drafts else 4):
        out = speculative_generate(
            small_target,
            drafter,
            prompt.expand(5000, -1),
            max_new_tokens=4,
            do_sample=True,
            generator=generator,
            sample_drafts=sample_drafts,
            **arguments,
        )
        code = out.sequences[:, 3:6] @ torch.tensor([VOCAB_SIZE**2, VOCAB_SIZE, 1])
        observed += torch.bincount(code, minlength=len(observed))
        lengths += [row[0] for row in out.acceptance_lengths]
    assert observed.sum() == (20_000 if sample_drafts else 50_000)
    # The first block of a row: two drafts, and the third token of it is the bonus.
    mean = sum(lengths) / len(lengths)
    assert mean > 1.5 if quality == "good" else mean < 1.5
    assert chi_square_p_value(observed, probability) > 1e-3


@pytest.mark.parametrize("is_drawn", [False, True])
def test_drafts_of_probability_zero_are_never_accepted(is_drawn):
    scores = torch.full((1000, 3, 4), -torch.inf)
    scores[..., 1:3] = 0
    drafts = torch.tensor([[0, 1]]).expand(1000, -1)
    q = torch.full((1000, 2, 4), 0.25) if is_drawn else None
    tokens = verify_drafts(scores, drafts, q, do_sample=True)
    assert set(tokens[:, 0].tolist()) == {1, 2}


def test_drawn_drafts_from_the_targets_own_distribution_are_always_accepted():
    scores = torch.randn(200, 4, 6)
    q = scores[:, :-1].softmax(-1)
    drafts = torch.multinomial(q.reshape(-1, 6), 1).view(200, 3)
    tokens = verify_drafts(scores, drafts, q, do_sample=True)
    assert torch.equal(tokens[:, :3], drafts)


def test_acceptance_stops_at_the_first_wrong_draft():
    scores = torch.zeros(1, 5, 8)
    scores[0, torch.arange(5), torch.tensor([3, 4, 5, 6, 7])] = 1
    drafts = [3, 0, 5, 6]
    [tokens] = verify_drafts(scores, torch.tensor([drafts]), None, do_sample=False).tolist()
    assert count_agreeing(drafts, tokens) == 1
    assert tokens[:2] == [3, 4]
    assert count_agreeing(tokens[:4], tokens) == 4 and count_agreeing([], [3]) == 0


@pytest.mark.parametrize(
    "processors",
    [
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
        [RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.7)],
    ],
)
def test_processors_give_at_each_position_what_they_give_step_by_step(processors):
    processors = LogitsProcessorList(processors)
    logits = torch.randn(2, 4, 9)
    prefixes = [torch.randint(0, 9, (length,)) for length in (12, 7)]
    processed = process_logits(logits, processors, prefixes)
    for row, prefix in enumerate(prefixes):
        for position in range(4):
            seen = prefix[None, : len(prefix) - 3 + position]
            assert torch.equal(processed[row, position], processors(seen, logits[row, position][None].clone())[0])
