# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The blocks of a micro-batch: all that can be decided on the host before the target and the drafter run.

Everything here is integer work on the CPU: anchors, supervised slots, where labels are taken, how documents are laid out
for the drafter. So the denominator of an optimizer step is known before its first forward pass, and no device ever waits
for the host to count something.

Two layouts: *packed*, one row with all documents behind one another, for flex attention; and one row for each document, for
dense masks, where packing would compute attention between documents only to mask it away.

Shapes: D documents, L longest, T tokens of all; R rows, C context positions, A anchors of a row, B slots; N = R * A blocks;
S supervised slots, P label positions.
"""

import functools
from dataclasses import dataclass, fields, replace

import torch

from ..drafter.blocks import find_eligible_anchors, find_supervised_slots, pad_to_bucket, select_anchors
from ..drafter.losses import position_weights
from ..target.frozen_target import upload


# Smallest padded widths of the packed layout; flex attention works on tiles of 128.
_CONTEXT_BUCKET = 128
_ANCHOR_BUCKET = 16


@dataclass
class PackedDocuments:
    """
    The documents of a micro-batch behind one another.

    Args:
        token_ids, loss_mask, document_ids, row_ids (`torch.Tensor` of shape `[T]`):
            Token, supervision, index of the document in the micro-batch, dataset row of the document.
        starts (`torch.Tensor` of shape `[D]`):
            Where each document begins.
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    row_ids: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def from_rows(cls, rows: dict[str, torch.Tensor]) -> "PackedDocuments":
        """Drops the padding of what [`collate_rows`] made."""
        lengths = rows["lengths"]
        real = torch.arange(rows["input_ids"].shape[1])[None] < lengths[:, None]
        document_ids = torch.arange(len(lengths)).repeat_interleave(lengths)
        return cls(
            token_ids=rows["input_ids"][real],
            loss_mask=rows["loss_mask"][real],
            document_ids=document_ids,
            row_ids=rows["row_ids"][document_ids],
            starts=lengths.cumsum(0) - lengths,
        )

    def all_anchors(self) -> torch.Tensor:
        """Every position that may start a block, for evaluation."""
        return find_eligible_anchors(self.loss_mask, self.document_ids).nonzero().squeeze(1)

    def label_positions(self) -> torch.Tensor:
        """Every position whose next token is supervised and of the same document, for evaluation."""
        wanted = torch.zeros_like(self.loss_mask)
        wanted[:-1] = self.loss_mask[1:] & (self.document_ids[1:] == self.document_ids[:-1])
        return wanted.nonzero().squeeze(1)


@dataclass
class BlockBatch:
    """
    A micro-batch as target and drafter take it. The first four stay on the host, for the target; so does the last.

    Args:
        input_ids (`[D, L]`), lengths (`[D]`), row_ids (`[D]`): right-padded documents, and which of the dataset they are.
        label_positions (`[P]`): packed positions at which the target's prediction is asked.
        context_index (`[R, C]`): packed position of each context position (0 on padding).
        document_ids (`[R, C]`): document of each context position, -1 on padding.
        position_ids (`[R, C + A * B]`): position in the document, of context and slots.
        slot_ids (`[R, A * B]`): anchor tokens and mask tokens.
        anchors (`[R, A]`), valid (`[R, A]`): position of each anchor in its row; padding blocks are not valid.
        anchor_positions (`[N]`): packed position of each anchor.
        supervised (`[N, B - 1]`): slots that have a label.
        slot_indices (`[S]`): the same as flat indices.
        label_index (`[N, B - 1]`): index into `label_positions` of each slot's label (0 where unsupervised).
        data_labels (`[N, B - 1]`): the data's own token at each slot (0 where unsupervised).
        num_blocks (`int`): blocks that are valid.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    row_ids: torch.Tensor
    label_positions: torch.Tensor
    context_index: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    slot_ids: torch.Tensor
    anchors: torch.Tensor
    valid: torch.Tensor
    anchor_positions: torch.Tensor
    supervised: torch.Tensor
    slot_indices: torch.Tensor
    label_index: torch.Tensor
    data_labels: torch.Tensor
    num_blocks: int

    _ON_THE_HOST = ("input_ids", "lengths", "row_ids", "label_positions", "num_blocks")

    @property
    def block_size(self) -> int:
        return self.supervised.shape[1] + 1

    @property
    def num_tokens(self) -> int:
        """Real tokens of the micro-batch."""
        return int(self.lengths.sum())

    def denominator(self, weighting: str, gamma: float) -> float:
        """This micro-batch's share of what the loss of its optimizer step is divided by."""
        if weighting == "dpace":
            return float(self.supervised.sum())
        counts = self.supervised.sum(0).double()
        return float((counts * position_weights(self.block_size, gamma, dtype=torch.float64)).sum())

    def to(self, device: torch.device) -> "BlockBatch":
        """Moves the drafter's part; the host does not wait for a GPU."""
        names = [field.name for field in fields(self) if field.name not in self._ON_THE_HOST]
        return replace(self, **{name: upload(getattr(self, name), device) for name in names})


def _in_one_thread(function):
    """Many operations on small tensors: handing pieces to other threads takes several times as long as the work itself."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run


@_in_one_thread
def draw_blocks(
    rows: dict[str, torch.Tensor],
    *,
    block_size: int,
    mask_token_id: int,
    num_anchors: int,
    anchor_ratio: float | None,
    seed: int,
    epoch: int,
    packed: bool,
) -> BlockBatch:
    """Draws the anchors of a micro-batch for training and lays its blocks out.

    Args:
        rows (`dict[str, torch.Tensor]`): of [`collate_rows`]; may hold no row, then one padding block stands alone, so that
            every rank has something to run backward through.
        block_size (`int`), mask_token_id (`int`): of the drafter.
        num_anchors (`int`), anchor_ratio (`float`, *optional*), seed (`int`), epoch (`int`): see [`select_anchors`].
        packed (`bool`): the layout.
    """
    documents = PackedDocuments.from_rows(rows)
    anchors, valid = select_anchors(
        documents.loss_mask,
        num_anchors,
        block_size,
        document_ids=documents.document_ids,
        document_keys=documents.row_ids,
        anchor_ratio=anchor_ratio,
        seed=seed,
        epoch=epoch,
    )
    return lay_out_blocks(
        rows, documents, anchors[valid], block_size=block_size, mask_token_id=mask_token_id, packed=packed
    )


@_in_one_thread
def lay_out_blocks(
    rows: dict[str, torch.Tensor],
    documents: PackedDocuments,
    anchor_positions: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    packed: bool,
    label_positions: torch.Tensor | None = None,
) -> BlockBatch:
    """Lays out blocks at given anchors.

    Args:
        rows (`dict[str, torch.Tensor]`), documents ([`PackedDocuments`]): the micro-batch, padded and packed.
        anchor_positions (`torch.Tensor` of shape `[M]`): packed positions, sorted.
        block_size (`int`), mask_token_id (`int`), packed (`bool`): see [`draw_blocks`].
        label_positions (`torch.Tensor` of shape `[P]`, *optional*): sorted packed positions that cover every label; by default
            exactly those that these blocks need, each once however many blocks cover it.
    """
    num_documents, num_tokens = len(documents.starts), len(documents.token_ids)
    drafts = block_size - 1

    # 1. Which row and column each document and each block takes.
    document_of_block = documents.document_ids[anchor_positions]
    if packed or num_documents == 0:
        num_rows, context_length = 1, pad_to_bucket(num_tokens, _CONTEXT_BUCKET) if packed else max(1, num_tokens)
        row_of_document = torch.zeros(num_documents, dtype=torch.long)
        row_starts = torch.zeros(1, dtype=torch.long)
        column = torch.arange(len(anchor_positions))
        width = pad_to_bucket(max(1, len(column)), _ANCHOR_BUCKET) if packed else 1
    else:
        num_rows, context_length = num_documents, int(rows["lengths"].max())
        row_of_document = torch.arange(num_documents)
        row_starts = documents.starts
        blocks_of_document = torch.bincount(document_of_block, minlength=num_documents)
        column = (
            torch.arange(len(anchor_positions))
            - (blocks_of_document.cumsum(0) - blocks_of_document)[document_of_block]
        )
        width = max(1, int(blocks_of_document.max()))
    row_of_block = row_of_document[document_of_block]
    block = row_of_block * width + column
    num_blocks = num_rows * width

    # 2. The context.
    token_positions = torch.arange(num_tokens) - documents.starts[documents.document_ids]
    row_of_token = row_of_document[documents.document_ids]
    column_of_token = torch.arange(num_tokens) - row_starts[row_of_token]
    context_index = torch.zeros(num_rows, context_length, dtype=torch.long)
    document_ids = torch.full((num_rows, context_length), -1, dtype=torch.long)
    context_positions = torch.zeros(num_rows, context_length, dtype=torch.long)
    context_index[row_of_token, column_of_token] = torch.arange(num_tokens)
    document_ids[row_of_token, column_of_token] = documents.document_ids
    context_positions[row_of_token, column_of_token] = token_positions

    # 3. The slots.
    anchors = torch.zeros(num_blocks, dtype=torch.long)
    valid = torch.zeros(num_blocks, dtype=torch.bool)
    packed_anchors = torch.zeros(num_blocks, dtype=torch.long)
    slot_ids = torch.full((num_blocks, block_size), mask_token_id, dtype=torch.long)
    first_positions = torch.zeros(num_blocks, dtype=torch.long)
    anchors[block] = column_of_token[anchor_positions]
    valid[block] = True
    packed_anchors[block] = anchor_positions
    slot_ids[block, 0] = documents.token_ids[anchor_positions]
    first_positions[block] = token_positions[anchor_positions]
    slot_positions = first_positions[:, None] + torch.arange(block_size)

    # 4. The labels: slot k is what the target predicts at a + k - 1, which is the data's token a + k if it wrote the data.
    supervised = torch.zeros(num_blocks, drafts, dtype=torch.bool)
    if len(anchor_positions):
        everywhere = torch.ones_like(anchor_positions, dtype=torch.bool)
        supervised[block] = find_supervised_slots(
            documents.loss_mask, anchor_positions, everywhere, block_size, documents.document_ids
        )
    slot_indices = supervised.flatten().nonzero().squeeze(1)
    predicted_from = (packed_anchors[:, None] + torch.arange(drafts)).flatten()[slot_indices]
    if label_positions is None:
        label_positions = predicted_from.unique()
    label_index = torch.zeros(num_blocks * drafts, dtype=torch.long)
    label_index[slot_indices] = torch.searchsorted(label_positions, predicted_from)
    data_labels = torch.zeros(num_blocks * drafts, dtype=torch.long)
    data_labels[slot_indices] = documents.token_ids[predicted_from + 1]

    return BlockBatch(
        input_ids=rows["input_ids"],
        lengths=rows["lengths"],
        row_ids=rows["row_ids"],
        label_positions=label_positions,
        context_index=context_index,
        document_ids=document_ids,
        position_ids=torch.cat([context_positions, slot_positions.view(num_rows, -1)], dim=1),
        slot_ids=slot_ids.view(num_rows, -1),
        anchors=anchors.view(num_rows, width),
        valid=valid.view(num_rows, width),
        anchor_positions=packed_anchors,
        supervised=supervised,
        slot_indices=slot_indices,
        label_index=label_index.view(num_blocks, drafts),
        data_labels=data_labels.view(num_blocks, drafts),
        num_blocks=len(anchor_positions),
    )
