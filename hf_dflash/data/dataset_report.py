# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The report of a dataset: what is in it, and which gates it passes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .dataset_gates import DatasetGates, GateResult, judge
from .tokenized_dataset import find_manifest, load_tokenized_dataset, read_statistics


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass
class Histogram:
    """Counts of whole numbers in equal bins from the smallest to the largest, and some quantiles."""

    edges: list[float]
    counts: list[int]
    mean: float
    quantiles: dict[str, float]

    @classmethod
    def of(cls, values: np.ndarray, bins: int = 12) -> "Histogram":
        width = -(-(int(values.max()) - int(values.min()) + 1) // bins)
        counts, edges = np.histogram(values, bins=int(values.min()) + width * np.arange(bins + 1))
        levels = {"min": 0, "5%": 0.05, "50%": 0.5, "95%": 0.95, "max": 1}
        quantiles = {name: float(np.quantile(values, level, method="nearest")) for name, level in levels.items()}
        return cls(edges.tolist(), counts.tolist(), float(values.mean()), quantiles)


@dataclass
class ReportSample:
    """A row as text: `spans` are (supervised, text) in order."""

    row: int
    row_id: int | None
    spans: list[tuple[bool, str]]


@dataclass
class DatasetReport:
    """
    What is in a dataset.

    Args:
        counts (`dict`, *optional*):
            What became of every row that was read (`counts` of the manifest), if there is a manifest.
        num_sources (`int`): files, objects and splits that were read.
        num_rows, num_tokens, num_supervised (`int`): of the dataset.
        supervised_share (`float`): share of the tokens that are supervised.
        lengths, supervised_lengths ([`Histogram`]): tokens of a row, supervised tokens of a row.
        duplicate_share (`float`): share of the rows whose reply stands in an earlier row too.
        frequent_replies (`list[dict]`): the most frequent replies that are there more than once, with `count` and `text`.
        cut_share (`float`, *optional*): share of the replies that generation or `max_length` cut.
        empty_thinking_share (`float`, *optional*): share of the replies that close their thinking at once.
        target_agreement (`dict`, *optional*): of [`~data.agreement.measure_target_agreement`].
        gates (`list[GateResult]`): the gates, passed or not.
        samples (`list[ReportSample]`): some rows as text.
    """

    counts: dict | None
    num_sources: int
    num_rows: int
    num_tokens: int
    num_supervised: int
    supervised_share: float
    lengths: Histogram
    supervised_lengths: Histogram
    duplicate_share: float
    frequent_replies: list[dict[str, Any]]
    cut_share: float | None
    empty_thinking_share: float | None
    target_agreement: dict | None
    gates: list[GateResult]
    samples: list[ReportSample]

    @property
    def passed(self) -> bool:
        """Whether the dataset passes all gates."""
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)


def load_dataset_report(
    dataset: "Dataset | str | Path",
    *,
    gates: DatasetGates = DatasetGates(),  # noqa: B008 (frozen)
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    target_agreement: dict | None = None,
    num_samples: int = 3,
    num_frequent: int = 5,
) -> DatasetReport:
    """
    Makes the report of a dataset. It fails for no gate; see [`DatasetReport.passed`].

    Args:
        dataset (`datasets.Dataset`, `str` or `Path`):
            The dataset, or its folder.
        gates ([`DatasetGates`], *optional*):
            The limits.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Makes text of samples and frequent replies. Without it they are shown as ids.
        target_agreement (`dict`, *optional*):
            What [`~data.agreement.measure_target_agreement`] has measured.
        num_samples (`int`, *optional*, defaults to 3):
            Rows to show, evenly spread.
        num_frequent (`int`, *optional*, defaults to 5):
            Frequent replies to show.

    Raises:
        `ValueError`: the dataset has no rows, or no `input_ids` and `loss_mask`.
    """
    if not hasattr(dataset, "column_names"):
        dataset = load_tokenized_dataset(dataset)
    if len(dataset) == 0:
        raise ValueError("The dataset has no rows.")
    manifest = find_manifest(dataset)
    statistics = read_statistics(dataset)
    num_rows, tokens = len(dataset), int(statistics.length.sum())
    hashes, first_rows, repeats = np.unique(statistics.reply_hash, return_index=True, return_counts=True)
    frequent = [i for i in np.argsort(-repeats, kind="stable")[:num_frequent] if repeats[i] > 1]
    rows = np.unique(np.linspace(0, num_rows - 1, min(num_samples, num_rows)).astype(int)) if num_samples else []

    def share_of(column: str) -> float | None:
        if column not in dataset.column_names:
            return None
        return float(np.mean(dataset.select_columns([column]).with_format("numpy")[:][column]))

    return DatasetReport(
        counts=manifest["counts"] if manifest else None,
        num_sources=len(manifest["sources"]) if manifest else 0,
        num_rows=num_rows,
        num_tokens=tokens,
        num_supervised=int(statistics.num_supervised.sum()),
        supervised_share=int(statistics.num_supervised.sum()) / max(1, tokens),
        lengths=Histogram.of(statistics.length),
        supervised_lengths=Histogram.of(statistics.num_supervised),
        duplicate_share=1 - len(hashes) / num_rows,
        frequent_replies=[
            {"count": int(repeats[i]), "text": _reply_text(dataset[int(first_rows[i])], tokenizer)[:200]}
            for i in frequent
        ],
        cut_share=share_of("is_cut"),
        empty_thinking_share=share_of("is_thinking_empty"),
        target_agreement=target_agreement,
        gates=judge(statistics, gates, manifest),
        samples=[
            ReportSample(int(row), dataset[int(row)].get("row_id"), _spans(dataset[int(row)], tokenizer))
            for row in rows
        ],
    )


def _decode(ids: list[int], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    return tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))


def _reply_text(row: dict, tokenizer) -> str:
    return _decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m][:100], tokenizer)


def _spans(row: dict, tokenizer) -> list[tuple[bool, str]]:
    mask = np.asarray(row["loss_mask"], dtype=bool)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [
        (bool(mask[start]), _decode(list(row["input_ids"][start:end]), tokenizer))
        for start, end in zip(borders[:-1], borders[1:], strict=True)
    ]
