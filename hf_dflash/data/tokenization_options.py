# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How completions become tokens: the options that `hf-dflash tokenize` and `hf-dflash train` share."""

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..command_line import help_of


@dataclass
class TokenizationOptions:
    """
    The options of [`tokenize_completions`] as a command line or a YAML file has them.

    Args:
        max_length (`int`, *optional*, defaults to 4096): longest sample in tokens; longer replies are cut.
        min_supervised_tokens (`int`, *optional*, defaults to 2): samples with fewer supervised tokens are skipped.
        enable_thinking (`bool`, *optional*): passed to the chat template, as serving does; the template's default if not given.
        chat_template (`str`, *optional*): file of the template that the target was served with, if not its own.
        chat_template_kwargs (`dict` or `str`, *optional*): further variables for the template, or the JSON of them.
        map_role (`list[str]`, *optional*): further role names, each as `NAME=ROLE`.
        split (`str`, *optional*, defaults to `"train"`): split of Hub datasets that name none.
        num_workers (`int`, *optional*): processes that tokenize; one for each core if not given.

    Raises:
        `ValueError`: if an option is not of its form, naming it.
    """

    max_length: int = field(default=4096, metadata={"help": "Longest sample in tokens; longer replies are cut."})
    min_supervised_tokens: int = field(
        default=2, metadata={"help": "Samples with fewer supervised tokens are skipped."}
    )
    enable_thinking: bool | None = field(
        default=None,
        # By itself HfArgumentParser wants a value for a switch that may also be left alone.
        metadata={
            "help": "Passed to the chat template, as serving does; its own default if not given.",
            "nargs": "?",
            "const": True,
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={"help": "File of the template that the target was served with, if not its own.", "metavar": "FILE"},
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Further variables for the template, as JSON.", "metavar": "JSON"}
    )
    map_role: list[str] | None = field(
        default=None,
        metadata={
            "help": "Read a role name of the data as a role; may be given several times.",
            "metavar": "NAME=ROLE",
            "action": "extend",
        },
    )
    split: str = field(
        default="train", metadata={"help": "Split of hub:// datasets that name none, as hub://NAME#SPLIT does."}
    )
    num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize; one for each core if not given."}
    )

    def __post_init__(self):
        if isinstance(self.chat_template_kwargs, str):
            given = self.chat_template_kwargs
            try:
                self.chat_template_kwargs = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"`--chat_template_kwargs {given}` is not JSON: {error}.") from None
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, dict):
            raise ValueError(f"`--chat_template_kwargs {self.chat_template_kwargs}`: give a JSON object.")
        for text in self.map_role or ():
            name, _, role = text.partition("=")
            if not (name and role):
                raise ValueError(f"`--map_role {text}` is not of the form NAME=ROLE.")

    def for_tokenizing(self) -> dict[str, Any]:
        """What these options mean to [`tokenize_completions`], as its keyword arguments."""
        template = None if self.chat_template is None else Path(self.chat_template).read_text(encoding="utf-8")
        return {
            "max_length": self.max_length,
            "min_supervised_tokens": self.min_supervised_tokens,
            "enable_thinking": self.enable_thinking,
            "chat_template": template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "extra_roles": dict(text.split("=", 1) for text in self.map_role or ()),
            "split": self.split,
            "num_workers": self.num_workers,
        }

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Adds these options to a command whose parser is no HfArgumentParser."""
        forms = {
            "enable_thinking": {"action": argparse.BooleanOptionalAction},
            # Not several values at once: the sources of the command may follow.
            "map_role": {"action": "append"},
            **{name: {"type": int} for name in ("max_length", "min_supervised_tokens", "num_workers")},
        }
        for option in fields(TokenizationOptions):
            form = forms.get(option.name, {})
            if "metavar" in option.metadata:
                form["metavar"] = option.metadata["metavar"]
            name = "--" + option.name.replace("_", "-")
            parser.add_argument(name, default=option.default, help=help_of(option), **form)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> "TokenizationOptions":
        return cls(**{option.name: getattr(arguments, option.name) for option in fields(cls)})
