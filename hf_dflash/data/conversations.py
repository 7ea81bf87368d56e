# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
One JSON row, in any layout in use -> one conversation.

Layouts, tried in this order:

| a row with                                    | is read as                                                              |
|-----------------------------------------------|-------------------------------------------------------------------------|
| `input_ids` + `loss_mask`                     | tokens as they are                                                      |
| `prompt_token_ids` + `completion_token_ids`   | tokens as they are, the completion supervised                           |
| `messages`                                    | chat messages                                                           |
| `conversations` (or `conversation`)           | chat messages                                                           |
| `prompt` + `completion` (or `response`)       | `prompt` (a string: one user turn; or messages), then the reply (same)  |

`completion_token_ids` beside messages are the exact ids (end of turn included) of the last assistant turn; beside a
message, of that message. A row of any chat layout may also carry `system` (a first system message), `tools`
(a list, or its JSON), `enable_thinking` and `chat_template_kwargs` (as the row was served), and `finish_reason`.

A message has its role in `role` or `from`, its text in `content` or `value` (a string, `null`, or a list of
`{"type": "text", "text": …}` parts, joined with newlines as vLLM does), its reasoning in `reasoning_content`,
`reasoning` or `thinking`, and `tool_calls` with arguments as an object or as its JSON.

| role      | also written                                       |
|-----------|----------------------------------------------------|
| system    |                                                    |
| developer |                                                    |
| user      | human                                              |
| assistant | gpt, model, chatgpt, bot                           |
| tool      | function, observation, ipython, tool_response      |

Any other role is never dropped silently: the row is skipped and counted as `unknown_role`, and `--map-role NAME=ROLE`
adds it to the table.
"""

import json
from dataclasses import dataclass, field
from typing import Any


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}

# Why a row, or one turn of it, gives no sample: reason -> what it means and what to do about it.
SKIP_REASONS = {
    # The line
    "bad_json": "the line is not valid JSON",
    "bad_utf8": "the line is not valid UTF-8",
    "nul_byte": "the line has a NUL character",
    "lone_surrogate": "a string has half a surrogate pair, which no tokenizer can encode",
    "line_too_long": "the line is longer than any row can be",
    "not_an_object": "the line is JSON, but not an object",
    # The row
    "missing_field": "none of the layouts fits: a field is missing",
    "wrong_type": "a field has the wrong type",
    "unknown_role": "a role that is not in the table (--map-role NAME=ROLE adds it)",
    "bad_tool_arguments": "tool-call arguments are neither an object nor the JSON of one",
    "bad_token_ids": "token ids out of the vocabulary, or a loss mask of another length or with other values than 0 and 1",
    "no_assistant_turn": "there is no assistant turn to learn from",
    # The turn
    "empty_reply": "the assistant said nothing",
    "thinking_missing": "the generation prompt opens thinking, but the reply has none: if the target was served with "
    "thinking off, tokenize with --no-enable-thinking",
    "thinking_unexpected": "the reply has reasoning, but the generation prompt closes thinking: tokenize with --enable-thinking",
    "thinking_not_rendered": "the row has its reasoning apart, but the chat template does not show how the target writes "
    "it: put it into the content with its tags, or give completion_token_ids",
    "template_refused": "the chat template refuses the conversation",
    "template_lost_reply": "the chat template does not print the reply, so its end of turn is unknown",
    "end_of_turn_in_reply": "the reply goes on after its end of turn",
    "prompt_too_long": "the prompt fills max_length, so no supervised token is left",
    "too_many_turns": "more assistant turns than a row may have",
    "too_few_supervised": "fewer supervised tokens than min_supervised_tokens",
}

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class RowSkipped(ValueError):
    """
    A row, or one turn of it, that cannot become a sample.

    Args:
        reason (`str`):
            A key of `SKIP_REASONS`.
        detail (`str`, *optional*, defaults to `""`):
            What exactly was found.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail or SKIP_REASONS[reason]}")
        self.reason = reason
        self.detail = detail


@dataclass
class Conversation:
    """
    What one row says, in one form whatever its layout.

    Args:
        messages (`list[dict]`):
            Messages with `role` (a value of `ROLES`), `content` (`str`) and, where the row has them, `reasoning_content`
            (`str`), `tool_calls` (arguments as objects), `completion_token_ids`, `finish_reason`, `name`, `tool_call_id`.
        tools (`list[dict]`, *optional*):
            The tools that were offered.
        chat_template_kwargs (`dict`, *optional*, defaults to `{}`):
            What the row says about how it was served; it goes before the options of the run.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenizedRow:
    """A row that came with its tokens: `input_ids` (`list[int]`) and `loss_mask` (`list[bool]`) of one length."""

    input_ids: list[int]
    loss_mask: list[bool]


def read_row(row: dict, roles: dict[str, str] = ROLES) -> Conversation | TokenizedRow:
    """
    Reads one row of any layout of the table above.

    Args:
        row (`dict`):
            The parsed JSON object.
        roles (`dict[str, str]`, *optional*, defaults to `ROLES`):
            Role name in the data -> role.

    Raises:
        [`RowSkipped`]: the row fits no layout or has a part of the wrong type.
    """
    if not isinstance(row, dict):
        raise RowSkipped("not_an_object", f"a {type(row).__name__}")
    if row.get("input_ids") is not None and row.get("loss_mask") is not None:
        input_ids = read_token_ids(row["input_ids"], "input_ids")
        loss_mask = row["loss_mask"]
        if not isinstance(loss_mask, list) or any(value not in (0, 1) for value in loss_mask):
            raise RowSkipped("bad_token_ids", "loss_mask must be a list of 0 and 1")
        if len(loss_mask) != len(input_ids):
            raise RowSkipped("bad_token_ids", f"{len(input_ids)} input_ids but {len(loss_mask)} values in loss_mask")
        return TokenizedRow(input_ids, [bool(value) for value in loss_mask])
    if row.get("prompt_token_ids") is not None and row.get("completion_token_ids") is not None:
        prompt = read_token_ids(row["prompt_token_ids"], "prompt_token_ids")
        completion = read_token_ids(row["completion_token_ids"], "completion_token_ids")
        return TokenizedRow(prompt + completion, [False] * len(prompt) + [True] * len(completion))

    messages = _read_messages(row, roles)
    if row.get("system"):
        if not isinstance(row["system"], str):
            raise RowSkipped("wrong_type", f"system is a {type(row['system']).__name__}, not a string")
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": row["system"]})
    _attach_to_last_turn(messages, row)
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise RowSkipped("wrong_type", f"chat_template_kwargs is a {type(kwargs).__name__}, not an object")
    if row.get("enable_thinking") is not None:
        if not isinstance(row["enable_thinking"], bool):
            raise RowSkipped("wrong_type", "enable_thinking is not true or false")
        kwargs = {**kwargs, "enable_thinking": row["enable_thinking"]}
    if not any(message["role"] == "assistant" for message in messages):
        raise RowSkipped("no_assistant_turn", f"roles: {', '.join(message['role'] for message in messages)}")
    return Conversation(messages, read_tools(row.get("tools")), kwargs)


def _read_messages(row: dict, roles: dict[str, str]) -> list[dict]:
    for name in ("messages", "conversations", "conversation"):
        if row.get(name) is not None:
            return read_messages(row[name], roles, name)
    if row.get("prompt") is None:
        raise RowSkipped("missing_field", f"no messages, conversations or prompt; the row has {_names(row)}")
    messages = []
    for names, role in ((("prompt",), "user"), (("completion", "response"), "assistant")):
        name = next((name for name in names if row.get(name) is not None), None)
        if name is None and role == "assistant" and row.get("completion_token_ids") is not None:
            break
        if name is None:
            raise RowSkipped("missing_field", f"a prompt without completion or response; the row has {_names(row)}")
        if isinstance(row[name], str):
            messages.append({"role": role, "content": row[name]})
        else:
            messages += read_messages(row[name], roles, name)
    return messages


def _attach_to_last_turn(messages: list[dict], row: dict) -> None:
    """`completion_token_ids` and `finish_reason` of a row belong to its last assistant turn."""
    if row.get("completion_token_ids") is not None:
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1]["completion_token_ids"] = read_token_ids(row["completion_token_ids"], "completion_token_ids")
    last_turn = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    if last_turn is not None and row.get("finish_reason") is not None:
        if not isinstance(row["finish_reason"], str):
            raise RowSkipped("wrong_type", f"finish_reason is a {type(row['finish_reason']).__name__}, not a string")
        last_turn.setdefault("finish_reason", row["finish_reason"])


def read_messages(messages: Any, roles: dict[str, str] = ROLES, name: str = "messages") -> list[dict]:
    """
    Reads chat messages of any form of the table above into one form.

    Args:
        messages (`list[dict]`):
            The messages.
        roles (`dict[str, str]`, *optional*, defaults to `ROLES`):
            Role name in the data -> role.
        name (`str`, *optional*, defaults to `"messages"`):
            What to call them in an error.

    Raises:
        [`RowSkipped`]: no messages, an unknown role, or a part of the wrong type.
    """
    if not isinstance(messages, list):
        raise RowSkipped("wrong_type", f"{name} is a {type(messages).__name__}, not a list")
    if not messages:
        raise RowSkipped("missing_field", f"{name} is empty")
    return [_read_message(message, roles, f"{name}[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, roles: dict[str, str], where: str) -> dict:
    if not isinstance(message, dict):
        raise RowSkipped("wrong_type", f"{where} is a {type(message).__name__}, not an object")
    # A column of structs (Hub datasets) has every key in every message, with `None` for those that a message lacks.
    role = message.get("role") if message.get("role") is not None else message.get("from")
    if role is None:
        raise RowSkipped("missing_field", f"{where} has no role (or from)")
    if not isinstance(role, str) or role not in roles:
        raise RowSkipped("unknown_role", f"{role!r} in {where}")
    if "content" not in message and "value" not in message and not message.get("tool_calls"):
        raise RowSkipped("missing_field", f"{where} has no content (or value)")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    result = {"role": roles[role], "content": _read_content(content, where)}

    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RowSkipped("wrong_type", f"the reasoning of {where} is a {type(reasoning).__name__}, not a string")
        result["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        result["tool_calls"] = _read_tool_calls(message["tool_calls"], where)
    if message.get("completion_token_ids") is not None:
        result["completion_token_ids"] = read_token_ids(
            message["completion_token_ids"], f"completion_token_ids of {where}"
        )
    for key in ("finish_reason", "name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise RowSkipped("wrong_type", f"{key} of {where} is a {type(message[key]).__name__}, not a string")
            result[key] = message[key]
    return result


def _read_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowSkipped("wrong_type", f"the content of {where} is a {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise RowSkipped("wrong_type", f"the content of {where} has a part that is not text")
        texts.append(text)
    return "\n".join(texts)


def _read_tool_calls(tool_calls: Any, where: str) -> list[dict]:
    """
    Tool calls with their arguments as objects: newer templates iterate over them, and older ones would print the JSON of
    a JSON string.
    """
    if not isinstance(tool_calls, list):
        raise RowSkipped("wrong_type", f"tool_calls of {where} is a {type(tool_calls).__name__}, not a list")
    result = []
    for call in tool_calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowSkipped("wrong_type", f"a tool call of {where} has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise RowSkipped("bad_tool_arguments", f"{where}: {error}") from None
        if not isinstance(arguments, dict):
            raise RowSkipped("bad_tool_arguments", f"{where}: a {type(arguments).__name__}, not an object")
        rest = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
        result.append({"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}})
    return result


def read_tools(tools: Any) -> list[dict] | None:
    """Tools as a list, given as a list, as its JSON, or not at all (`None`, `""` and `[]` are the same)."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowSkipped("wrong_type", f"tools is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowSkipped("wrong_type", "tools is not a list of objects")
    return tools


def read_token_ids(ids: Any, name: str) -> list[int]:
    """Token ids as a list of `int` that are not negative. Whether they are in the vocabulary is checked later."""
    if not isinstance(ids, list) or not all(type(value) is int and value >= 0 for value in ids):
        raise RowSkipped("bad_token_ids", f"{name} must be a list of integers that are not negative")
    return ids


def _names(row: dict) -> str:
    names = [str(name)[:40] for name in list(row)[:8]]
    return ", ".join(names) if names else "no fields"
