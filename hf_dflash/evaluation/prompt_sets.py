# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Prompt sets that drafters are usually compared on, by name, with the wording of the DFlash paper's benchmark."""

from collections.abc import Callable
from dataclasses import dataclass


_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class PromptSet:
    """
    Args:
        repository (`str`), configuration (`str`, *optional*), split (`str`): of the dataset on the Hub.
        read (`Callable`): one of its rows -> the user turns of a conversation.
    """

    repository: str
    configuration: str | None
    split: str
    read: Callable[[dict], list[str]]


PROMPT_SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", lambda row: [row["question"] + _REASON]),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _REASON]),
    "humaneval": PromptSet(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "mbpp": PromptSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    # Both turns: asking the first alone gives another figure.
    "mtbench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])),
}


def load_prompt_set(name: str, limit: int | None = None, seed: int = 0) -> list[dict]:
    """
    Downloads a prompt set.

    Args:
        name (`str`): one of [`PROMPT_SETS`].
        limit (`int`, *optional*): so many rows, drawn with `seed`; all of them by default.
        seed (`int`, *optional*, defaults to 0): of the shuffle.

    Returns:
        `list[dict]`: rows with `id`, `domain` and `turns`.

    Raises:
        `ImportError`: without the `datasets` library.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Named prompt sets need datasets: pip install 'hf-dflash[data]'.") from error
    prompt_set = PROMPT_SETS[name]
    rows = datasets.load_dataset(prompt_set.repository, prompt_set.configuration, split=prompt_set.split)
    return read_prompt_set(name, rows, limit, seed)


def read_prompt_set(name: str, rows, limit: int | None = None, seed: int = 0) -> list[dict]:
    """The rows of [`load_prompt_set`] from a loaded `datasets.Dataset`."""
    numbered = rows.add_column("row_number", list(range(len(rows)))).shuffle(seed=seed)
    if limit is not None:
        numbered = numbered.select(range(min(limit, len(numbered))))
    read = PROMPT_SETS[name].read
    return [{"id": f"{name}:{row['row_number']}", "domain": name, "turns": read(row)} for row in numbered]
