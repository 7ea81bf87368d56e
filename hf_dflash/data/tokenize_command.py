# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash tokenize`: completions (JSONL) -> a loss-masked dataset."""

import argparse
import json
import sys
from pathlib import Path

from ..command_line import CommandParser
from . import conversations
from .dataset_gates import DatasetGates, DatasetRefused
from .report_rendering import describe_counts
from .tokenization import tokenize_completions
from .tokenization_options import TokenizationOptions


def main(argv: list[str] | None = None) -> int:
    """
    `hf-dflash tokenize`.

    Returns:
        `int`: 0 if every row was used; 3 if the dataset is done but rows were skipped (more than `--allow-skipped`);
        1 if a gate refused it. Other mistakes are exceptions, which the command line turns into 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        dataset = tokenize_completions(
            arguments.sources,
            arguments.target,
            arguments.output,
            **TokenizationOptions.from_arguments(arguments).for_tokenizing(),
            gates=DatasetGates.from_arguments(arguments),
            upload_to=arguments.upload_to,
            endpoint_url=arguments.endpoint_url,
            disable_tqdm=arguments.quiet,
        )
    except DatasetRefused as refused:
        print(describe_counts(json.loads((Path(arguments.output) / "manifest.json").read_text())))
        print(f"\n{refused}", file=sys.stderr)
        return 1
    manifest = json.loads((Path(arguments.output) / "manifest.json").read_text())
    print(describe_counts(manifest))
    print(f"{len(dataset)} samples in {arguments.output}. Look at them with: hf-dflash check {arguments.output}")
    counts = manifest["counts"]
    skipped = counts["rows"] - counts["rows_used"] + sum(counts["turns_skipped"].values())
    return 3 if skipped > arguments.allow_skipped * counts["rows"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash tokenize",
        description="Completions (JSONL) -> a loss-masked dataset. A stopped run goes on; a finished one is not redone.",
        epilog="Exit status: 0 every row used; 3 done, but rows were skipped; 1 refused by a gate; 2 an error.\n\n"
        + conversations.__doc__.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="JSONL files (also .gz), folders, globs, s3://bucket/prefix, hub://dataset; layouts and roles are below",
    )
    parser.add_argument(
        "--target", required=True, help="the target (folder or Hub id), for its tokenizer and template"
    )
    parser.add_argument("--output", required=True, help="folder of the dataset")
    TokenizationOptions.add_arguments(parser)
    parser.add_argument(
        "--allow-skipped",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="skipped rows that are no reason for status 3",
    )
    parser.add_argument("--upload-to", metavar="S3_URI", help="copy the finished folder there")
    parser.add_argument("--endpoint-url", help="address of the object store, if not Amazon's")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    DatasetGates.add_arguments(parser)
    return parser
