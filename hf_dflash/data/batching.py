# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Batches for the target: rows x longest row under a token budget, the same micro-batches whatever the number of processes.

The list of micro-batches of an epoch depends on (lengths, token budget, seed, epoch) only. Boundaries come
from the sorted lengths, so the number of micro-batches is the same in every epoch and padding is as small as sorting can
make it; rows of equal length trade places and the order of the micro-batches is shuffled from epoch to epoch.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """
    Yields lists of row indices, each list one micro-batch of this process.

    With W processes and GA accumulation steps, micro-batch `s * W * GA + m * W + r` of the epoch's list is micro-step m of
    rank r in optimizer step s. So runs with the same W * GA see the same optimizer steps. The list is filled up with empty
    micro-batches (`[]`) to a multiple of W * GA: every rank takes the same number of micro-batches, no row is repeated or
    lost. A row longer than the budget is a micro-batch of its own.

    There is no `batch_size` attribute on purpose: Accelerate and `Trainer` must not take the micro-batches for equal ones.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each row.
        token_budget (`int`):
            Largest rows x longest row of a micro-batch, in tokens.
        seed (`int`, *optional*, defaults to 0):
            Seed of the order.
        rank (`int`, *optional*, defaults to 0):
            This process.
        world_size (`int`, *optional*, defaults to 1):
            Number of processes, W.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            Micro-batches of a process in an optimizer step, GA.
        shuffle (`bool`, *optional*, defaults to `True`):
            If `False`, every epoch has the same micro-batches, longest first (a target that runs out of memory does so
            at once).
        max_length (`int`, *optional*):
            The longest row the caller is prepared for. A longer one is an error that names it.

    Raises:
        `ValueError`: no rows, an empty row, a row longer than `max_length`, or arguments out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        token_budget: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        gradient_accumulation_steps: int = 1,
        shuffle: bool = True,
        max_length: int | None = None,
    ):
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.ndim != 1 or lengths.size == 0:
            raise ValueError("There are no rows to batch: `lengths` is empty.")
        if lengths.min() < 1:
            raise ValueError(f"Row {lengths.argmin()} has no tokens.")
        if max_length is not None and lengths.max() > max_length:
            raise ValueError(
                f"Row {lengths.argmax()} has {lengths.max()} tokens, more than max_length={max_length}: tokenize with a "
                "smaller --max-length or raise max_length."
            )
        if token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, not {token_budget}.")
        if world_size < 1 or gradient_accumulation_steps < 1:
            raise ValueError("world_size and gradient_accumulation_steps must be at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank}.")

        self.lengths = lengths
        self.token_budget = token_budget
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.shuffle = shuffle
        self.epoch = 0
        self._start = 0
        self._order_of_epoch: tuple[int, np.ndarray, np.ndarray] | None = None

        descending = np.sort(lengths)[::-1]
        starts = []
        row = 0
        while row < len(descending):
            starts.append(row)
            row += max(1, token_budget // int(descending[row]))
        # Micro-batch i holds the rows at places bounds[i] .. bounds[i + 1] - 1 of the rows sorted by falling length.
        self._bounds = np.array([*starts, len(descending)], dtype=np.int64)
        self._padded_tokens = int((np.diff(self._bounds) * descending[self._bounds[:-1]]).sum())

    @property
    def num_batches(self) -> int:
        """Micro-batches of an epoch that hold rows, over all ranks."""
        return len(self._bounds) - 1

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.num_batches // (self.world_size * self.gradient_accumulation_steps))

    @property
    def padding_share(self) -> float:
        """Share of the target's positions that are padding, the same in every epoch."""
        return 1.0 - int(self.lengths.sum()) / self._padded_tokens

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch, empty ones included: the same for every rank and epoch."""
        return self.num_steps * self.gradient_accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self.epoch = epoch

    def set_start(self, micro_batch: int) -> None:
        """
        Makes the next iteration (only that one) start at this micro-batch of this rank, without touching those before.

        Optimizer step s starts at micro-batch `s * gradient_accumulation_steps`.
        """
        if not 0 <= micro_batch <= len(self):
            raise ValueError(f"micro_batch must be from 0 to {len(self)}, not {micro_batch}.")
        self._start = micro_batch

    def global_batch(self, index: int) -> list[int]:
        """Rows of micro-batch `index` of the current epoch's list over all ranks; `[]` behind the end of the rows."""
        rows, order = self._order()
        if index >= len(order):
            return []
        batch = order[index]
        return rows[self._bounds[batch] : self._bounds[batch + 1]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        start, self._start = self._start, 0
        for index in range(start, len(self)):
            yield self.global_batch(index * self.world_size + self.rank)

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows sorted by falling length, and the order in which their micro-batches come, in the current epoch."""
        if self._order_of_epoch is None or self._order_of_epoch[0] != self.epoch:
            if self.shuffle:
                # Keys from an integer hash: NumPy may change the streams of its generators from release to release,
                # and a resumed run must go on with the same order.
                ties = _hash(self.seed, self.epoch, 0, len(self.lengths))
                order = np.argsort(_hash(self.seed, self.epoch, 1, self.num_batches), kind="stable")
            else:
                ties = np.arange(len(self.lengths))
                order = np.arange(self.num_batches)
            self._order_of_epoch = (self.epoch, np.lexsort((ties, -self.lengths)), order)
        return self._order_of_epoch[1:]


class TokenBudgetDataLoader(DataLoader):
    """
    A `DataLoader` over a [`TokenBudgetBatchSampler`] that `Trainer` tells the epoch, and that resumes in O(1).

    `Trainer` calls `set_epoch` on a loader that has it, and resumes through Accelerate's `skip_first_batches`, which asks
    the batch sampler for all micro-batches and throws the first ones away. That is right with this loader too (only row
    numbers are thrown away, nothing is read); [`TokenBudgetBatchSampler.set_start`] is the direct way.
    Not to be passed to `Accelerator.prepare`: the sampler has dealt the micro-batches to the ranks already.

    Args:
        dataset (`datasets.Dataset`):
            Rows with `input_ids`, `loss_mask` and `row_id`.
        batch_sampler ([`TokenBudgetBatchSampler`]):
            The micro-batches of this rank.
        collate_fn (`Callable`, *optional*, defaults to [`collate_rows`]):
            Makes a batch of a list of rows, which may be empty.
        kwargs:
            Further arguments of `DataLoader` (workers, pinned memory ...).
    """

    def __init__(self, dataset, batch_sampler: TokenBudgetBatchSampler, collate_fn=None, **kwargs):
        super().__init__(dataset, batch_sampler=batch_sampler, collate_fn=collate_fn or collate_rows, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


def collate_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    Pads rows on the right into one batch, in the order in which they come.

    Args:
        rows (`list[dict]`):
            Rows with `input_ids`, `loss_mask` (lists, arrays or tensors of one length) and `row_id` (`int`). May be empty.

    Returns:
        `dict[str, torch.Tensor]`: for R rows, L tokens in the longest:
        `input_ids` [R, L] int64 padded with 0, `loss_mask` [R, L] bool padded with `False`, `lengths` [R] int64,
        `row_ids` [R] int64. No rows give R = L = 0.

    Raises:
        `ValueError`: naming the row whose columns do not fit each other.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    shape = (len(rows), max(lengths, default=0))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=bool)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        input_ids[index, :length] = row["input_ids"]
        loss_mask[index, :length] = _check_row(row, length)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "loss_mask": torch.from_numpy(loss_mask),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "row_ids": torch.tensor([int(row["row_id"]) for row in rows], dtype=torch.int64),
    }


def _check_row(row: dict, length: int) -> np.ndarray:
    """The loss mask of a row. Whatever NumPy would stretch, or take for true, would train other tokens than were meant."""
    mask = np.asarray(row["loss_mask"])
    if mask.shape != (length,) or int(row.get("length", length)) != length:
        raise ValueError(
            f"The row with `row_id` {int(row['row_id'])} has {length} `input_ids`, {mask.size} values in `loss_mask`, and "
            f"`length` {row.get('length')}: they must be equal."
        )
    if mask.dtype != bool and not np.isin(mask, (0, 1)).all():
        raise ValueError(f"`loss_mask` of the row with `row_id` {int(row['row_id'])} holds other values than 0 and 1.")
    return mask


def _hash(seed: int, epoch: int, stream: int, count: int) -> np.ndarray:
    """A random-looking uint64 for each of 0 .. count-1: splitmix64 of a counter, keyed by the other arguments."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, stream):
        key = _mix(key ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return _mix(np.arange(count, dtype=np.uint64) ^ key)


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
