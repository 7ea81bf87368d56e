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
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..command_line import CommandParser


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


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


def load_tokenized_dataset(path: str | Path) -> "Dataset":
    """
    Loads a dataset that [`~data.tokenization.tokenize_completions`] has finished.

    Raises:
        `FileNotFoundError`: there is none.
        `ImportError`: the package datasets is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("Datasets on disk need the package datasets: pip install hf-dflash[data]") from None
    if not Path(path, "state.json").is_file():
        raise FileNotFoundError(f"{path} is not a finished dataset: make it with `hf-dflash tokenize`.")
    return datasets.load_from_disk(str(path))


# ---- the report


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


# ---- the report for a reader


def describe_counts(manifest: dict) -> str:
    """What became of every row that was read, as lines for a reader."""
    return "\n".join(_lines_of_counts(manifest["counts"], len(manifest["sources"])))


def _lines_of_counts(counts: dict, num_sources: int) -> list[str]:
    lines = [
        f"rows read      {counts['rows']:>12,}  from {num_sources:,} source{'s' if num_sources != 1 else ''}"
        + (f"; {counts['blank_lines']:,} blank lines beside" if counts["blank_lines"] else ""),
        f"rows used      {counts['rows_used']:>12,}  {counts['samples']:,} samples, {counts['tokens']:,} tokens, "
        f"{counts['supervised_tokens']:,} supervised",
    ]
    for title, kind in (("rows skipped", "rows_skipped"), ("turns skipped", "turns_skipped")):
        if counts[kind]:
            lines.append(f"{title:<15}{sum(counts[kind].values()):>12,}")
        for reason, count in sorted(counts[kind].items(), key=lambda item: -item[1]):
            first = counts["first_skipped"][reason]
            where = f"{first['source']}:{first['line']}"
            lines.append(f"  {reason:<20}{count:>5,}  first: {where}: {_shorten(first['detail'], 120)}")
    return lines


def describe_report(report: DatasetReport, *, color: bool = False, width: int = 110) -> str:
    """
    The report as one screen of text.

    Args:
        report ([`DatasetReport`]): the report.
        color (`bool`, *optional*, defaults to `False`): whether to mark supervised text with colour; else with `[[ ]]`.
        width (`int`, *optional*, defaults to 110): columns of the screen.
    """
    lines = _lines_of_counts(report.counts, report.num_sources) if report.counts else []
    lines += [
        f"dataset        {report.num_rows:>12,}  rows, {report.num_tokens:,} tokens, "
        f"{report.supervised_share:.1%} of them supervised",
    ]
    shares = [
        ("replies that are in an earlier row too", report.duplicate_share),
        ("cut by a length limit", report.cut_share),
        ("thinking empty", report.empty_thinking_share),
    ]
    lines.append("replies        " + "   ".join(f"{name} {share:.1%}" for name, share in shares if share is not None))
    for item in report.frequent_replies:
        text = _shorten(item["text"], width - 40)
        lines.append(f"  {item['count']:>8,} times ({item['count'] / report.num_rows:.1%})  {text}")
    if report.target_agreement is not None:
        agreement = report.target_agreement
        lines.append(
            f"target         {agreement['share']:.1%} of {agreement['num_tokens']:,} reply tokens in "
            f"{agreement['num_rows']:,} rows are the target's own argmax"
        )
    lines += ["", *_histograms(report, width), ""]
    for sample in report.samples:
        lines += [f"row {sample.row}", *_lines_of_sample(sample, color, width)]
    lines.append("")
    for gate in report.gates:
        lines.append(f"{'pass' if gate.passed else 'FAIL'}  {gate.message}")
    return "\n".join(lines)


def _histograms(report: DatasetReport, width: int) -> list[str]:
    """Both histograms side by side."""
    columns = []
    for title, histogram in (("tokens", report.lengths), ("supervised tokens", report.supervised_lengths)):
        bar_width = width // 2 - 24
        top = max(histogram.counts)
        quantiles = "  ".join(f"{name} {value:,.0f}" for name, value in histogram.quantiles.items())
        column = [f"{title}: mean {histogram.mean:,.0f}", quantiles]
        for start, count in zip(histogram.edges, histogram.counts, strict=False):
            bar = "█" * round(bar_width * count / top) or ("▏" if count else "")
            column.append(f"{start:>7,.0f} {bar:<{bar_width}} {count:>9,}")
        columns.append(column)
    return [f"{left:<{width // 2}}  {right}".rstrip() for left, right in zip(*columns, strict=True)]


def _lines_of_sample(sample: ReportSample, color: bool, width: int) -> list[str]:
    """A few lines: the end of each unsupervised span, start and end of each supervised one."""
    parts = []
    for supervised, text in sample.spans[-4:]:
        text = _shorten(text, 2 * width, keep_start=supervised)
        if supervised:
            parts.append(f"\033[32m{text}\033[0m" if color else f"[[{text}]]")
        else:
            parts.append(f"\033[2m{text}\033[0m" if color else text)
    return ["".join(parts)]


def _shorten(text: str, length: int, keep_start: bool = True) -> str:
    """One line of at most `length` characters; the middle is left out, or the start."""
    text = "".join(" " if character in "\t\r" else character for character in text).replace("\n", "⏎")
    text = "".join(character if character.isprintable() else "�" for character in text)
    if len(text) <= length:
        return text
    if keep_start:
        end = length // 3
        return f"{text[: length - end - 3]} … {text[-end:]}"
    return "… " + text[2 - length :]


def plot_report(report: DatasetReport, path: str | os.PathLike) -> None:
    """
    Draws lengths, supervised lengths, what became of the rows, and the gates, as a PNG.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("The picture needs the package matplotlib: pip install hf-dflash[eval]") from None
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, title, histogram in (
        (axes[0, 0], "tokens of a row", report.lengths),
        (axes[0, 1], "supervised tokens of a row", report.supervised_lengths),
    ):
        axis.stairs(histogram.counts, histogram.edges, fill=True)
        axis.axvline(histogram.mean, color="black", linestyle="--", label=f"mean {histogram.mean:,.0f}")
        axis.set(title=title, ylabel="rows")
        axis.legend()
    outcome = {"used": report.num_rows}
    if report.counts:
        outcome = {"used": report.counts["rows_used"], **report.counts["rows_skipped"]}
    axes[1, 0].barh(list(outcome), list(outcome.values()), color=["tab:green"] + ["tab:red"] * (len(outcome) - 1))
    for place, value in enumerate(outcome.values()):
        axes[1, 0].text(value, place, f" {value:,}", va="center")
    axes[1, 0].set(title="what became of the rows", xmargin=0.15)
    axes[1, 0].invert_yaxis()
    axes[1, 1].axis("off")
    lines = [(gate.passed, _wrap(gate.message)) for gate in report.gates]
    for place, (passed, text) in enumerate(lines):
        axes[1, 1].text(
            0,
            0.95 - 0.22 * place,
            ("pass: " if passed else "FAIL: ") + text,
            va="top",
            color="black" if passed else "red",
        )
    axes[1, 1].set(title="gates")
    figure.savefig(path, dpi=100)


def _wrap(text: str, width: int = 75) -> str:
    import textwrap

    return textwrap.fill(text, width)


# ---- the command


def main(argv: list[str] | None = None) -> int:
    """
    `hf-dflash check`.

    Returns:
        `int`: 0 if the dataset passes the gates, 1 if not. Other mistakes are exceptions, which the command line turns
        into 2.
    """
    arguments = _parser().parse_args(argv)
    dataset = load_tokenized_dataset(arguments.dataset)
    tokenizer = _find_tokenizer(arguments.target or arguments.target_model, dataset)
    agreement = None
    if arguments.target_model:
        from .agreement import measure_target_agreement

        agreement = measure_target_agreement(
            dataset, arguments.target_model, num_rows=arguments.target_rows, device=arguments.device
        )
    report = load_dataset_report(
        dataset,
        gates=DatasetGates.from_arguments(arguments),
        tokenizer=tokenizer,
        target_agreement=agreement,
        num_samples=arguments.samples,
    )
    color = sys.stdout.isatty() if arguments.color is None else arguments.color
    print(describe_report(report, color=color))
    if tokenizer is None:
        print("(token ids, because the tokenizer is not where it was: give it with --target)")
    output = Path(arguments.output or arguments.dataset)
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    try:
        plot_report(report, output / "report.png")
        print(f"also in {output / 'report.json'} and {output / 'report.png'}")
    except ImportError as error:
        print(f"also in {output / 'report.json'}. {error}")
    if not report.passed:
        print("The dataset is refused. If it is right as it is, move the limit.", file=sys.stderr)
    return 0 if report.passed else 1


def _find_tokenizer(target: str | None, dataset: "Dataset") -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    if target is not None:
        return AutoTokenizer.from_pretrained(target)
    name = ((find_manifest(dataset) or {}).get("tokenizer") or {}).get("name")
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash check",
        description="What is in a tokenized dataset, and whether it is worth training on.",
        epilog="Exit status: 0 it passes the gates; 1 it does not; 2 an error.",
    )
    parser.add_argument("dataset", metavar="DIR", help="folder that `hf-dflash tokenize` has made")
    parser.add_argument("--target", help="the target, for its tokenizer (default: where it was)")
    parser.add_argument(
        "--target-model", help="load this target and measure how many reply tokens are its own argmax (off by default)"
    )
    parser.add_argument("--target-rows", type=int, default=32, help="rows to measure that on (%(default)s)")
    parser.add_argument("--device", default=None, help="device for --target-model (default: a GPU if there is one)")
    parser.add_argument("--samples", type=int, default=3, help="rows to show as text (%(default)s)")
    parser.add_argument(
        "--output", metavar="DIR", help="folder for report.json and report.png (default: the dataset's)"
    )
    parser.add_argument("--color", action=argparse.BooleanOptionalAction, default=None, help="colour supervised text")
    DatasetGates.add_arguments(parser)
    return parser
