# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
`hf-dflash <command> ...`: one command for each stage, each the `main` of a module.

Only the module of the chosen command is imported.
"""

import difflib
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path


# In the order in which a job uses them: command -> (module with a function `main`, phrase).
COMMANDS = {
    "mix": ("hf_dflash.data.mixture", "several prompt sources -> one prompt set"),
    "generate": ("hf_dflash.data.generate_command", "the target writes the completions"),
    "tokenize": ("hf_dflash.data.tokenize_command", "completions (JSONL) -> loss-masked tokens"),
    "check": ("hf_dflash.data.check_command", "report on a tokenized dataset, and refuse a useless one"),
    "plan": ("hf_dflash.training.plan", "devices, memory and balance of a training run, before it loads"),
    "train": ("hf_dflash.training.run", "train a drafter"),
    "monitor": ("hf_dflash.monitor.server", "the live page of a training run"),
    "evaluate": ("hf_dflash.evaluation.evaluate_command", "acceptance length and speed against plain decoding"),
    "export": ("hf_dflash.hub.export_command", "write the layout that serving engines read"),
    "import": ("hf_dflash.hub.import_command", "read a drafter in another project's layout"),
    "verify": ("hf_dflash.hub.verify", "check that a saved or published drafter works"),
}

# Commands with an option `--debug VALUE`, that of `TrainingArguments`. They take no words but options and their values, so what
# follows `--debug` tells the two apart.
_WITH_DEBUG_OPTION = ("plan", "train")

# Packages whose commands read no drafter, so that some of them need no torch.
_WITHOUT_DRAFTERS = ("hf_dflash.data.", "hf_dflash.monitor.")

PACKAGE = Path(__file__).parent


def main(argv: list[str] | None = None) -> int:
    """
    Runs one command.

    Args:
        argv (`list[str]`, *optional*, defaults to `sys.argv[1:]`):
            The command and its arguments. `--debug` (without a value) may stand before the command or after it.

    Returns:
        `int`: The exit status: 0, or 2 after a mistake that the message explains, or what the command returned.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, argv = _take_debug(argv)

    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"hf-dflash {_version()}")
        return 0

    command, arguments = argv[0], argv[1:]
    if command not in COMMANDS:
        print(f"hf-dflash: error: {_unknown(command)}", file=sys.stderr)
        return 2

    module, _ = COMMANDS[command]

    def run(arguments: list[str]) -> int | None:
        _check_targets(arguments)
        if not module.startswith(_WITHOUT_DRAFTERS):
            importlib.import_module("hf_dflash").register_auto_classes()
        return importlib.import_module(module).main(arguments)

    return explain_mistakes(f"hf-dflash {command}", run, arguments, debug, "run with --debug for the traceback")


def _take_debug(argv: list[str]) -> tuple[bool, list[str]]:
    """Whether tracebacks are asked for, and the arguments without that."""
    command = next((argument for argument in argv if argument != "--debug"), None)
    kept, debug = [], False
    for index, argument in enumerate(argv):
        has_value = index + 1 < len(argv) and not argv[index + 1].startswith("-")
        if argument == "--debug" and not (command in _WITH_DEBUG_OPTION and command in argv[:index] and has_value):
            debug = True
        else:
            kept.append(argument)
    return debug, kept


def explain_mistakes(
    name: str,
    run: Callable[[list[str]], int | None],
    arguments: list[str],
    debug: bool = False,
    hint: str = "set HF_DFLASH_DEBUG=1 for the traceback",
) -> int:
    """
    Runs a command; where the user has made a mistake, says so in a line instead of a traceback.

    Args:
        name (`str`): of the command, for its messages.
        run (`Callable`): takes the arguments, and may return an exit status.
        arguments (`list[str]`): of the command.
        debug (`bool`, *optional*, defaults to `False`): let errors through, as `HF_DFLASH_DEBUG=1` does.
        hint (`str`, *optional*): how to see the traceback.

    Returns:
        `int`: The exit status.
    """
    try:
        return run(arguments) or 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        # What our code raises for a user's mistake: a bad value, a file that is missing or cannot be read, an
        # optional package that is not installed.
        if debug or os.environ.get("HF_DFLASH_DEBUG", "0") not in ("", "0"):
            raise
        print(f"{name}: error: {error}", file=sys.stderr)
        for folder in _folders_that_are_not_there(arguments) if isinstance(error, OSError) else ():
            print(folder, file=sys.stderr)
        print(f"({hint})", file=sys.stderr)
        return 2


def _help() -> str:
    width = max(len(command) for command in COMMANDS)
    lines = [f"  {command:<{width}}  {phrase}" for command, (_, phrase) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hf-dflash [--version] [--debug] <command> ...",
            "",
            "Train a DFlash speculative-decoding drafter.",
            "",
            "commands:",
            *lines,
            "",
            "`hf-dflash <command> --help` shows the options of a command; --debug shows tracebacks.",
        ]
    )


def _unknown(command: str) -> str:
    close = difflib.get_close_matches(command, COMMANDS, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"The commands are {', '.join(COMMANDS)}."
    return f"there is no command {command!r}. {hint}"


def _folders_that_are_not_there(arguments: list[str]) -> list[str]:
    """
    Models that were looked up on the Hub, as nothing here has their name. Transformers' own message names none of them where
    the Hub cannot be reached, and a mistyped path is the usual reason.
    """
    return [
        f"({option} {name}: there is no such folder here, so it was looked up on the Hub)"
        for option, name in _models(arguments)
        if not os.path.exists(name)
    ]


def _models(arguments: list[str]) -> list[tuple[str, str]]:
    words = [word for argument in arguments for word in argument.split("=", 1)]
    options = ("--target", "--target-model", "--target_model", "--drafter")
    return [(option, name) for option, name in itertools.pairwise(words) if option in options]


def _check_targets(arguments: list[str]) -> None:
    """
    Before anything loads: transformers would ask whether to run a drafter's code and then miss a tokenizer, or make a target of
    random weights of an exported one, which calls itself a Qwen3.

    Raises:
        `ValueError`: if a drafter, or an adapter on one, stands in the target's place.
    """
    for option, name in _models(arguments):
        if option != "--drafter" and _is_drafter(name):
            raise ValueError(f"{option} {name} is a DFlash drafter: give the model that it was trained for.")


def _is_drafter(name: str) -> bool:
    config = _read_config(name, "config.json")
    if config is None:
        adapter = _read_config(name, "adapter_config.json") or {}
        below = adapter.get("auto_mapping")
        if isinstance(below, dict) and below.get("base_model_class") == "DFlashForSpeculation":
            return True
        base = adapter.get("base_model_name_or_path")
        config = _read_config(base, "config.json") if base else None
    config = config or {}
    return config.get("model_type") == "dflash" or "DFlashDraftModel" in (config.get("architectures") or [])


def _read_config(name: str, file: str) -> dict | None:
    """A configuration of a folder or a Hub repository; `None` where it cannot be read, of which whoever needs it says why."""
    try:
        if os.path.isdir(name):
            path = os.path.join(name, file)
        else:
            # Here: most commands are given folders.
            from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

            path = try_to_load_from_cache(name, file)
            if not isinstance(path, str):
                # Asked first, since a download tries for half a minute where the Hub cannot be reached.
                if file not in [sibling.rfilename for sibling in HfApi().model_info(name, timeout=10).siblings]:
                    return None
                path = hf_hub_download(name, file)
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except Exception:
        return None
    return values if isinstance(values, dict) else None


def _version() -> str:
    # Read, not imported: importing the package imports torch.
    return re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)[1]


if __name__ == "__main__":
    sys.exit(main())
