# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Drafters whose proposals a test decides, on top of the real one (its cache, masks and shapes are the real ones)."""

import torch

from hf_dflash import DFlashForSpeculation, create_drafter_config


def make_drafter(target, block_size: int = 5, seed: int = 1, **overrides) -> DFlashForSpeculation:
    """A random drafter for a target of `tiny_models`, in its dtype."""
    return _make(DFlashForSpeculation, target, block_size, seed, **overrides)


def make_oracle(target, block_size: int = 5, seed: int = 1, **overrides) -> "OracleDrafter":
    """An [`OracleDrafter`] for a target of `tiny_models`; `plan` it before use."""
    oracle = _make(OracleDrafter, target, block_size, seed, **overrides)
    oracle.head = find_draft_states(target)
    oracle.embedding = target.get_input_embeddings()(torch.arange(len(oracle.head)))
    return oracle


def _make(drafter_class, target, block_size, seed, **overrides):
    vocab_size = target.config.get_text_config().vocab_size
    fields = {"num_hidden_layers": 2, "mask_token_id": vocab_size - 1, **overrides}
    config = create_drafter_config(target.config, block_size=block_size, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = drafter_class(config)
    return drafter.to(target.dtype).eval().requires_grad_(False)


def find_draft_states(target) -> torch.Tensor:
    """For each token a hidden state, `[V, H]`, on which the target's head prefers that token."""
    weight = target.get_output_embeddings().weight.detach().double()
    states = torch.nn.functional.normalize(weight, dim=-1).clone()
    # Perceptron updates: rows of the head that are long win over others until their own state is moved away from them.
    for _ in range(2000):
        best = (states @ weight.T).argmax(dim=-1)
        wrong = (best != torch.arange(len(weight))).nonzero()[:, 0]
        if len(wrong) == 0:
            return states.to(target.dtype)
        states[wrong] += 0.1 * (weight[wrong] - weight[best[wrong]])
    raise AssertionError(f"tokens {wrong.tolist()} can never be the head's first choice")


class OracleDrafter(DFlashForSpeculation):
    """
    Proposes the planned continuation, right for as many slots as `num_right` says of each block.

    Wrong drafts are the right token plus one, and behind them drafts are right again: acceptance must stop at the first
    wrong one.
    """

    def plan(self, sequences: list[list[int]], num_right) -> "OracleDrafter":
        """
        Args:
            sequences (`list[list[int]]`): each row's tokens without padding, prompt first.
            num_right (`Callable`): called for each block of each row, gives how many of its drafts are right.
        """
        self.sequences, self.num_right = sequences, num_right
        return self

    def forward(self, noise_embeds, context_hidden_states, position_ids, **kwargs):
        out = super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)
        slots = noise_embeds.shape[1]
        for row in range(noise_embeds.shape[0]):
            anchor = int(position_ids[row, -slots])
            sequence = self._find_sequence(anchor, noise_embeds[row, 0])
            right = self.num_right()
            for slot in range(1, slots):
                token = sequence[anchor + slot] if anchor + slot < len(sequence) else 0
                if slot == right + 1:
                    token = (token + 1) % len(self.head)
                out.last_hidden_state[row, slot] = self.head[token]
        return out

    def _find_sequence(self, anchor: int, anchor_embedding: torch.Tensor) -> list[int]:
        # Rows leave a batch when they end, so their number says nothing: the anchor tells them apart, mostly.
        for sequence in self.sequences:
            if anchor < len(sequence) and torch.equal(self.embedding[sequence[anchor]], anchor_embedding):
                return sequence
        raise AssertionError(f"no planned sequence has this anchor at position {anchor}")
