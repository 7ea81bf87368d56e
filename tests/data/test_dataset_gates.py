# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import datasets
import numpy as np
import pytest

from hf_dflash.data.dataset_gates import DatasetGates, DatasetRefused, run_gates


def dataset_of(replies, prompt_length=10):
    """A dataset that was made elsewhere: tokens and masks only."""
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[1] * prompt_length + list(reply) for reply in replies],
            "loss_mask": [[False] * prompt_length + [True] * len(reply) for reply in replies],
        }
    )


def replies(count, length=20, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, (count, length)).tolist()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        # 2 of 100 are short: 2%.
        (replies(98) + [[1, 2]] * 1 + [[3, 4]], {}, r"2 of 100 rows \(2\.0%\) have fewer than 16 supervised tokens"),
        (replies(98) + [[7] * 20] * 2, {}, r"one and the same reply is in 2 of 100 rows \(2\.0%\)"),
        (replies(100), {"min_supervised_share": 0.7}, r"66\.7% of 3,000 tokens are supervised; limit 70\.0%"),
        (replies(100, length=15), {}, "100 of 100 rows"),
        ([[]] * 3, {}, "nothing is supervised: 3 rows, 30 tokens"),
        (replies(1, length=3), {}, r"1 of 1 rows \(100\.0%\)"),
    ],
)
def test_a_failed_gate_stops_with_the_numbers_and_the_option(rows, options, message):
    with pytest.raises(DatasetRefused, match=message):
        run_gates(dataset_of(rows), gates=DatasetGates(**options))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (replies(100), {}),
        (replies(99) + [[1, 2]], {}),  # exactly 1%
        (replies(98) + [[7] * 20] * 2, {"max_reply_share": 0.02}),
        (replies(98) + [[1, 2], [3, 4]], {"max_short_share": 0.02}),
        (replies(10) + [[1, 2]], {}),  # a single row refuses nothing
        (replies(100, length=15), {"block_size": 8}),
    ],
)
def test_a_dataset_within_the_limits_passes(rows, options):
    results = run_gates(dataset_of(rows), gates=DatasetGates(**options))
    assert len(results) == 4 and all(result.passed for result in results)


def test_the_drafters_block_size_goes_before_the_gates():
    dataset = dataset_of(replies(100, length=12))
    run_gates(dataset, block_size=12)
    with pytest.raises(DatasetRefused, match="fewer than 13 supervised"):
        run_gates(dataset, block_size=13)


def test_a_dataset_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="no column loss_mask"):
        run_gates(datasets.Dataset.from_dict({"input_ids": [[1, 2]]}))
    with pytest.raises(ValueError, match="Row 0 has 2 input_ids but 1 values in loss_mask"):
        run_gates(datasets.Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": [[1]]}))
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        run_gates("no/such/folder")
