# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Blocks: where they start, what their slots see, which of their slots are supervised.

A block at anchor a has B slots at positions a .. a + B - 1. Slot 0 holds token a, the others the mask token; slot k
predicts token a + k. A slot sees the target features of its own document at positions before a, and its own block.
No slot ever sees target features at or after its anchor: that leak gives a perfect loss and no acceptance.

Shapes: R rows, C context positions of a row, A anchors of a row, B slots of a block, Q = A * B slots of a row.
A row holds one document (dense masks) or several behind one another (flex attention); `document_ids` tells them apart
and is -1 on padding. Positions count from the start of the row here, so within a document differences are right.
"""

from collections.abc import Callable

import torch


# Multipliers of the splitmix64 finalizer, as signed 64-bit integers: torch has no unsigned arithmetic, and products
# wrap around alike on CPU and CUDA.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def anchor_hash(seed: int, epoch: int, document_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A counter-based hash of (seed, epoch, document, position): the same anchors on every device, rank and batch.

    Args:
        seed (`int`), epoch (`int`): of the run.
        document_keys (`torch.Tensor` of int64): the dataset row of each position.
        positions (`torch.Tensor` of int64): position inside the document.

    Returns:
        `torch.Tensor` of int64, non-negative, in the shape of `positions`.
    """
    x = torch.full_like(positions, seed) * _GOLDEN
    for part in (torch.full_like(positions, epoch), document_keys, positions):
        x = _mix(x + (part + 1) * _GOLDEN)
    return _shift_right(x, 1)


def find_eligible_anchors(loss_mask: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Positions that may start a block: supervised, with a supervised next token in the same document.

    Args:
        loss_mask (`torch.Tensor` of shape `[C]`, bool or integer): 1 on supervised tokens.
        document_ids (`torch.Tensor` of shape `[C]`, *optional*): the document of each position, -1 on padding.

    Returns:
        `torch.Tensor` of shape `[C]`, bool.
    """
    supervised = loss_mask.bool()
    if document_ids is not None:
        supervised = supervised & (document_ids >= 0)
    eligible = torch.zeros_like(supervised)
    eligible[:-1] = supervised[:-1] & supervised[1:]
    if document_ids is not None:
        eligible[:-1] &= document_ids[:-1] == document_ids[1:]
    return eligible


def select_anchors(
    loss_mask: torch.Tensor,
    num_anchors: int,
    block_size: int,
    *,
    document_ids: torch.Tensor | None = None,
    document_keys: torch.Tensor | None = None,
    anchor_ratio: float | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the anchors of the documents of one row.

    Each document gets min(`num_anchors`, eligible, ceil(`anchor_ratio` * supervised)) anchors: the eligible positions
    with the smallest [`anchor_hash`]. They depend on the document, the seed and the epoch alone.

    Args:
        loss_mask (`torch.Tensor` of shape `[C]`, bool or integer): 1 on supervised tokens.
        num_anchors (`int`): the most anchors of a document (the paper's 512).
        block_size (`int`): B. Blocks may run past the end of the supervised span, so it does not limit the choice.
        document_ids (`torch.Tensor` of shape `[C]`, *optional*): document of each position, non-decreasing, -1 on padding
            behind the last one; one document by default.
        document_keys (`torch.Tensor` of shape `[C]`, *optional*): a stable key of each position's document (its dataset
            row); `document_ids` by default.
        anchor_ratio (`float`, *optional*): rho, anchors per supervised token; no such limit by default.
        seed (`int`, *optional*, defaults to 0), epoch (`int`, *optional*, defaults to 0): of the run.

    Returns:
        `(anchors, valid)`: int64 and bool tensors of shape `[A]`, sorted positions in the row. A is the number of anchors
        drawn, but at least 1: where nothing can be drawn a single invalid anchor stands at position 0.

    Raises:
        `ValueError`: if `num_anchors` or `block_size` is too small, or the ratio is not positive.
    """
    if num_anchors < 1 or block_size < 2:
        raise ValueError(
            f"`num_anchors` ({num_anchors}) must be at least 1 and `block_size` ({block_size}) at least 2."
        )
    if anchor_ratio is not None and anchor_ratio <= 0:
        raise ValueError(f"`anchor_ratio` is {anchor_ratio}: it must be positive, or None for no limit.")
    device = loss_mask.device
    if document_ids is None:
        document_ids = torch.zeros(loss_mask.shape[0], dtype=torch.long, device=device)
    if document_keys is None:
        document_keys = document_ids

    eligible = find_eligible_anchors(loss_mask, document_ids)
    num_documents = int(document_ids.max()) + 1 if document_ids.numel() else 0
    if num_documents == 0:
        return torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.bool, device=device)

    # Padding joins a bin of its own, behind all documents.
    bins = torch.where(document_ids >= 0, document_ids, num_documents)
    count = num_documents + 1
    lengths = torch.bincount(bins, minlength=count)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(loss_mask.shape[0], device=device)

    supervised = torch.zeros(count, dtype=torch.long, device=device)
    supervised.index_add_(0, bins, loss_mask.bool().long())
    # A larger number is no limit, and may be none that a tensor holds.
    num_anchors = min(num_anchors, loss_mask.shape[0])
    wanted = torch.full((count,), num_anchors, dtype=torch.long, device=device)
    if anchor_ratio is not None:
        # Before it is an integer: a large ratio would overflow to a negative number.
        wanted = (supervised.double() * anchor_ratio).ceil().clamp(max=num_anchors).long()

    hashes = anchor_hash(seed, epoch, document_keys.long(), positions - starts[bins])
    hashes = torch.where(eligible, hashes, torch.iinfo(torch.int64).max)
    # Two stable sorts order the positions by document and, inside it, by hash.
    order = hashes.argsort(stable=True)
    order = order[bins[order].argsort(stable=True)]
    rank = torch.empty_like(positions)
    rank[order] = positions - starts[bins[order]]

    anchors = (eligible & (rank < wanted[bins])).nonzero().squeeze(1)
    if anchors.numel() == 0:
        return torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    return anchors, torch.ones_like(anchors, dtype=torch.bool)


def find_supervised_slots(
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which slots 1 .. B - 1 have a label: slot k iff every token a + 1 .. a + k is supervised and of a's document.

    Supervision stops at the first unsupervised token and does not resume in a later turn.

    Args:
        loss_mask (`torch.Tensor` of shape `[C]`), anchors and valid (of shape `[A]`), block_size (`int`),
        document_ids (`torch.Tensor` of shape `[C]`, *optional*): as in [`select_anchors`].

    Returns:
        `torch.Tensor` of shape `[A, B - 1]`, bool.
    """
    length = loss_mask.shape[0]
    tokens = anchors[:, None] + torch.arange(1, block_size, device=anchors.device)
    inside = tokens < length
    tokens = tokens.clamp(max=length - 1)
    supervised = loss_mask.bool()[tokens] & inside & valid[:, None]
    if document_ids is not None:
        supervised &= document_ids[tokens] == document_ids[anchors][:, None]
    return supervised.long().cumprod(dim=1).bool()


def pad_to_bucket(count: int, smallest: int) -> int:
    """The width that `count` is padded to: eight sizes between one power of two and the next.

    Few distinct widths keep compiled code from being compiled anew; from 8 * `smallest` on, at most an eighth is padding.

    Args:
        count (`int`): what must fit.
        smallest (`int`): the smallest width, a power of two; every width is a multiple of it.
    """
    width = smallest
    while width < count:
        step = max(smallest, 2 ** ((width).bit_length() - 1) // 8)
        width += step - width % step
    return width


def create_anchor_block_mask_mod(
    document_ids: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> tuple[Callable, int, int]:
    """The rule of who sees whom, in the form that flex attention and [`create_dense_mask`] share.

    Keys 0 .. C - 1 are the context, keys C .. C + Q - 1 the slots themselves.

    Args:
        document_ids (`torch.Tensor` of shape `[C]` or `[R, C]`): document of each context position, never less than the one
            before it; -1 on padding, which is at the end.
        anchors (`torch.Tensor` of shape `[A]` or `[R, A]`): position of each block's anchor in its row.
        valid (`torch.Tensor` of shape `[A]` or `[R, A]`, bool): `False` on padding blocks, which see themselves only.
        block_size (`int`): B.
        sliding_window (`int`, *optional*): W: a key is visible iff |position difference| < W.
        is_causal (`bool`, *optional*, defaults to `False`): whether a slot sees only itself and earlier slots of its block.

    Returns:
        `(mask_mod, q_len, kv_len)` with `mask_mod(row, head, query, key) -> bool` of integer tensors.
    """
    document_ids, anchors, valid = (x[None] if x.dim() == 1 else x for x in (document_ids, anchors, valid))
    rows, context_length = document_ids.shape
    q_len = anchors.shape[1] * block_size
    slots = torch.arange(block_size, device=anchors.device)

    # What a slot sees are two ranges of keys. Flex attention evaluates the rule for every pair of a tile: two pairs of bounds,
    # looked up once for a slot, are much less than looking up documents and anchors for each key.
    first = _first_visible(document_ids, anchors, valid, sliding_window)[..., None]
    context_end = torch.where(valid, anchors, 0)[..., None].expand(-1, -1, block_size)
    own_start = context_length + torch.arange(anchors.shape[1], device=anchors.device)[:, None] * block_size
    own_first, own_end = own_start.expand(-1, block_size), own_start + (slots + 1 if is_causal else block_size)
    if sliding_window is not None:
        first = torch.maximum(first, anchors[..., None] + slots - sliding_window + 1)
        own_first = torch.maximum(own_first, own_start + slots - sliding_window + 1)
        own_end = torch.minimum(own_end, own_start + slots + sliding_window)
    context_first = first.expand(-1, -1, block_size).reshape(rows, q_len).int()
    context_end = context_end.reshape(rows, q_len).int()
    own_first, own_end = own_first.reshape(q_len).int(), own_end.expand(-1, block_size).reshape(q_len).int()
    # As a tensor, not as a number: compiled flex attention would be compiled anew for every other number.
    last = torch.full((), q_len - 1, device=anchors.device)

    def mask_mod(row, head, query, key):
        # Flex attention asks about whole tiles, so indices can run past the end.
        query = torch.minimum(query, last)
        sees_context = (key >= context_first[row, query]) & (key < context_end[row, query])
        return sees_context | ((key >= own_first[query]) & (key < own_end[query]))

    return mask_mod, q_len, context_length + q_len


def _first_visible(document_ids, anchors, valid, sliding_window: int | None) -> torch.Tensor:
    """`[R, A]`: the first context position that some slot of a block sees. Padding blocks get 0."""
    # Padding behind any document, whatever its number: a row of the dense layout holds one of many.
    documents = document_ids.masked_fill(document_ids < 0, torch.iinfo(document_ids.dtype).max)
    first = torch.searchsorted(documents, documents.gather(1, anchors))
    if sliding_window is not None:
        first = torch.maximum(first, anchors - sliding_window + 1)
    return torch.where(valid, first, 0)


def create_dense_mask(
    mask_mod: Callable, rows: int, q_len: int, kv_len: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The additive form of a mask: 0 where a key is visible, the lowest finite value elsewhere.

    Boolean masks are added as 0 and 1 by eager attention (speculators issue 691), hence additive everywhere.

    Args:
        mask_mod (`Callable`), q_len (`int`), kv_len (`int`): from [`create_anchor_block_mask_mod`].
        rows (`int`): R.
        device (`torch.device`), dtype (`torch.dtype`, *optional*, defaults to float32): of the mask.

    Returns:
        `torch.Tensor` of shape `[R, 1, Q, C + Q]`.
    """
    row = torch.arange(rows, device=device)[:, None, None]
    query = torch.arange(q_len, device=device)[None, :, None]
    key = torch.arange(kv_len, device=device)[None, None, :]
    visible = mask_mod(row, None, query, key)
    mask = torch.zeros(rows, 1, q_len, kv_len, device=device, dtype=dtype)
    return mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)


def create_flex_mask(
    document_ids: torch.Tensor,
    anchors: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
):
    """The block-sparse form of a mask, for flex attention.

    Which tiles of 128 x 128 hold visible keys is worked out from the ends of what each block sees: a few small operations.
    `create_block_mask` would evaluate the rule for every pair of slot and key (30 ms and 7 GB in speculators pull request 731).

    Args:
        document_ids, anchors, valid, block_size, sliding_window, is_causal: as in [`create_anchor_block_mask_mod`].

    Returns:
        `torch.nn.attention.flex_attention.BlockMask`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    mask_mod, q_len, kv_len = create_anchor_block_mask_mod(
        document_ids, anchors, valid, block_size, sliding_window=sliding_window, is_causal=is_causal
    )
    document_ids, anchors, valid = (x[None] if x.dim() == 1 else x for x in (document_ids, anchors, valid))
    rows, context_length = document_ids.shape
    device = anchors.device
    tile = 128
    query_tiles, key_tiles = -(-q_len // tile), -(-kv_len // tile)

    # 1. Context keys first .. anchor - 1 are visible to some slot of a block, and all_from .. anchor - 1 to all of its slots.
    first = all_from = _first_visible(document_ids, anchors, valid, sliding_window)
    if sliding_window is not None:
        all_from = torch.maximum(first, anchors + block_size - sliding_window)
    # An anchor without any context before it sees no tile of it.
    ends = torch.where(valid & (first < anchors), anchors, 0)

    # 2. The blocks that a tile of queries touches, and whether each sees some or all keys of a tile of keys.
    tile_starts = torch.arange(key_tiles, device=device) * tile
    tile_ends = (tile_starts + tile).clamp(max=context_length)
    sees_some = (first[..., None] < tile_ends) & (ends[..., None] > tile_starts) & (tile_starts < tile_ends)
    sees_all = (all_from[..., None] <= tile_starts) & (ends[..., None] >= tile_starts + tile)
    blocks_of_tile = _blocks_of_query_tiles(query_tiles, tile, q_len, block_size, device)
    some = sees_some[:, blocks_of_tile].any(dim=2)
    full = (
        sees_all[:, blocks_of_tile].all(dim=2)
        & (torch.arange(query_tiles, device=device) * tile + tile <= q_len)[:, None]
    )

    # 3. The slots of the blocks themselves.
    own_starts = context_length + blocks_of_tile[:, 0] * block_size
    own_ends = context_length + (blocks_of_tile[:, -1] + 1) * block_size
    some = some | ((own_starts[:, None] < tile_starts + tile) & (own_ends[:, None] > tile_starts))

    partial = some & ~full
    return BlockMask.from_kv_blocks(
        *_order_tiles(partial), *_order_tiles(full), BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=(q_len, kv_len)
    )


def _blocks_of_query_tiles(query_tiles: int, tile: int, q_len: int, block_size: int, device) -> torch.Tensor:
    """Indices `[query_tiles, n]` of the blocks in each tile of slots; the last ones repeat where a tile has fewer."""
    starts = torch.arange(query_tiles, device=device) * tile
    ends = (starts + tile).clamp(max=q_len)
    first, last = starts // block_size, (ends - 1) // block_size
    most = (tile - 2) // block_size + 2
    return torch.minimum(first[:, None] + torch.arange(most, device=device), last[:, None])


def _order_tiles(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[R, query tiles, key tiles]` bool -> how many are set in each row, and their indices in front, as flex attention reads."""
    counts = tiles.sum(-1, dtype=torch.int32)
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[:, None].contiguous(), indices[:, None].contiguous()
