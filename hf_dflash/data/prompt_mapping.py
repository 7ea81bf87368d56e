# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
One row of a prompt source, in that source's own schema -> one prompt. A mapping names the fields of the source:

| key               | the field holds                                                                                  |
|-------------------|--------------------------------------------------------------------------------------------------|
| `prompt`          | one user turn                                                                                    |
| `messages`        | chat messages in any form of `conversations.py`, or their JSON                                    |
| `transcript`      | a text of `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:` turns; the system text lists functions as JSON |
| `system`          | the system prompt                                                                                |
| `tools`           | tools, or their JSON                                                                             |
| `first_turn_only` | (`true`) of recorded agents: their later user turns answer to another model's commands              |

Recorded answers are not kept: of an assistant turn only its place and the names of the tools that it called remain.
"""

import json
import re
from typing import Any

from .conversations import ROLES, RowSkipped, read_messages, read_tools
from .on_policy import PromptConversation


def check_mapping(mapping: dict[str, Any], name: str) -> None:
    """
    Refuses a mapping of the source `name` that [`map_row`] could not follow.

    Raises:
        `ValueError`: an unknown key, a field that is no text, or not one of `prompt`, `messages` and `transcript`.
    """
    known = {"prompt", "messages", "transcript", "system", "tools", "first_turn_only"}
    if unknown := mapping.keys() - known:
        raise ValueError(f"The mapping of {name} has {sorted(unknown)[0]!r}; the keys are {sorted(known)}.")
    if len(mapping.keys() & {"prompt", "messages", "transcript"}) != 1:
        raise ValueError(f"The mapping of {name} must have one of prompt, messages and transcript.")
    for key, value in mapping.items():
        if not isinstance(value, bool if key == "first_turn_only" else str):
            wanted = "true or false" if key == "first_turn_only" else "the name of a field"
            raise ValueError(f"The mapping of {name}: {key} is {value!r}, but must be {wanted}.")


def map_row(row: dict, mapping: dict[str, Any]) -> tuple[list[dict], list[dict] | None]:
    """
    Reads a prompt out of a row.

    Args:
        row (`dict`):
            A row of a source, in that source's own schema.
        mapping (`dict`):
            Key of the module's table -> field.

    Returns:
        `tuple[list[dict], list[dict] | None]`: messages up to the last turn that is not the assistant's, and tools. Assistant
        turns are empty, but for the tools that they called.

    Raises:
        [`~data.conversations.RowSkipped`]: the row has no prompt, or a part of it has the wrong type.
    """
    if not isinstance(row, dict):
        raise RowSkipped("not_an_object")
    system = _text_of(row, mapping.get("system"))
    tools = read_tools(row.get(mapping["tools"])) if "tools" in mapping else None
    if "transcript" in mapping:
        messages = _read_transcript(_text_of(row, mapping["transcript"]))
        system, found = _take_functions(system)
        tools = tools or found
    elif "prompt" in mapping:
        messages = [{"role": "user", "content": _text_of(row, mapping["prompt"])}]
    else:
        messages = row.get(mapping["messages"])
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except ValueError as error:
                raise RowSkipped("bad_json", f"{mapping['messages']}: {error}") from None
        messages = read_messages(messages, ROLES, mapping["messages"])
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if mapping.get("first_turn_only"):
        first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise RowSkipped("missing_field", "there is no user turn")
        messages = messages[: first + 1]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise RowSkipped("missing_field", "there is no user turn")
    # Read once more, as `hf-dflash generate` will.
    PromptConversation({"messages": messages, "tools": tools})
    return [_without_answer(message) for message in messages], tools


def _text_of(row: dict, name: str | None) -> str:
    if name is None or row.get(name) is None:
        return ""
    if not isinstance(row[name], str):
        raise RowSkipped("wrong_type", f"{name} is a {type(row[name]).__name__}, not a string")
    return row[name]


def _without_answer(message: dict) -> dict:
    if message["role"] != "assistant":
        return {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    result = {"role": "assistant", "content": ""}
    if message.get("tool_calls"):
        result["tool_calls"] = message["tool_calls"]
    return result


_TRANSCRIPT_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
_TRANSCRIPT_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TRANSCRIPT_CALL = re.compile(r"<functioncall>\s*\{\s*\"name\":\s*\"([^\"]+)\"")


def _read_transcript(text: str) -> list[dict]:
    """
    Messages of a transcript in the style of Glaive. Of a call only the function's name is read: its arguments are often no
    JSON, and the target writes its own.
    """
    parts = _TRANSCRIPT_TURN.split(text)
    if len(parts) < 3:
        raise RowSkipped("missing_field", "the transcript has no USER: turn")
    messages: list[dict] = []
    for label, content in zip(parts[1::2], parts[2::2], strict=True):
        content = content.replace("<|endoftext|>", "").strip()
        message = {"role": _TRANSCRIPT_ROLES[label], "content": content}
        if label == "ASSISTANT":
            calls = [{"name": name, "arguments": {}} for name in _TRANSCRIPT_CALL.findall(content)]
            if calls:
                message["tool_calls"] = calls
        messages.append(message)
    return read_messages(messages)


def _take_functions(system: str) -> tuple[str, list[dict] | None]:
    """
    The functions that a system text lists as JSON objects, as tools. The text around them only says that they are there, and
    the target's chat template says it in its own words.
    """
    system = system.strip().removeprefix("SYSTEM:").strip()
    decoder, tools, position = json.JSONDecoder(), [], system.find("{")
    while position >= 0:
        try:
            function, end = decoder.raw_decode(system, position)
        except ValueError:
            raise RowSkipped("bad_json", "the functions in the system text are not JSON") from None
        tools.append(function if function.get("type") == "function" else {"type": "function", "function": function})
        position = system.find("{", end)
    return ("", tools) if tools else (system, None)
