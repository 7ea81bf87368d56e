# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
One prompt row -> what the target is asked, turn by turn -> one completion row.

Every assistant turn is the target's own: what a recorded conversation holds in its assistant turns is never shown to the
target. Where the recording goes on with a user turn, it follows the target's reply. Where it goes on with the result of a
tool, that follows only if the target has called the same tools; otherwise the conversation ends there, as it does behind a
reply that was cut.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from .conversations import ROLES, RowSkipped, read_messages, read_tools


# Fields of a prompt row that say what the conversation is. All others go through to the completion row as they are.
_CONVERSATION_FIELDS = {
    "id",
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "response",
    "system",
    "tools",
    "input_ids",
    "loss_mask",
    "prompt_token_ids",
    "completion_token_ids",
    "finish_reason",
    "enable_thinking",
    "chat_template_kwargs",
    "turns_left_out",
}


@dataclass
class Reply:
    """
    What the target wrote in one turn.

    Args:
        content (`str`):
            The answer, without reasoning.
        reasoning_content (`str`, *optional*):
            The reasoning, without its tags.
        tool_calls (`list[dict]`, *optional*):
            Tool calls as a server returns them.
        finish_reason (`str`, *optional*, defaults to `"stop"`):
            `"stop"` or `"tool_calls"` for a reply that ended by itself, `"length"` for one that was cut.
        completion_token_ids (`list[int]`, *optional*):
            Exactly what was generated, the end of turn included; `None` if a server did not say.
        num_tokens (`int`, *optional*, defaults to 0):
            Generated tokens.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: list[dict] | None = None
    finish_reason: str = "stop"
    completion_token_ids: list[int] | None = None
    num_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return not self.content.strip() and not (self.reasoning_content or "").strip() and not self.tool_calls

    @property
    def is_cut(self) -> bool:
        """Whether the length limit ended the reply."""
        return self.finish_reason == "length"


class PromptConversation:
    """
    A prompt row that is being answered.

    Args:
        row (`dict`):
            `messages` (or `conversations`, with the roles of `conversations.py`) or `prompt` (a string or messages), and
            optionally `id`, `system`, `tools`, and any other field, which goes through to the completion row.

    Attributes:
        id (`str`):
            The row's own `id`, or a digest of what is asked: the same in every run.
        messages (`list[dict]`):
            What the target is asked next.

    Raises:
        [`~data.conversations.RowSkipped`]: the row has no prompt, or a part of it has the wrong type.
    """

    def __init__(self, row: dict):
        if not isinstance(row, dict):
            raise RowSkipped("not_an_object", f"a {type(row).__name__}")
        recorded = _read_recorded(row)
        self.tools = read_tools(row.get("tools"))
        self.id = _read_id(row, recorded, self.tools)
        self.replies: list[Reply] = []
        self.messages: list[dict] = []
        self._passed_on = {key: value for key, value in row.items() if key not in _CONVERSATION_FIELDS}
        self._recorded = recorded
        self._row_messages: list[dict] = []
        self._go_on()
        if not self.messages:
            raise RowSkipped("missing_field", "there is no user turn to answer")

    @property
    def is_finished(self) -> bool:
        """Whether there is no further turn to ask for."""
        return self.messages[-1]["role"] == "assistant"

    def add(self, reply: Reply) -> None:
        """Takes the reply to `messages`, and moves on to the next turn if there is one."""
        self.replies.append(reply)
        turn: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning_content is not None:
            turn["reasoning_content"] = reply.reasoning_content
        if reply.tool_calls:
            turn["tool_calls"] = reply.tool_calls
        self.messages.append(turn)
        exact = {"finish_reason": reply.finish_reason}
        if reply.completion_token_ids is not None:
            exact["completion_token_ids"] = reply.completion_token_ids
        self._row_messages.append({**turn, **exact})
        recorded_turn = self._recorded.pop(0) if self._recorded else None
        while self._recorded and self._recorded[0]["role"] == "assistant":
            self._recorded.pop(0)
        if reply.is_cut or reply.is_empty or not self._recorded:
            return
        if self._recorded[0]["role"] != "tool" or self._rename_calls(recorded_turn, reply):
            self._go_on()

    def completion_row(self) -> dict:
        """
        The finished conversation in the form that `hf-dflash tokenize` reads: `id`, the fields that were passed on,
        `tools`, `messages`, and of the last turn `finish_reason` and `completion_token_ids` (those of earlier turns are in
        their messages). `turns_left_out` counts the recorded assistant turns that were not reached.
        """
        messages = [dict(message) for message in self._row_messages]
        last = {key: messages[-1].pop(key) for key in ("finish_reason", "completion_token_ids") if key in messages[-1]}
        row = {"id": self.id, **self._passed_on}
        if self.tools:
            row["tools"] = self.tools
        row["messages"] = messages
        if self._recorded:
            roles = [message["role"] for message in self._recorded]
            row["turns_left_out"] = roles.count("assistant") + (roles[-1] != "assistant")
        return {**row, **last}

    def _go_on(self) -> None:
        """Shows the target what is recorded up to its next turn."""
        roles = [message["role"] for message in self._recorded]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        if end and roles[end - 1] in ("user", "tool"):
            self.messages += self._recorded[:end]
            self._row_messages += self._recorded[:end]
            del self._recorded[:end]

    def _rename_calls(self, recorded_turn: dict, reply: Reply) -> bool:
        """Gives recorded tool results the ids of the target's calls. `False` if it has called other tools."""
        called = [call["function"]["name"] for call in reply.tool_calls or []]
        recorded_calls = recorded_turn.get("tool_calls") or []
        if not called or called != [call["function"]["name"] for call in recorded_calls]:
            return False
        new_ids = {
            old["id"]: new.get("id") for old, new in zip(recorded_calls, reply.tool_calls, strict=True) if "id" in old
        }
        for message in self._recorded:
            if message["role"] != "tool":
                break
            if new_ids.get(message.get("tool_call_id")):
                message["tool_call_id"] = new_ids[message["tool_call_id"]]
        return True


def _read_recorded(row: dict) -> list[dict]:
    for name in ("messages", "conversations", "conversation", "prompt"):
        if row.get(name) is not None:
            break
    else:
        raise RowSkipped("missing_field", f"no messages, conversations or prompt; the row has {', '.join(row)[:200]}")
    if name == "prompt" and isinstance(row[name], str):
        messages = [{"role": "user", "content": row[name]}]
    else:
        messages = read_messages(row[name], ROLES, name)
    if row.get("system"):
        if not isinstance(row["system"], str):
            raise RowSkipped("wrong_type", f"system is a {type(row['system']).__name__}, not a string")
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": row["system"]})
    if messages[0]["role"] == "assistant":
        raise RowSkipped("missing_field", f"{name} starts with the assistant: there is nothing to answer")
    # Reasoning and token ids that were recorded are another model's.
    keys = ("role", "content", "tool_calls", "name", "tool_call_id")
    return [{key: message[key] for key in keys if key in message} for message in messages]


def _read_id(row: dict, messages: list[dict], tools: list[dict] | None) -> str:
    if row.get("id") is None:
        content = json.dumps([messages, tools], sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(content.encode(), digest_size=10).hexdigest()
    if isinstance(row["id"], bool) or not isinstance(row["id"], (str, int)) or row["id"] == "":
        raise RowSkipped("wrong_type", "id is neither a string nor an integer")
    return str(row["id"])
