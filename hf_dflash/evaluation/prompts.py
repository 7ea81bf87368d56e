# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Rows of prompts: read from files, taken apart into user turns, and encoded as a server would."""

import json
from pathlib import Path

import torch

from ..data.sources import open_jsonl


def load_prompts(path: str | Path, limit: int | None = None) -> list[dict]:
    """
    Reads prompts from a JSONL file.

    Args:
        path (`str` or `Path`): one object a line with `messages` (a conversation that ends with a user turn), `turns` (user
            messages, each answered before the next is asked) or `prompt` (one user message); `id` and `domain` (or `source`)
            are used where they exist. Compressed if it ends with `.gz`.
        limit (`int`, *optional*): the first so many rows.

    Raises:
        `ValueError`: for an empty file, and for a row that is none of these, naming file and line.
    """
    path = Path(path)
    name = Path(path.name.removesuffix(".gz")).stem
    rows = []
    with open_jsonl(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and len(rows) >= limit:
                break
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
            where = f"{path}, line {number}"
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a row is an object, this is a {type(row).__name__}.")
            read_turns(row, where)
            domain = row.get("domain") or row.get("source") or name
            rows.append({**row, "id": str(row.get("id", f"{name}:{number}")), "domain": domain})
    if not rows:
        raise ValueError(f"{path} holds no prompts: give one JSON object a line with `messages`, `turns` or `prompt`.")
    return rows


def read_turns(row: dict, where: str) -> tuple[list[dict], list[str]]:
    """The conversation before the first answer without its last user turn, and the user turns that are to be answered."""
    if "turns" in row:
        before, turns = [], row["turns"]
    elif "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{where}: `messages` is a list of objects with `role` and `content`.")
        if not messages or messages[-1].get("role") != "user":
            raise ValueError(
                f"{where}: `messages` must end with a user turn, which the target is to answer: leave out what follows it."
            )
        before, turns = messages[:-1], [messages[-1].get("content")]
    elif "prompt" in row:
        before, turns = [], [row["prompt"]]
    else:
        raise ValueError(f"{where}: a prompt has `messages`, `turns` or `prompt`, this row has {sorted(row)}.")
    # A string is a sequence of strings too: each of its characters would be a turn.
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: a user turn is a non-empty string, and `turns` a list of them.")
    return before, turns


def encode_prompt(tokenizer, messages: list[dict], enable_thinking: bool | None = None) -> torch.LongTensor:
    """
    The ids, `[1, length]`, that a server would give the target: chat template and generation prompt. Without a template, those of
    a single message's text.

    Raises:
        `ValueError`: for a conversation without a template.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError(
                f"The target's tokenizer has no chat template, which a conversation of {len(messages)} messages needs: take prompts "
                "of one user turn, or give the template that the target is served with (--chat-template)."
            )
        return tokenizer(messages[-1]["content"], return_tensors="pt").input_ids
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
    )["input_ids"]
