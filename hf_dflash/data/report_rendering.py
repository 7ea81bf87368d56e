# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The report of a dataset for a reader: as one screen of text, and as a picture."""

import os

from .dataset_report import DatasetReport, ReportSample


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
        raise ImportError("The picture needs the package matplotlib: pip install 'hf-dflash[eval]'") from None
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
