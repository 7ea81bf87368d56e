# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Gates that refuse a useless dataset.

Somebody once tokenized 914K samples of which 87% were six supervised tokens (an empty reply) and found out weeks later.
So the gates run by themselves, when a dataset is made and again before it is trained on.
"""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..command_line import help_of
from .tokenized_dataset import DatasetStatistics, find_manifest, load_tokenized_dataset, read_statistics


if TYPE_CHECKING:
    from datasets import Dataset


# Rows that never became samples because there was too little to learn in them. They count as short ones, or skipping
# them would hide that the completions are useless.
_SHORT_REASONS = ("empty_reply", "too_few_supervised", "no_assistant_turn")


class DatasetRefused(ValueError):
    """A dataset failed a gate. The message has the numbers, the reason, and the option that moves the limit."""


@dataclass(frozen=True)
class DatasetGates:
    """
    What a useful dataset must fulfil. A share is of the rows, unless it says otherwise.

    Args:
        block_size (`int`, *optional*, defaults to 16):
            Slots of a block. A row with fewer supervised tokens is a short one.
        max_short_share (`float`, *optional*, defaults to 0.01):
            Largest share of short rows. Turns that were skipped as empty or too short count.
        max_reply_share (`float`, *optional*, defaults to 0.01):
            Largest share of rows with one and the same reply. A reply that is there once only is never too frequent.
        min_supervised_share (`float`, *optional*, defaults to 0.05):
            Smallest share of the tokens that are supervised.
    """

    block_size: int = field(
        default=16, metadata={"help": "A sample with fewer supervised tokens than this is a short one."}
    )
    max_short_share: float = field(
        default=0.01, metadata={"help": "Largest share of samples with fewer supervised tokens than a block."}
    )
    max_reply_share: float = field(
        default=0.01, metadata={"help": "Largest share of samples with one and the same reply."}
    )
    min_supervised_share: float = field(
        default=0.05, metadata={"help": "Smallest share of tokens that are supervised."}
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the gates to a command's options."""
        group = parser.add_argument_group("gates (what a dataset must fulfil)")
        for gate in fields(DatasetGates):
            name = "--" + gate.name.replace("_", "-")
            group.add_argument(name, type=gate.type, default=gate.default, help=help_of(gate))

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "DatasetGates":
        return cls(**{gate.name: getattr(arguments, gate.name) for gate in fields(cls)})


@dataclass(frozen=True)
class GateResult:
    """One gate: its name, whether it passed, and the numbers as a sentence."""

    name: str
    passed: bool
    message: str


def run_gates(
    dataset: "Dataset | str | Path",
    *,
    gates: DatasetGates = DatasetGates(),  # noqa: B008 (frozen)
    block_size: int | None = None,
    manifest: dict | None = None,
) -> list[GateResult]:
    """
    Refuses a dataset that is not worth training on.

    Args:
        dataset (`datasets.Dataset`, `str` or `Path`):
            Rows with `input_ids` and `loss_mask`. The columns `length`, `num_supervised` and `reply_hash`, if there are,
            save reading the tokens.
        gates ([`DatasetGates`], *optional*):
            The limits.
        block_size (`int`, *optional*):
            The drafter's block size, in place of the one in `gates`.
        manifest (`dict`, *optional*):
            The manifest of the dataset, for the rows that were skipped. By default the one beside the dataset's files.

    Returns:
        `list[GateResult]`: the gates, all of them passed.

    Raises:
        [`DatasetRefused`]: a gate failed.
    """
    if block_size is not None:
        gates = DatasetGates(
            **{**{gate.name: getattr(gates, gate.name) for gate in fields(gates)}, "block_size": block_size}
        )
    if not hasattr(dataset, "column_names"):
        dataset = load_tokenized_dataset(dataset)
    manifest = manifest if manifest is not None else find_manifest(dataset)
    results = judge(read_statistics(dataset), gates, manifest)
    failed = [result for result in results if not result.passed]
    if failed:
        raise DatasetRefused(
            "The dataset is refused:\n  "
            + "\n  ".join(result.message for result in failed)
            + "\nLook at it with `hf-dflash check`. If it is right as it is, move the limit."
        )
    return results


def judge(statistics: DatasetStatistics, gates: DatasetGates, manifest: dict | None) -> list[GateResult]:
    """Holds the statistics of a dataset against the gates."""
    num_rows = len(statistics.length)
    tokens, supervised = int(statistics.length.sum()), int(statistics.num_supervised.sum())
    if supervised == 0:
        return [
            GateResult("something is supervised", False, f"nothing is supervised: {num_rows} rows, {tokens} tokens")
        ]
    results = [GateResult("something is supervised", True, f"{supervised:,} supervised tokens")]

    skipped = 0
    if manifest is not None and "counts" in manifest:
        counts = manifest["counts"]
        skipped = sum(
            counts[kind].get(reason, 0) for kind in ("rows_skipped", "turns_skipped") for reason in _SHORT_REASONS
        )
    kept_short = int((statistics.num_supervised < gates.block_size).sum())
    short, considered = kept_short + skipped, num_rows + skipped
    results.append(
        GateResult(
            "replies are longer than a block",
            short <= max(1, gates.max_short_share * considered) and short < considered,
            f"{short:,} of {considered:,} rows ({short / considered:.1%}) have fewer than {gates.block_size} supervised tokens"
            + (f" ({skipped:,} of them were skipped as empty or too short)" if skipped else "")
            + f"; limit {gates.max_short_share:.1%} (--max-short-share), and never all of them",
        )
    )

    _, repeats = np.unique(statistics.reply_hash, return_counts=True)
    most = int(repeats.max())
    results.append(
        GateResult(
            "replies differ",
            most <= max(1, gates.max_reply_share * num_rows),
            f"one and the same reply is in {most:,} of {num_rows:,} rows ({most / num_rows:.1%}); "
            f"limit {gates.max_reply_share:.1%} (--max-reply-share), and never less than one row",
        )
    )
    share = supervised / tokens
    results.append(
        GateResult(
            "enough is supervised",
            share >= gates.min_supervised_share,
            f"{share:.1%} of {tokens:,} tokens are supervised; limit {gates.min_supervised_share:.1%} "
            "(--min-supervised-share)",
        )
    )
    return results
