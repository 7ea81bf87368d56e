# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import KINDS, VOCAB_SIZE, make_target

from hf_dflash.data import local_generation
from hf_dflash.data.local_generation import LocalSampling, generate_replies, plan_generation_batches


# Many ids that end a reply, so that rows finish at different times and leave the batch.
EOS = list(range(60, 68))


def make_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def generate_one_by_one(target, prompts, max_new_tokens):
    return [
        target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_gives_what_generate_gives_one_by_one(kind):
    target = make_target(kind, torch.float64)
    prompts = make_prompts([3, 17, 1, 9, 12, 5, 30, 8])
    expected = generate_one_by_one(target, prompts, 40)
    replies = generate_replies(target, prompts, max_new_tokens=40, eos_token_ids=EOS)
    assert replies == expected
    # The case is worth something: rows leave the batch at different times.
    lengths = {len(reply) for reply in replies}
    assert min(lengths) <= 8 < max(lengths), lengths


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_a_repetition_penalty_sees_the_row_and_not_its_padding(kind):
    target = make_target(kind, torch.float64)
    target.generation_config.repetition_penalty = 1.5
    prompts = make_prompts([3, 17, 1, 9, 12, 5, 30, 8])
    expected = generate_one_by_one(target, prompts, 24)
    options = {"max_new_tokens": 24, "eos_token_ids": EOS}
    assert generate_replies(target, prompts, sampling=LocalSampling(repetition_penalty=1.5), **options) == expected
    assert generate_replies(target, prompts, **options) != expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": 0.9}, "top_p changes nothing when decoding is greedy"),
        ({"top_k": 20}, "top_k changes nothing when decoding is greedy"),
    ],
)
def test_sampling_that_would_not_be_what_was_asked_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LocalSampling(**options)


def test_sampled_replies_follow_the_seed(tiny_qwen3):
    prompts = make_prompts([4, 6, 5])

    def sample(seed):
        options = {"max_new_tokens": 12, "eos_token_ids": [2]}
        return generate_replies(tiny_qwen3, prompts, sampling=LocalSampling(1.0, 0.95, 50, seed), **options)

    assert sample(1) == sample(1) != sample(2)


def test_sampled_tokens_have_the_frequencies_of_the_model(tiny_qwen3):
    (prompt,) = make_prompts([5])
    logits = tiny_qwen3(torch.tensor([prompt])).logits[0, -1]
    replies = generate_replies(
        tiny_qwen3, [prompt] * 20_000, max_new_tokens=1, eos_token_ids=[2], sampling=LocalSampling(temperature=2.0)
    )
    counts = torch.bincount(torch.tensor(replies)[:, 0], minlength=VOCAB_SIZE)
    assert torch.allclose(counts / 20_000, (logits / 2).softmax(-1), atol=0.015)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    token_budget=st.integers(1, 600),
    max_rows=st.integers(1, 9),
)
def test_batches_hold_every_prompt_once_and_stay_within_the_budget(lengths, token_budget, max_rows):
    batches = plan_generation_batches(lengths, 10, token_budget, max_rows)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) <= max_rows
        assert len(batch) == 1 or len(batch) * (longest + 10) <= token_budget


def test_a_batch_that_does_not_fit_is_answered_in_halves(tiny_qwen3, monkeypatch):
    prompts = make_prompts([4, 6, 5, 7, 3])
    options = {"max_new_tokens": 6, "eos_token_ids": EOS}
    expected = generate_replies(tiny_qwen3, prompts, **options)
    sizes = []

    def generate_few(model, prompts, **options):
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("too large")
        return generate_replies(model, prompts, **options)

    monkeypatch.setattr(local_generation, "generate_replies", generate_few)
    assert local_generation._generate_within_memory(tiny_qwen3, prompts, **options) == expected
    assert sizes == [5, 2, 3, 1, 2]
