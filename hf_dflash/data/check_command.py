# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash check`: shows what is in a tokenized dataset, and says whether it is worth training on."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_line import CommandParser, available_device
from .dataset_gates import DatasetGates
from .dataset_report import load_dataset_report
from .report_rendering import describe_report, plot_report
from .tokenized_dataset import find_manifest, load_tokenized_dataset


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


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
    parser.add_argument(
        "--device", type=available_device, help="device for --target-model (default: a GPU if there is one)"
    )
    parser.add_argument("--samples", type=int, default=3, help="rows to show as text (%(default)s)")
    parser.add_argument(
        "--output", metavar="DIR", help="folder for report.json and report.png (default: the dataset's)"
    )
    parser.add_argument("--color", action=argparse.BooleanOptionalAction, default=None, help="colour supervised text")
    DatasetGates.add_arguments(parser)
    return parser
