# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Anchors, supervised slots, masks and the walk of a reply in plain loops: what the vectorized code is compared with."""

import math


_64_BITS = (1 << 64) - 1


def anchor_hash(seed: int, epoch: int, document_key: int, position: int) -> int:
    """splitmix64 of a counter, in Python's unbounded integers."""
    golden = 0x9E3779B97F4A7C15
    x = seed * golden & _64_BITS
    for part in (epoch, document_key, position):
        x = (x + (part + 1) * golden) & _64_BITS
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
        x ^= x >> 31
    return x >> 1


def eligible_anchors(loss_mask: list[int]) -> list[int]:
    """Of one document."""
    return [a for a in range(len(loss_mask) - 1) if loss_mask[a] and loss_mask[a + 1]]


def select_anchors(loss_mask: list[int], num_anchors: int, ratio, seed: int, epoch: int, document_key: int):
    """Of one document, by position in it."""
    eligible = eligible_anchors(loss_mask)
    count = min(num_anchors, len(eligible))
    if ratio is not None:
        count = min(count, math.ceil(ratio * sum(loss_mask)))
    by_hash = sorted(eligible, key=lambda position: anchor_hash(seed, epoch, document_key, position))
    return sorted(by_hash[:count])


def supervised_slots(loss_mask: list[int], anchor: int, block_size: int) -> list[bool]:
    """Slots 1 .. B - 1 of one block of one document."""
    slots = []
    for slot in range(1, block_size):
        tokens = range(anchor + 1, anchor + slot + 1)
        slots.append(all(token < len(loss_mask) and bool(loss_mask[token]) for token in tokens))
    return slots


def visible_keys(document_ids, anchors, valid, block_size, sliding_window, is_causal) -> list[list[bool]]:
    """The mask of one row, `[Q, C + Q]`."""
    rows = []
    for block, anchor in enumerate(anchors):
        for slot in range(block_size):
            row = []
            for key, document in enumerate(document_ids):
                sees = valid[block] and document == document_ids[anchor] and key < anchor
                if sliding_window is not None:
                    sees = sees and (anchor + slot) - key < sliding_window
                row.append(bool(sees))
            for key_block in range(len(anchors)):
                for key_slot in range(block_size):
                    sees = key_block == block
                    if is_causal:
                        sees = sees and key_slot <= slot
                    if sliding_window is not None:
                        sees = sees and abs(key_slot - slot) < sliding_window
                    row.append(bool(sees))
            rows.append(row)
    return rows


def walk(loss_mask: list[int], accepted: dict[int, int]) -> tuple[int, int]:
    """Tokens and blocks of decoding every reply of one document: `accepted` drafts at each anchor."""
    tokens = blocks = 0
    position = 0
    while position < len(loss_mask):
        if not loss_mask[position]:
            position += 1
            continue
        end = position
        while end < len(loss_mask) and loss_mask[end]:
            end += 1
        written = position + 1  # the first token of the reply comes from the prefill
        while written < end:
            blocks += 1
            anchor = written - 1
            for _ in range(accepted[anchor]):
                written += 1
                tokens += 1
            if written < end:  # the bonus token
                written += 1
                tokens += 1
        position = end
    return tokens, blocks
