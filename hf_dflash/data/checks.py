# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Gates that refuse a useless dataset, and the report that shows what is in it.

Somebody once tokenized 914K samples of which 87% were six supervised tokens (an empty reply) and found out weeks later.
So the gates run by themselves, when a dataset is made and again before it is trained on.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np


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

    block_size: int = 16
    max_short_share: float = 0.01
    max_reply_share: float = 0.01
    min_supervised_share: float = 0.05

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds the gates to a command's options."""
        group = parser.add_argument_group("gates (what a dataset must fulfil)")
        texts = {
            "block_size": "a row with fewer supervised tokens than this is a short one",
            "max_short_share": "largest share of short rows",
            "max_reply_share": "largest share of rows with one and the same reply",
            "min_supervised_share": "smallest share of the tokens that are supervised",
        }
        for gate in fields(DatasetGates):
            name = "--" + gate.name.replace("_", "-")
            group.add_argument(name, type=gate.type, default=gate.default, help=f"{texts[gate.name]} (%(default)s)")

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
        dataset = _load(dataset)
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


@dataclass
class DatasetStatistics:
    """
    What the gates and the report know of each row, as arrays [rows].

    Args:
        length (`np.ndarray`): tokens, int64.
        num_supervised (`np.ndarray`): supervised tokens, int64.
        reply_hash (`np.ndarray`): hash of the supervised tokens, int64.
    """

    length: np.ndarray
    num_supervised: np.ndarray
    reply_hash: np.ndarray


def read_statistics(dataset: "Dataset") -> DatasetStatistics:
    """
    Reads the statistics of a dataset: from its columns, or from the tokens of one that was made elsewhere.

    Raises:
        `ValueError`: there are no columns `input_ids` and `loss_mask`, or they do not fit together.
    """
    names = ("length", "num_supervised", "reply_hash")
    if len(dataset) and set(names) <= set(dataset.column_names):
        columns = dataset.select_columns(list(names)).with_format("numpy")[:]
        return DatasetStatistics(*(np.asarray(columns[name], dtype=np.int64) for name in names))
    missing = {"input_ids", "loss_mask"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"The dataset has no column {' and no column '.join(sorted(missing))}: make it with `hf-dflash tokenize`."
        )
    length, supervised, hashes = [], [], []
    for batch in dataset.select_columns(["input_ids", "loss_mask"]).with_format(None).iter(1000):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            if len(ids) != len(mask):
                raise ValueError(f"Row {len(length)} has {len(ids)} input_ids but {len(mask)} values in loss_mask.")
            mask = np.asarray(mask, dtype=bool)
            length.append(len(ids))
            supervised.append(int(mask.sum()))
            hashes.append(hash_reply(np.asarray(ids, dtype=np.int32)[mask]))
    return DatasetStatistics(*(np.asarray(values, dtype=np.int64) for values in (length, supervised, hashes)))


def hash_reply(supervised_ids: np.ndarray) -> int:
    """A 64-bit hash of token ids (int32), for finding equal replies."""
    digest = hashlib.blake2b(np.ascontiguousarray(supervised_ids, dtype="<i4"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
            + f"; limit {gates.max_short_share:.1%} (--max-short-share)",
        )
    )

    _, repeats = np.unique(statistics.reply_hash, return_counts=True)
    most = int(repeats.max())
    results.append(
        GateResult(
            "replies differ",
            most <= max(1, gates.max_reply_share * num_rows),
            f"one and the same reply is in {most:,} of {num_rows:,} rows ({most / num_rows:.1%}); "
            f"limit {gates.max_reply_share:.1%} (--max-reply-share)",
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


def find_manifest(dataset: "Dataset") -> dict | None:
    """The manifest beside the files of a dataset, if it is about as many rows as the dataset has."""
    folders = {Path(file["filename"]).parent for file in dataset.cache_files}
    if len(folders) != 1:
        return None
    path = folders.pop() / "manifest.json"
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text())
    return manifest if manifest.get("counts", {}).get("samples") == len(dataset) else None


def _load(path: str | Path) -> "Dataset":
    try:
        import datasets
    except ImportError:
        raise ImportError("Datasets on disk need the package datasets: pip install hf-dflash[data]") from None
    if not Path(path, "state.json").is_file():
        raise FileNotFoundError(f"{path} is not a finished dataset: make it with `hf-dflash tokenize`.")
    return datasets.load_from_disk(str(path))
