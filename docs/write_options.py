# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Writes options.md from the dataclasses; `--check` only says whether it is current.

python docs/write_options.py
"""

import sys
from dataclasses import MISSING, fields
from pathlib import Path

from transformers import TrainingArguments

from hf_dflash.data.tokenization_options import TokenizationOptions
from hf_dflash.training.arguments import DFlashTrainingArguments
from hf_dflash.training.run import JobArguments


PATH = Path(__file__).with_name("options.md")

HEAD = """# Options

Written by `docs/write_options.py` from the dataclasses; not to be edited.

Every option can stand in a YAML file (`--config job.yaml`) and on the command line, where it beats the file. An unknown one is
an error. `hf-dflash train --dry_run` prints the resolved run and the memory it needs. Beside these there are all options of
[`TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments).
"""


def default_of(field):
    """What an option is if nobody says anything, `MISSING` if somebody must."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def row(field) -> str:
    default = default_of(field)
    shown = "required" if default is MISSING else "" if default is None else f"`{default}`"
    choices = field.metadata.get("choices")
    text = field.metadata["help"] + (f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else "")
    return f"| `{field.name}` | {shown} | {text} |"


def table(rows: list[str]) -> str:
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def write() -> str:
    inherited = {field.name: field for field in fields(TrainingArguments)}
    shared = {field.name for field in fields(TokenizationOptions)}
    job = [field for field in fields(JobArguments) if field.name not in shared]
    ours = [field for field in fields(DFlashTrainingArguments) if field.name not in inherited]
    changed = [
        field
        for field in fields(DFlashTrainingArguments)
        if field.name in inherited and field is not inherited[field.name]
    ]
    sections = [
        ("What is trained on what", [row(field) for field in job]),
        (
            "How completions are tokenized, as by `hf-dflash tokenize`",
            [row(field) for field in fields(TokenizationOptions)],
        ),
        ("How it is trained", [row(field) for field in ours]),
        ("Options of `TrainingArguments` with another default or meaning", [row(field) for field in changed]),
    ]
    return HEAD + "".join(f"\n## {title}\n\n{table(rows)}\n" for title, rows in sections)


def main(argv: list[str]) -> int:
    text = write()
    if "--check" in argv:
        if not PATH.is_file() or PATH.read_text(encoding="utf-8") != text:
            print(f"{PATH.name} is not current: run `python docs/write_options.py`.", file=sys.stderr)
            return 1
        return 0
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
