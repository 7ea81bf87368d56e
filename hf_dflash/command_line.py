# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The parser of all commands but `train` and `plan`, whose options are dataclass fields, and types of their options."""

import argparse
import sys
from dataclasses import Field


# Of a model that a command loads.
DTYPES = ("bfloat16", "float16", "float32", "float64")


class CommandParser(argparse.ArgumentParser):
    """
    Takes `--max_length` for `--max-length` and the other way round: Transformers writes options with underscores, most other
    tools with hyphens, and nobody should have to know which command follows which. A mistake is said in a line.
    """

    def parse_known_args(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._as_declared(argument) for argument in given], namespace)

    def error(self, message):
        # Without the usage, which for some commands fills a screen and pushes the message out of sight.
        self.exit(2, f"{self.prog}: error: {message}\n(--help shows the options)\n")

    def _as_declared(self, argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return argument
        for spelling in (name.replace("_", "-"), "--" + name[2:].replace("-", "_")):
            if spelling in self._option_string_actions:
                return spelling + equals + value
        return argument


def at_least_one(text: str) -> int:
    """The type of an option that counts something of which none is no use."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, but is {text!r}") from error
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def available_device(name: str) -> str:
    """The type of an option that names a device. Torch says in several ways, some of them tracebacks, that there is none."""
    # Here: most commands of `hf_dflash.data` need no torch.
    import torch

    try:
        place = torch.device(name)
        module = torch.get_device_module(place)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no device: cpu, cuda or cuda:1, for example") from error
    count = module.device_count() if module.is_available() else 0
    if (place.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"there is no {name} here: torch sees {count} of that kind")
    return name


def help_of(option: Field) -> str:
    """
    The help of a dataclass field that `train` has too, as the other options of these commands have theirs: no sentence, and the
    default behind it.
    """
    text = option.metadata["help"].removesuffix(".")
    return text[0].lower() + text[1:] + ("" if option.default is None else " (%(default)s)")
