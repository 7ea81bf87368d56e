# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash export`: writes the form of a drafter that serving engines read."""

import argparse

from ..command_line import CommandParser
from .layouts import export_drafter
from .portability import SERVING_ENGINES


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash export DRAFTER OUT`."""
    arguments = _parser().parse_args(argv)
    folder = export_drafter(
        arguments.drafter,
        arguments.output,
        target=arguments.target,
        target_name=arguments.target_name,
        engines=tuple(arguments.engines or SERVING_ENGINES),
        repo_id=arguments.repo_id,
        revision=arguments.revision,
    )
    print(f"Exported to {folder}. Its README.md has the commands for each engine.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash export", description="Write the form of a drafter that serving engines read."
    )
    parser.add_argument("drafter", help="native drafter: folder or Hub id")
    parser.add_argument("output", help="folder to write, new or empty")
    parser.add_argument("--target", help="the target: folder or Hub id (default: what the drafter's config names)")
    parser.add_argument("--target_name", help="the target's Hub id, if --target is a folder")
    parser.add_argument(
        "--for",
        dest="engines",
        action="append",
        choices=SERVING_ENGINES,
        help="only this engine must serve it rightly; may be repeated (default: all)",
    )
    parser.add_argument("--repo_id", help="the drafter's Hub id, for the commands on the card")
    parser.add_argument("--revision", help="the revision that will hold this form, for the same commands")
    return parser
