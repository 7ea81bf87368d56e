# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash import`: makes a drafter of another project, or an exported one, a native one."""

import argparse

from ..command_line import CommandParser
from .layouts import import_drafter


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash import SOURCE OUT`."""
    arguments = _parser().parse_args(argv)
    drafter = import_drafter(arguments.source, arguments.output, target=arguments.target)
    config = drafter.config
    print(
        f"Imported to {arguments.output}: {config.num_hidden_layers} layers, block {config.block_size}, target layers "
        f"{config.target_layer_ids}."
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash import",
        description="Make a drafter of z-lab, SpecForge, Model-Optimizer or speculators, or an exported one, a native one.",
    )
    parser.add_argument("source", help="folder or Hub id")
    parser.add_argument("output", help="folder to write, new or empty")
    parser.add_argument("--target", help="the target: folder or Hub id (default: what the source names)")
    return parser
