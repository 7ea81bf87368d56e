# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The simulated acceptance length: what decoding would accept, read off a reply that is already written."""

import numpy as np
import torch


def count_accepted(correct: torch.Tensor) -> torch.Tensor:
    """Leading correct drafts of each block: jointly, for a draft behind a wrong one is never accepted.

    Args:
        correct (`torch.Tensor` of shape `[N, B - 1]`, bool): whether each draft is right.

    Returns:
        `torch.Tensor` of shape `[N]`, int64, 0 to B - 1.
    """
    return correct.long().cumprod(dim=1).sum(dim=1)


def find_replies(loss_mask: np.ndarray, document_ids: np.ndarray) -> list[tuple[int, int]]:
    """The supervised spans `(first, end)` of packed documents; a span never crosses from one document into the next."""
    supervised = np.asarray(loss_mask, dtype=bool) & (np.asarray(document_ids) >= 0)
    if not supervised.any():
        return []
    starts = supervised.copy()
    starts[1:] &= ~supervised[:-1] | (document_ids[1:] != document_ids[:-1])
    ends = supervised.copy()
    ends[:-1] &= ~supervised[1:] | (document_ids[1:] != document_ids[:-1])
    return list(zip(starts.nonzero()[0].tolist(), (ends.nonzero()[0] + 1).tolist(), strict=True))


def walk_reply(first: int, end: int, accepted: dict[int, int]) -> list[int]:
    """Walks one reply as decoding does, from anchor to anchor by what was accepted.

    The first anchor is the first token of the reply: decoding has it from the target's own prefill. A block that reaches
    the end of the reply counts no bonus token, for none follows.

    Args:
        first (`int`), end (`int`): the reply's positions, `end` excluded.
        accepted (`dict[int, int]`): accepted drafts of the block at each anchor from `first` to `end` - 2.

    Returns:
        `list[int]`: tokens that each block brought, the bonus token included; they sum to `end` - `first` - 1.
    """
    lengths = []
    anchor = first
    while anchor < end - 1:
        reached = anchor + accepted[anchor] + 1
        lengths.append(min(reached, end - 1) - anchor)
        anchor = reached
    return lengths


def acceptance_by_slot(acceptance_lengths: list[int], block_size: int) -> list[float]:
    """For slots 1 .. B - 1, the share of blocks in which the slot and all before it were accepted; 0 without a block.

    Args:
        acceptance_lengths (`list[int]`): tokens that each block brought, the bonus token included.
        block_size (`int`): B.
    """
    num_blocks = max(1, len(acceptance_lengths))
    return [sum(length > slot for length in acceptance_lengths) / num_blocks for slot in range(1, block_size)]


def repeated_ngram_share(token_ids: list[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same completion. Loops are easy to draft: an acceptance length means
    little on completions in which this is high.

    Args:
        token_ids (`list[int]`): one completion.
        n (`int`, *optional*, defaults to 4): tokens of an n-gram.

    Returns:
        `float`: 0 to 1; 0 for completions shorter than n.
    """
    ngrams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
