# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A tree of drafts: the best ones are in it, each node sees its path alone, and the output stays what it was."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafter import make_drafter, make_oracle
from tiny_models import make_target
from transformers import TemperatureLogitsWarper

from hf_dflash.decoding.draft_tree import DraftTree
from hf_dflash.decoding.speculative import speculative_generate


NEVER = 10_000


def grow(probabilities, budget):
    best = torch.tensor(probabilities).double().log().topk(min(budget, len(probabilities[0])), dim=-1)
    return DraftTree(best.values.tolist(), best.indices.tolist(), budget)


@settings(max_examples=40, deadline=None)
@given(slots=st.integers(1, 4), vocab_size=st.integers(1, 4), budget=st.integers(1, 30), seed=st.integers(0, 10**6))
def test_tree_holds_the_continuations_of_the_highest_probability(slots, vocab_size, budget, seed):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(slots, vocab_size, generator=generator).softmax(-1).tolist()
    tree = grow(probabilities, budget)

    def probability(path):
        return torch.tensor([probabilities[slot][token] for slot, token in enumerate(path)]).prod()

    continuations = [
        path for depth in range(1, slots + 1) for path in itertools.product(range(vocab_size), repeat=depth)
    ]
    best = sorted(map(probability, continuations), reverse=True)[:budget]
    paths = [[tree.tokens[n - 1] for n in tree.path(node)[1:]] for node in range(1, len(tree.parents))]
    assert len({tuple(path) for path in paths}) == len(paths) == min(budget, len(continuations))
    torch.testing.assert_close(torch.stack(sorted(map(probability, paths), reverse=True)), torch.stack(best))
    for node in range(1, len(tree.parents)):
        assert tree.parents[node] < node
        assert tree.depths[node] == len(tree.path(node)) - 1


def test_mask_shows_a_node_the_past_and_its_own_path():
    tree = grow([[0.6, 0.4], [0.7, 0.3]], 5)
    visible = tree.attention_mask(3, torch.float32, "cpu")[0, 0] == 0
    for node in range(len(tree.parents)):
        assert visible[node, :3].all()
        assert set(visible[node, 3:].nonzero()[:, 0].tolist()) == set(tree.path(node))


def test_following_the_targets_choices_ends_where_no_child_agrees():
    tree = grow([[0.6, 0.4, 0.0], [0.7, 0.3, 0.0]], 6)
    by_path = {tuple(tree.tokens[n - 1] for n in tree.path(node)[1:]): node for node in range(len(tree.parents))}
    chosen = [0] * len(tree.parents)
    chosen[0], chosen[by_path[(1,)]], chosen[by_path[(1, 1)]] = 1, 1, 2
    assert tree.follow(chosen) == [0, by_path[(1,)], by_path[(1, 1)]]
    chosen[0] = 2
    assert tree.follow(chosen) == [0]


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("budget", [1, 4, 20])
def test_tree_decoding_equals_plain_decoding(kind, budget):
    target = make_target(kind, torch.float64)
    input_ids = torch.randint(3, 95, (1, 9))
    for arguments in ({}, {"repetition_penalty": 1.3}):
        plain = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, eos_token_id=NEVER, **arguments
        )
        generator = torch.Generator().manual_seed(0)
        oracle = make_oracle(target, block_size=5)
        # Sharp enough that the tree goes deep before it goes wide.
        oracle.head = 30 * oracle.head
        oracle.plan([plain[0].tolist()], lambda: int(torch.randint(5, (), generator=generator)))  # noqa: B023
        # The end token that comes last.
        first_places = {int(token): place for place, token in reversed(list(enumerate(plain[0, 9:39])))}
        end = max(first_places, key=first_places.get)
        out = speculative_generate(
            target, oracle, input_ids, max_new_tokens=30, eos_token_id=end, tree_budget=budget, **arguments
        )
        expected = target.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=30, eos_token_id=end, **arguments
        )
        assert out.sequences.tolist() == expected.tolist()
        assert 1 + sum(out.acceptance_lengths[0]) == expected.shape[1] - 9
        assert max(out.acceptance_lengths[0]) == min(5, budget + 1)


def test_second_choices_are_accepted_where_a_chain_accepts_nothing():
    target = make_target("qwen3", torch.float64)
    input_ids = torch.randint(3, 95, (1, 9))
    plain = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, eos_token_id=NEVER
    )
    oracle = make_oracle(target, block_size=3).plan([plain[0].tolist()], lambda: 2)
    head = oracle.head
    # Its first choice is another token, the right one comes second.
    oracle.head = 30 * (head.roll(1, dims=0) * 1.1 + head)
    weight = target.get_output_embeddings().weight
    second = (oracle.head @ weight.T).topk(2).indices[:, 1]
    right = [int(second[token]) == token for token in plain[0, 9:].tolist()]
    chain = speculative_generate(target, oracle, input_ids, max_new_tokens=20, eos_token_id=NEVER)
    tree = speculative_generate(target, oracle, input_ids, max_new_tokens=20, eos_token_id=NEVER, tree_budget=8)
    assert tree.sequences.tolist() == chain.sequences.tolist() == plain[:, :29].tolist()
    assert sum(right) > 20
    assert tree.num_target_passes < chain.num_target_passes


def test_drawn_tokens_of_a_tree_follow_the_targets_distribution():
    from test_token_selection import chi_square_p_value, enumerate_distribution

    target = make_target(
        "qwen3", vocab_size=5, num_hidden_layers=2, hidden_size=16, bos_token_id=None, eos_token_id=None
    )
    prompt = torch.tensor([[3, 1, 4]])
    probability = enumerate_distribution(target, prompt, 3, [TemperatureLogitsWarper(1.5)])
    drafter = make_drafter(target, block_size=4, mask_token_id=2, target_layer_ids=[0])
    generator = torch.Generator().manual_seed(0)
    observed = torch.zeros(125, dtype=torch.float64)
    for _ in range(800):
        out = speculative_generate(
            target,
            drafter,
            prompt,
            max_new_tokens=4,
            do_sample=True,
            temperature=1.5,
            top_k=0,
            tree_budget=6,
            generator=generator,
        )
        observed[int(out.sequences[0, 3:6] @ torch.tensor([25, 5, 1]))] += 1
    assert chi_square_p_value(observed, probability) > 1e-3


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_5", "LinearAttentionLayer"), ("qwen3_sliding", "DynamicSlidingWindowLayer")]
)
def test_targets_without_full_attention_everywhere_are_refused_by_name(kind, name):
    target = make_target(kind)
    with pytest.raises(ValueError, match=name):
        speculative_generate(target, make_drafter(target), torch.tensor([[5, 6]]), max_new_tokens=4, tree_budget=4)


def test_batches_are_refused():
    target = make_target("qwen3")
    with pytest.raises(ValueError, match="one prompt at a time"):
        speculative_generate(target, make_drafter(target), torch.tensor([[5], [6]]), max_new_tokens=4, tree_budget=4)
