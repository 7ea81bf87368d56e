# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import brute_force
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dflash.evaluation.acceptance import acceptance_by_slot, count_accepted, find_replies, walk_reply


MASK = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_accepted_drafts_are_the_leading_right_ones(correct):
    expected = [(row + [False]).index(False) for row in correct]
    assert count_accepted(torch.tensor(correct)).tolist() == expected


def test_acceptance_is_joint_and_not_a_product_of_accuracies():
    """Two blocks, each slot right half of the time: together never (0.5 drafts a block), or always the same block (1.0)."""
    apart = torch.tensor([[True, False], [False, True]])
    together = torch.tensor([[True, True], [False, False]])
    assert count_accepted(apart).float().mean() == 0.5
    assert count_accepted(together).float().mean() == 1.0


@settings(deadline=None)
@given(st.lists(MASK, min_size=1, max_size=4), st.integers(0, 3))
def test_replies_are_the_supervised_runs_of_each_document(masks, padding):
    loss_mask = np.array(sum(masks, []) + [1] * padding, dtype=bool)
    document_ids = np.array([d for d, mask in enumerate(masks) for _ in mask] + [-1] * padding)
    expected, start = [], 0
    for mask in masks:
        runs = "".join(map(str, mask))
        position = 0
        while (first := runs.find("1", position)) >= 0:
            end = first
            while end < len(runs) and runs[end] == "1":
                end += 1
            expected.append((start + first, start + end))
            position = end
        start += len(mask)
    assert find_replies(loss_mask, document_ids) == expected


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_the_walk_equals_decoding_token_by_token(length, data):
    """Accepted drafts never reach beyond the reply: its last token is the last that can be right."""
    first = data.draw(st.integers(0, 5))
    accepted = {first + i: data.draw(st.integers(0, min(3, length - 1 - i))) for i in range(length - 1)}
    lengths = walk_reply(first, first + length, accepted)
    tokens, blocks = brute_force.walk([0] * first + [1] * length, accepted)
    assert (sum(lengths), len(lengths)) == (tokens, blocks)
    assert sum(lengths) == length - 1
    assert all(n >= 1 for n in lengths)


def test_the_bonus_token_counts_except_behind_the_end_of_the_reply():
    # A perfect drafter, B = 4: three drafts and the bonus token, until the reply of 10 tokens ends.
    perfect = {anchor: min(3, 9 - anchor) for anchor in range(9)}
    assert walk_reply(0, 10, perfect) == [4, 4, 1]
    hopeless = dict.fromkeys(range(9), 0)
    assert walk_reply(0, 10, hopeless) == [1] * 9
    # The last block is right to the end (no bonus), or one short of it (the bonus is the last token).
    assert walk_reply(0, 3, {0: 2, 1: 1}) == [2]
    assert walk_reply(0, 3, {0: 1, 1: 1}) == [2]
    assert walk_reply(4, 5, {}) == []


def test_shares_by_slot_and_the_bonus_token_add_up_to_the_mean():
    lengths = [1, 2, 4, 1]
    assert acceptance_by_slot(lengths, 4) == [2 / 4, 1 / 4, 1 / 4]
    assert 1 + sum(acceptance_by_slot(lengths, 16)) == sum(lengths) / len(lengths)
    assert acceptance_by_slot([], 3) == [0, 0]
