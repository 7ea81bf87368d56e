# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
How long it takes to plan the batches of the reference set (902,087 rows), and how much of them is padding.

    python benchmarks/plan_batches.py

Beside it, transformers' own sampler by length, at the batch size with the same number of rows a batch.
"""

import time

import numpy as np
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_dflash.data.batching import TokenBudgetBatchSampler


NUM_ROWS, MEAN_LENGTH, MAX_LENGTH, TOKEN_BUDGET = 902_087, 2073, 4096, 8192


def main() -> None:
    draws = np.random.default_rng(0).lognormal(np.log(1900), 0.6, NUM_ROWS)
    lengths = np.clip(draws * (MEAN_LENGTH / np.clip(draws, 32, MAX_LENGTH).mean()), 32, MAX_LENGTH).astype(int)

    start = time.perf_counter()
    sampler = TokenBudgetBatchSampler(lengths, TOKEN_BUDGET, world_size=2, gradient_accumulation_steps=4)
    sampler.set_epoch(1)
    sampler.global_batch(0)
    plan = time.perf_counter() - start
    start = time.perf_counter()
    sampler.set_start(len(sampler) - 1)
    next(iter(sampler))
    skip = time.perf_counter() - start
    print(
        f"{NUM_ROWS:,} rows of {lengths.mean():.0f} tokens, budget {TOKEN_BUDGET}: {sampler.num_batches:,} micro-batches"
    )
    print(
        f"ours: planned in {plan:.2f} s, last micro-batch found in {skip * 1e6:.0f} us, padding {sampler.padding_share:.4%}"
    )

    rows_per_batch = round(NUM_ROWS / sampler.num_batches)
    start = time.perf_counter()
    batches = list(BatchSampler(LengthGroupedSampler(rows_per_batch, lengths=lengths.tolist()), rows_per_batch, False))
    theirs = time.perf_counter() - start
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    largest = max(len(batch) * int(lengths[batch].max()) for batch in batches)
    print(
        f"LengthGroupedSampler, {rows_per_batch} rows a batch: planned in {theirs:.2f} s, "
        f"padding {1 - lengths.sum() / padded:.4%}, largest batch {largest} tokens"
    )
    print(f"ratio: {theirs / plan:.1f} times as fast")


if __name__ == "__main__":
    main()
