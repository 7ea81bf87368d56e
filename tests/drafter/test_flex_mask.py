# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The tiles of the block-sparse mask against those that torch finds by evaluating the rule for every pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafters import MASK_TOKEN_ID, make_drafter, make_rows
from torch.nn.attention.flex_attention import create_block_mask

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_flex_mask
from hf_dflash.training.block_batch import draw_blocks


def visible_tiles(num_blocks, indices):
    """`[R, query tiles, key tiles]` bool of flex attention's counts and ordered indices."""
    listed = torch.arange(indices.shape[-1]) < num_blocks[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter_(-1, indices.long(), listed)[:, 0]


@st.composite
def packed_rows(draw):
    rows = draw(st.integers(1, 2))
    context_length = draw(st.sampled_from([100, 128, 300, 384]))
    num_anchors = draw(st.sampled_from([3, 16, 20]))
    document_ids, anchors, valid = [], [], []
    for _ in range(rows):
        lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=6))
        ids = [d for d, length in enumerate(lengths) for _ in range(length)][:context_length]
        chosen = sorted(draw(st.lists(st.integers(0, len(ids) - 1), max_size=num_anchors)))
        document_ids.append(ids + [-1] * (context_length - len(ids)))
        anchors.append(chosen + [0] * (num_anchors - len(chosen)))
        valid.append([True] * len(chosen) + [False] * (num_anchors - len(chosen)))
    return torch.tensor(document_ids), torch.tensor(anchors), torch.tensor(valid)


@settings(max_examples=25, deadline=None)
@given(
    packed_rows(),
    st.sampled_from([2, 8, 10, 16]),
    st.sampled_from([None, 16, 40, 200]),
    st.booleans(),
)
def test_no_visible_tile_is_missing_and_no_partial_tile_is_called_full(blocks, block_size, sliding_window, is_causal):
    kinds = {"sliding_window": sliding_window, "is_causal": is_causal}
    mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*blocks, block_size, **kinds)
    wanted = create_block_mask(mask_mod, blocks[0].shape[0], None, q_len, kv_len, device="cpu")
    ours = create_flex_mask(*blocks, block_size, **kinds)

    wanted_full = visible_tiles(wanted.full_kv_num_blocks, wanted.full_kv_indices)
    wanted_some = visible_tiles(wanted.kv_num_blocks, wanted.kv_indices) | wanted_full
    full = visible_tiles(ours.full_kv_num_blocks, ours.full_kv_indices)
    some = visible_tiles(ours.kv_num_blocks, ours.kv_indices) | full
    assert not (wanted_some & ~some).any()
    assert not (full & ~wanted_full).any()
    # Where tiles line up with blocks and with the end of the context, nothing more is visited than needed.
    if 128 % block_size == 0 and blocks[0].shape[1] % 128 == 0:
        assert torch.equal(some, wanted_some)
        assert torch.equal(full, wanted_full)


@pytest.mark.parametrize("block_size", [8, 16])
def test_tiles_that_no_block_sees_are_skipped(block_size):
    document_ids = torch.tensor([0] * 512 + [1] * 512)
    anchors = torch.tensor([600 + i for i in range(16)])
    mask = create_flex_mask(document_ids, anchors, torch.ones(16, dtype=torch.bool), block_size)
    visited = visible_tiles(mask.kv_num_blocks, mask.kv_indices) | visible_tiles(
        mask.full_kv_num_blocks, mask.full_kv_indices
    )
    assert not visited[..., :4].any(), "tiles of another document"
    assert not visited[..., 5:8].any(), "tiles behind every anchor"


@pytest.mark.parametrize("block_size", [8, 16, 24])
@pytest.mark.parametrize("num_anchors", [1, 17, 200])
def test_packed_rows_fill_whole_tiles_where_the_drafter_counts_on_it(tiny_qwen3, block_size, num_anchors):
    """Flex attention then checks no bounds."""
    assert make_drafter(tiny_qwen3, block_size=block_size).layers[0].self_attn.is_padded_to_tiles
    assert not make_drafter(tiny_qwen3, block_size=10).layers[0].self_attn.is_padded_to_tiles
    for length in (2, 100, 129, 1000):
        batch = draw_blocks(
            collate_rows(make_rows(["0" * 3 + "1" * length, "1" * 7])),
            block_size=block_size,
            mask_token_id=MASK_TOKEN_ID,
            num_anchors=num_anchors,
            anchor_ratio=None,
            seed=0,
            epoch=0,
            packed=True,
        )
        assert batch.slot_ids.shape[1] % 128 == 0 and batch.context_index.shape[1] % 128 == 0
