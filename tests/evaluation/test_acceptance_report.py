# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest

from hf_dflash.evaluation.acceptance_report import AcceptanceReport, PromptResult


def make_result(acceptance_lengths, domain="a", **fields):
    defaults = {
        "id": "x",
        "num_prompt_tokens": 3,
        "num_new_tokens": 1 + sum(acceptance_lengths),
        "num_target_passes": 1 + len(acceptance_lengths),
        "seconds": 1.0,
    }
    return PromptResult(domain=domain, acceptance_lengths=acceptance_lengths, **{**defaults, **fields})


def test_summary_names_both_means_and_splits_them_by_slot_and_domain():
    report = AcceptanceReport(
        {"block_size": 5},
        [
            make_result([5, 1, 3], plain_seconds=4.0, num_plain_tokens=10, first_difference=-1),
            make_result([2], domain="b", plain_seconds=2.0, num_plain_tokens=3, first_difference=1),
            make_result([], domain="b", plain_seconds=0.5, num_plain_tokens=1, first_difference=-1),
        ],
    )
    summary = report.summary()
    assert summary["acceptance_length_micro"] == 11 / 4
    assert summary["acceptance_length_macro"] == (3 + 2) / 2
    assert summary["acceptance_by_slot"] == [3 / 4, 2 / 4, 1 / 4, 1 / 4]
    assert 1 + sum(summary["acceptance_by_slot"]) == summary["acceptance_length_micro"]
    assert summary["acceptance_histogram"] == [1, 1, 1, 0, 1]
    assert summary["target_passes_per_token"] == (4 + 2 + 1) / (10 + 3 + 1)
    assert summary["speedup"] == pytest.approx((14 / 3) / (14 / 6.5))
    # At that length a block would take exactly the time of as many plain tokens.
    assert summary["break_even_acceptance_length"] == pytest.approx((3 / 4) * (14 / 6.5))
    assert (summary["num_identical"], summary["num_compared"]) == (2, 3)
    assert report.summary("b")["acceptance_length_micro"] == 2
    table = report.to_markdown().splitlines()
    assert [line.split(" | ")[0] for line in table[2:5]] == ["| a", "| b", "| all"]


def test_a_domain_of_any_name_stays_in_its_cell():
    report = AcceptanceReport({"block_size": 5}, [make_result([2], domain="a|b\nc"), make_result([2], domain="d")])
    rows = report.to_markdown().split("\n\n")[0].splitlines()
    assert len(rows) == 2 + 2 + 1 and rows[2].startswith("| a\\|b c | 1 |")
