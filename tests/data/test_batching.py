# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import datasets
import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dflash.data.batching import TokenBudgetBatchSampler, TokenBudgetDataLoader, collate_rows


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def steps_of(lengths, budget, epoch, world_size, accumulation, **options):
    """The rows of every optimizer step, in the order rank-by-rank micro-batches are dealt."""
    ranks = []
    for rank in range(world_size):
        sampler = TokenBudgetBatchSampler(
            lengths,
            budget,
            rank=rank,
            world_size=world_size,
            gradient_accumulation_steps=accumulation,
            **options,
        )
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    assert len({len(batches) for batches in ranks}) == 1
    return [
        [ranks[rank][step * accumulation + micro] for micro in range(accumulation) for rank in range(world_size)]
        for step in range(len(ranks[0]) // accumulation)
    ]


@given(LENGTHS, st.integers(1, 120), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_no_row_is_lost_or_repeated_and_every_rank_gets_the_same_count(
    lengths, budget, world_size, accumulation, epoch, shuffle
):
    steps = steps_of(lengths, budget, epoch, world_size, accumulation, shuffle=shuffle)
    batches = [batch for step in steps for batch in step]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max((lengths[row] for row in batch), default=0)
        assert len(batch) <= 1 or len(batch) * longest <= budget
    # Empty micro-batches stand at the end only, and are fewer than one step's worth.
    filled = [bool(batch) for batch in batches]
    assert filled == sorted(filled, reverse=True)
    assert filled.count(False) < world_size * accumulation


@given(LENGTHS, st.integers(1, 120), st.integers(0, 3), st.sampled_from([2, 4, 6, 12]))
@settings(deadline=None)
def test_runs_with_the_same_number_of_micro_batches_a_step_see_the_same_steps(lengths, budget, epoch, group):
    divisors = [n for n in range(1, group + 1) if group % n == 0]
    runs = [steps_of(lengths, budget, epoch, n, group // n) for n in divisors]
    assert all(run == runs[0] for run in runs)


@given(LENGTHS, st.integers(1, 120))
@settings(deadline=None)
def test_the_number_of_batches_and_their_shapes_do_not_change_with_the_epoch(lengths, budget):
    def shapes(epoch):
        (batches,) = zip(*steps_of(lengths, budget, epoch, 1, 1), strict=True)
        return sorted((len(batch), max(lengths[row] for row in batch)) for batch in batches)

    assert shapes(0) == shapes(1) == shapes(17)


def test_epochs_and_seeds_differ_and_each_is_reproducible():
    lengths = np.random.default_rng(0).integers(1, 30, 500)

    def order(seed, epoch):
        return steps_of(lengths, 64, epoch, 1, 1, seed=seed)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    # Only rows of equal length trade places: the sorted lengths inside each batch stay those of some batch of epoch 0.
    assert sorted(sorted(lengths[b[0]].tolist()) for b in order(0, 0)) == sorted(
        sorted(lengths[b[0]].tolist()) for b in order(0, 5)
    )


def test_the_order_of_an_epoch_is_pinned_so_that_a_resumed_run_finds_it_again():
    sampler = TokenBudgetBatchSampler([3, 1, 2, 3, 3, 5], 6, seed=3)
    sampler.set_epoch(2)
    assert list(sampler) == PINNED_ORDER


# Computed once; a change here breaks the resume of every run that was started before the change.
PINNED_ORDER = [[3, 2], [5], [4, 0], [1]]


def test_set_start_skips_to_any_micro_batch_and_only_once():
    sampler = TokenBudgetBatchSampler(range(1, 40), 50, world_size=2, rank=1, gradient_accumulation_steps=3)
    everything = list(sampler)
    for start in range(len(sampler) + 1):
        sampler.set_start(start)
        assert list(sampler) == everything[start:]
        assert list(sampler) == everything
    with pytest.raises(ValueError, match="micro_batch"):
        sampler.set_start(len(sampler) + 1)


def test_padding_share_is_the_share_of_padded_positions():
    assert TokenBudgetBatchSampler([4, 4, 2, 2], 8).padding_share == 0.0
    # 5 alone, 4 and 1 together: 5 + 8 positions for 10 tokens.
    assert TokenBudgetBatchSampler([5, 4, 1], 8).padding_share == pytest.approx(3 / 13)


def test_a_row_longer_than_the_budget_is_a_batch_of_its_own_up_to_max_length():
    sampler = TokenBudgetBatchSampler([10, 3, 3], 6, shuffle=False, max_length=10)
    assert list(sampler) == [[0], [1, 2]]
    with pytest.raises(ValueError, match="Row 0 has 10 tokens"):
        TokenBudgetBatchSampler([10, 3, 3], 6, max_length=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 8), "no rows"),
        (([3, 0], 8), "Row 1 has no tokens"),
        (([3], 0), "token_budget"),
        (([3], 8, {"rank": 2, "world_size": 2}), "rank"),
        (([3], 8, {"world_size": 0}), "at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(*positional, **options)


def make_dataset(lengths):
    return datasets.Dataset.from_dict(
        {
            "row_id": [10 * row for row in range(len(lengths))],
            "input_ids": [list(range(1, length + 1)) for length in lengths],
            "loss_mask": [[position % 2 == 0 for position in range(length)] for length in lengths],
        }
    )


def test_rows_are_padded_on_the_right_in_the_order_in_which_they_come():
    batch = collate_rows(list(make_dataset([2, 3])))
    assert batch["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["loss_mask"].tolist() == [[True, False, False], [True, False, True]]
    assert batch["lengths"].tolist() == [2, 3]
    assert batch["row_ids"].tolist() == [0, 10]
    assert [batch[name].dtype for name in batch] == [torch.int64, torch.bool, torch.int64, torch.int64]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"loss_mask": [1]}, "`row_id` 20 has 3 `input_ids`, 1 values in `loss_mask`"),
        ({"loss_mask": [0, 1, 1, 1]}, "4 values in `loss_mask`"),
        ({"length": 4}, "`length` 4"),
        ({"loss_mask": [-100, 1, 1]}, "`loss_mask` of the row with `row_id` 20 holds other values"),
        ({"loss_mask": [0.0, 0.5, 1.0]}, "holds other values than 0 and 1"),
    ],
)
def test_a_row_whose_columns_do_not_fit_is_refused_and_not_trained_on_other_tokens(change, message):
    rows = list(make_dataset([2, 3, 3]))
    with pytest.raises(ValueError, match=message):
        collate_rows([*rows[:2], {**rows[2], **change}])


@pytest.mark.parametrize("format_type", [None, "numpy", "torch"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_empty_micro_batch_goes_through_the_loader(format_type, num_workers):
    dataset = make_dataset([5, 4, 1]).with_format(format_type)
    sampler = TokenBudgetBatchSampler([5, 4, 1], 8, world_size=2, rank=1, gradient_accumulation_steps=2, shuffle=False)
    batches = list(TokenBudgetDataLoader(dataset, sampler, num_workers=num_workers))
    assert [batch["row_ids"].tolist() for batch in batches] == [[10, 20], []]
    assert batches[1]["input_ids"].shape == batches[1]["loss_mask"].shape == (0, 0)
    assert batches[1]["lengths"].shape == (0,)
    assert [batches[1][name].dtype for name in batches[1]] == [batches[0][name].dtype for name in batches[0]]


@pytest.mark.compat
def test_trainer_style_resume_gives_the_rest_of_the_epoch():
    lengths = list(range(1, 30))
    sampler = TokenBudgetBatchSampler(lengths, 40, gradient_accumulation_steps=2)
    loader = TokenBudgetDataLoader(make_dataset(lengths), sampler)
    loader.set_epoch(3)
    everything = [batch["row_ids"].tolist() for batch in loader]

    # What Trainer does: skip first, then tell the epoch to the sampler under the skipping one.
    loader.set_epoch(0)
    skipped = skip_first_batches(loader, 4)
    skipped.batch_sampler.batch_sampler.set_epoch(3)
    assert [batch["row_ids"].tolist() for batch in skipped] == everything[4:]
    assert len(skipped) == len(everything) - 4

    sampler.set_start(4)
    assert [batch["row_ids"].tolist() for batch in loader] == everything[4:]


def test_the_loader_has_no_batch_size_that_trainer_could_multiply():
    lengths = [3, 2, 1]
    loader = TokenBudgetDataLoader(make_dataset(lengths), TokenBudgetBatchSampler(lengths, 4))
    assert loader.batch_size is None
    assert not hasattr(loader.batch_sampler, "batch_size")
    assert len(loader) == 2
    assert len(loader.dataset) == 3
