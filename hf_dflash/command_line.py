# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The parser of all commands but `train` and `plan`, whose options are dataclass fields."""

import argparse
import sys
from dataclasses import Field


class CommandParser(argparse.ArgumentParser):
    """
    Takes `--max_length` for `--max-length` and the other way round: Transformers writes options with underscores, most other
    tools with hyphens, and nobody should have to know which command follows which.
    """

    def parse_known_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._as_declared(argument) for argument in given], namespace)

    def _as_declared(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return argument
        for spelling in (name.replace("_", "-"), "--" + name[2:].replace("-", "_")):
            if spelling in self._option_string_actions:
                return spelling + equals + value
        return argument


def help_of(option: Field) -> str:
    """
    The help of a dataclass field that `train` has too, as the other options of these commands have theirs: no sentence, and the
    default behind it.
    """
    text = option.metadata["help"].removesuffix(".")
    return text[0].lower() + text[1:] + ("" if option.default is None else " (%(default)s)")
