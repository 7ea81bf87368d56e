# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
One conversation -> token ids and loss mask, one sample for each assistant turn.

The ids are what the target saw and wrote when it was served:

    tokens of (chat template over the turns before, with its generation prompt) + tokens of the reply + end of turn

and the mask covers reply (thinking included) and end of turn. One sample a turn, because templates take the thinking of
earlier turns out: no single rendering is both turn 1 as written and turn 1 as history.

What the target wrote is the message as it is, plus what a server takes away from it: the tags around the reasoning, the
text of tool calls, the end of turn. Those come from the template: the turn is rendered once more with a marker in
place of the reasoning and one in place of the content, and what stands around the markers is how this template writes a
reply. So nothing that a template does to a message (stripping spaces, cutting thinking, inserting an empty think block)
touches the ids, and no template needs generation tags.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .conversations import Conversation, RowSkipped, TokenizedRow, read_messages, read_tools


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Stand for reasoning and content in a probe rendering. Plain letters: no template trims or splits them.
_REASONING_MARK = "zqReasoningMarkqz"
_CONTENT_MARK = "zqContentMarkqz"

# Characters at the end of a prompt among which its last special token must stand for the form of the reply to be kept,
# and how many forms are kept.
_LONGEST_HEADER = 80
_MOST_FORMS = 10_000

# How models open and close their thinking, where the template itself does not show it.
THINKING_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
_EMPTY_THINKING = re.compile(
    r"\s*(?:" + "|".join(f"(?:{re.escape(o)})?\\s*{re.escape(c)}" for o, c in THINKING_TAGS) + r")\s*"
)

# What servers call a reply that ended by itself. Any other reason means that it was cut: it has no end of turn.
_FINISHED = {"stop", "tool_calls", "function_call", "end_turn", "eos", "eos_token", "stop_sequence"}


@dataclass
class ChatSample:
    """
    One assistant turn, ready to train on.

    Args:
        input_ids (`list[int]`):
            The prompt as served, the reply, its end of turn.
        loss_mask (`list[bool]`):
            `True` on the reply (thinking included) and its end of turn. Of the same length.
        turn (`int`):
            Which assistant turn of the conversation, from 0.
        is_cut (`bool`):
            The reply has no end, because generation or `max_length` stopped it.
        is_thinking_empty (`bool`):
            The reply closes its thinking at once.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    turn: int
    is_cut: bool
    is_thinking_empty: bool


@dataclass
class Turn:
    """
    One assistant turn before it is tokenized.

    Args:
        turn (`int`):
            Which assistant turn of the conversation, from 0.
        prompt (`str` or `list[int]`):
            What the server fed to the target.
        reply (`str` or `list[int]`):
            What the target wrote. A list holds the end of turn as well.
        end_of_turn (`str`):
            What the target ended it with; empty if it did not.
        is_cut (`bool`):
            The reply was cut while it was generated.
    """

    turn: int
    prompt: str | list[int]
    reply: str | list[int]
    end_of_turn: str
    is_cut: bool


def render_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict],
    *,
    tools: list[dict] | None = None,
    enable_thinking: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] = (),
) -> list[ChatSample]:
    """
    Renders each assistant turn of a conversation as it was served.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer, with its chat template.
        messages (`list[dict]`):
            Chat messages, in any form that [`~data.conversations.read_messages`] reads. An assistant message with
            `completion_token_ids` is taken as these ids.
        tools (`list[dict]`, *optional*):
            The tools that were offered.
        enable_thinking (`bool`, *optional*):
            As the target was served. `None` leaves it to the template.
        chat_template_kwargs (`dict`, *optional*):
            Further variables for the template, as the target was served.
        max_length (`int`, *optional*):
            Samples are cut to this many tokens on the right.
        eos_token_ids (`Iterable[int]`, *optional*, defaults to `()`):
            Ids that end generation beside `tokenizer.eos_token_id` (`generation_config.eos_token_id`).

    Returns:
        `list[ChatSample]`: one sample for each assistant turn, in order.

    Raises:
        [`~data.conversations.RowSkipped`]: (a `ValueError`) there is no assistant turn, or one of them cannot be rendered.
    """
    messages = read_messages(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise RowSkipped("no_assistant_turn", f"roles: {', '.join(message['role'] for message in messages)}")
    renderer = ChatRenderer(
        tokenizer,
        enable_thinking=enable_thinking,
        chat_template_kwargs=chat_template_kwargs,
        max_length=max_length,
        eos_token_ids=eos_token_ids,
    )
    turns = renderer.turns(Conversation(messages, read_tools(tools)))
    samples = renderer.samples([turn for turn in turns if isinstance(turn, Turn)])
    for outcome in (*turns, *samples):
        if isinstance(outcome, RowSkipped):
            raise outcome
    return samples


class ChatRenderer:
    """
    Renders and tokenizes conversations of one target, served in one way. Arguments as in [`render_conversation`].

    [`turns`] makes text of a conversation, [`samples`] makes tokens of many turns at once. Both return a [`RowSkipped`]
    in place of a turn that cannot become a sample, so one bad turn costs nothing else.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        enable_thinking: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_length: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        if enable_thinking is not None:
            self.chat_template_kwargs["enable_thinking"] = enable_thinking

        added = tokenizer.added_tokens_decoder
        self._special_texts = {str(token) for token in added.values() if token.special}
        self._special_texts |= set(tokenizer.all_special_tokens)
        eos_ids = {*eos_token_ids} | ({tokenizer.eos_token_id} - {None})
        self._eos_texts = {str(added[i]) if i in added else tokenizer.convert_ids_to_tokens(i) for i in eos_ids}
        self._special_pattern = re.compile(
            "|".join(re.escape(text) for text in sorted(self._special_texts | self._eos_texts, key=len, reverse=True))
            or "(?!)"
        )
        self._eos_ids = eos_ids
        self._vocabulary_size = len(tokenizer)
        self._end_of_turn_of_suffix: dict[str, str] = {}
        self._form_of_reply: dict[tuple, tuple[str, ...]] = {}
        self._end_of_turn_ids: dict[str, list[int]] = {}
        self._replies_are_context_free = self._check_that_replies_are_context_free()

    # ---- text

    def turns(self, conversation: Conversation) -> list[Turn | RowSkipped]:
        """The assistant turns of a conversation as text, in order."""
        require_chat_template(self.tokenizer)
        result = []
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                try:
                    result.append(self._turn(conversation, index, len(result)))
                except RowSkipped as skipped:
                    result.append(skipped)
        return result

    def _turn(self, conversation: Conversation, index: int, number: int) -> Turn:
        message = conversation.messages[index]
        before = conversation.messages[:index]
        if not before:
            raise RowSkipped("template_refused", "the conversation starts with the assistant: nothing was served")
        prompt = self.render(conversation, before, add_generation_prompt=True)
        if "completion_token_ids" in message:
            ids = message["completion_token_ids"]
            is_cut = not ids or ids[-1] not in self._eos_ids
            return Turn(number, prompt, ids, "", is_cut)

        content = message["content"]
        reasoning = message.get("reasoning_content")
        tool_calls = message.get("tool_calls")
        if not content.strip() and not (reasoning or "").strip() and not tool_calls:
            raise RowSkipped("empty_reply")
        finish_reason = message.get("finish_reason")
        # Reasoning with no answer after it was cut while thinking, unless the server says that it ended there.
        is_cut = finish_reason not in _FINISHED if finish_reason else not content and not tool_calls

        head, middle, suffix, end_of_turn = self._reply_form(conversation, before, prompt, message)
        calls = ""
        if tool_calls:
            end = suffix.rindex(end_of_turn) if end_of_turn else len(suffix.rstrip())
            calls = suffix[:end]
            if not all(call["function"]["name"] in calls for call in tool_calls):
                raise RowSkipped("template_lost_reply", "the chat template does not print tool calls")

        # Rows that were saved with special tokens have the end of turn in their text.
        if end_of_turn and content.endswith(end_of_turn):
            content, is_cut = content[: -len(end_of_turn)], False
        reply = self._reply(prompt, head, reasoning, middle, content, is_cut) + calls
        return Turn(number, prompt, reply, "" if is_cut else end_of_turn, is_cut)

    def _reply(self, prompt: str, head: str, reasoning: str | None, middle: str, content: str, is_cut: bool) -> str:
        """What the target wrote behind `prompt`, tool calls aside."""
        opening = opened_thinking(prompt)
        if reasoning:
            if _is_thinking_closed(prompt):
                raise RowSkipped("thinking_unexpected")
            if is_cut and not content:
                return _join(head, reasoning)
            # A server's parser may leave the newlines around the tags in reasoning and content; templates take
            # them away before they print their own, and so does this.
            return _join(_join(head, reasoning), middle, content)
        if opening:
            opened, closing = opening
            if content.lstrip().startswith(opened):
                # Some servers put the tag back that the prompt had opened.
                content = content.lstrip()[len(opened) :]
                content = content.lstrip("\n") if prompt.endswith("\n") else content
            if closing in content or is_cut:
                return content
            if reasoning is None:
                raise RowSkipped("thinking_missing")
            return (head or closing + "\n\n") + content
        if any(tag in head for tags in THINKING_TAGS for tag in tags):
            # An empty think block that the template inserts and the target did not write.
            head = ""
        if not head.strip():
            # A template that prints a space between its header and the reply: the target wrote that space.
            return content if content.startswith(head) else head + content
        return head + content

    def _reply_form(
        self, conversation: Conversation, before: list[dict], prompt: str, message: dict
    ) -> tuple[str, ...]:
        """What the template prints around a reply: before, between, behind (see `_split_probe`), and the end of turn."""
        reasoning, tool_calls = bool(message.get("reasoning_content")), message.get("tool_calls")
        key = None
        header = list(self._special_pattern.finditer(prompt[-_LONGEST_HEADER:]))
        if header and not tool_calls:
            # Templates decide by roles, by options and by what a message has, not by what it says; where they look at
            # words (a switch that a user types), they print another header.
            key = (
                prompt[-_LONGEST_HEADER:][header[-1].start() :],
                reasoning,
                tuple((m["role"], "reasoning_content" in m, "tool_calls" in m) for m in before),
                json.dumps(
                    [conversation.tools is not None, conversation.chat_template_kwargs], sort_keys=True, default=str
                ),
            )
            if key in self._form_of_reply:
                return self._form_of_reply[key]
        probe = {"role": "assistant", "content": _CONTENT_MARK if message["content"] or not tool_calls else ""}
        if reasoning:
            probe["reasoning_content"] = _REASONING_MARK
        if tool_calls:
            probe["tool_calls"] = tool_calls
        rendered = self.render(conversation, [*before, probe])
        head, middle, suffix = self._split_probe(prompt, rendered, probe)
        form = head, middle, suffix, self._end_of_turn(conversation, before, suffix, bool(tool_calls))
        if key is not None and len(self._form_of_reply) < _MOST_FORMS:
            self._form_of_reply[key] = form
        return form

    def _split_probe(self, prompt: str, rendered: str, probe: dict) -> tuple[str, str, str]:
        """
        What the template prints (from the end of the prompt to the reasoning or, without it, the content; between the
        two; behind the content). Tool calls are behind the content; if there is no content, so is all that the
        template prints behind the reasoning.
        """
        tail = rendered[len(prompt) :] if rendered.startswith(prompt) else None
        has_content = bool(probe["content"])
        if has_content and _CONTENT_MARK not in rendered:
            raise RowSkipped("template_lost_reply")
        if "reasoning_content" in probe:
            if tail is not None and _REASONING_MARK in tail:
                head, rest = tail.split(_REASONING_MARK, 1)
                if not has_content:
                    return head, "", rest
                if _CONTENT_MARK in rest:
                    return head, *rest.split(_CONTENT_MARK, 1)
            opening = opened_thinking(prompt)
            opened, closing = opening or self._thinking_tags_of_template()
            head = "" if opening else f"{opened}\n"
            if has_content:
                return head, f"\n{closing}\n\n", rendered.rsplit(_CONTENT_MARK, 1)[1]
            return head, "", f"\n{closing}\n\n{_behind_prompt(prompt, rendered).lstrip()}"
        if not has_content:
            tail = tail if tail is not None else _behind_prompt(prompt, rendered)
            empty_thinking = _EMPTY_THINKING.match(tail)
            head = empty_thinking.group() if empty_thinking else ""
            return head, "", tail[len(head) :]
        before, suffix = rendered.rsplit(_CONTENT_MARK, 1)
        return before[len(prompt) :] if tail is not None else "", "", suffix

    def _end_of_turn(self, conversation: Conversation, before: list[dict], suffix: str, has_tool_calls: bool) -> str:
        """
        The text that the target ends a turn with, up to and including the token that stops generation.

        It is what the template prints behind a reply both at the end and in the middle of a conversation: some print more
        at the end (the end of the document), and the end of turn and `eos_token` may differ.
        """
        if has_tool_calls:
            rendered = self.render(conversation, [*before, {"role": "assistant", "content": _CONTENT_MARK}])
            if _CONTENT_MARK not in rendered:
                raise RowSkipped("template_lost_reply")
            plain = self._end_of_turn(conversation, before, rendered.rsplit(_CONTENT_MARK, 1)[1], False)
            if plain and plain in suffix:
                return plain
            # Some templates end a turn with tool calls in another way (Llama 3.1: <|eom_id|>), or not at all.
            matches = list(self._special_pattern.finditer(suffix.rstrip()))
            return matches[-1].group() if matches and matches[-1].end() == len(suffix.rstrip()) else ""
        if suffix not in self._end_of_turn_of_suffix:
            self._end_of_turn_of_suffix[suffix] = self._find_end_of_turn(conversation, before, suffix)
        return self._end_of_turn_of_suffix[suffix]

    def _find_end_of_turn(self, conversation: Conversation, before: list[dict], suffix: str) -> str:
        reply = {"role": "assistant", "content": _CONTENT_MARK}
        try:
            followed = self.render(conversation, [*before, reply, {"role": "user", "content": "Next."}])
            followed = followed.rsplit(_CONTENT_MARK, 1)[1]
        except (RowSkipped, IndexError):
            followed = suffix
        common = os.path.commonprefix([suffix, followed])
        # The order matters: a stop token that the template prints in both places; the last special token that it
        # prints in both; one that it prints at the end; the header of the next turn where that stops generation (GLM).
        matches = list(self._special_pattern.finditer(common))
        for match in matches:
            if match.group() in self._eos_texts:
                return common[: match.end()]
        if matches:
            return common[: matches[-1].end()]
        matches = list(self._special_pattern.finditer(suffix))
        for match in matches:
            if match.group() in self._eos_texts:
                return suffix[: match.end()]
        if matches:
            return suffix[: matches[0].end()]
        match = self._special_pattern.search(followed)
        if match and match.group() in self._eos_texts and not followed[: match.start()].strip():
            return followed[: match.end()]
        return ""

    def render(self, conversation: Conversation, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """
        Some messages of a conversation as text, with its tools and template options.

        Raises:
            [`~data.conversations.RowSkipped`]: the template refuses them.
        """
        options = {**self.chat_template_kwargs, **conversation.chat_template_kwargs}
        problem = None
        for arguments_as_text in (False, True):
            try:
                return self.tokenizer.apply_chat_template(
                    _for_template(messages, arguments_as_text),
                    tools=conversation.tools,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **options,
                )
            except Exception as error:  # a template is foreign code: whatever it raises is its refusal
                problem = problem or error
                # Older templates glue the arguments of a tool call to other text, so they must be text.
                if not any(message.get("tool_calls") for message in messages):
                    break
        raise RowSkipped("template_refused", f"{type(problem).__name__}: {problem}")

    def _thinking_tags_of_template(self) -> tuple[str, str]:
        """The tags around reasoning, for a template that takes reasoning out of what it prints."""
        template = json.dumps(self.tokenizer.chat_template)
        tags = next((tags for tags in THINKING_TAGS if tags[1] in template), None)
        if tags is None:
            raise RowSkipped("thinking_not_rendered")
        return tags

    # ---- tokens

    def samples(self, turns: list[Turn | TokenizedRow]) -> list[ChatSample | RowSkipped]:
        """Tokenizes turns, all of them in one call, and cuts them to `max_length`."""
        texts = []
        for turn in turns:
            if isinstance(turn, Turn):
                if isinstance(turn.prompt, str):
                    texts.append(turn.prompt)
                if isinstance(turn.reply, str):
                    texts.append(turn.reply if self._replies_are_context_free else turn.prompt + turn.reply)
        encoded = iter(self.encode(texts))
        return [self._sample(turn, encoded) for turn in turns]

    def _sample(self, turn: Turn | TokenizedRow, encoded: "Iterable[list[int]]") -> ChatSample | RowSkipped:
        if isinstance(turn, TokenizedRow):
            number, ids, mask = 0, turn.input_ids, turn.loss_mask
            if (problem := self._problem_of(ids)) is not None:
                return problem
            is_cut = bool(mask) and mask[-1] and ids[-1] not in self._eos_ids
            start = self.tokenizer.decode([i for i, is_reply in zip(ids, mask, strict=True) if is_reply][:16])
        else:
            number, is_cut = turn.turn, turn.is_cut
            prompt = next(encoded) if isinstance(turn.prompt, str) else turn.prompt
            if isinstance(turn.reply, str):
                start = turn.reply
                reply = next(encoded)
                if not self._replies_are_context_free:
                    # The tokens of the prompt do not change with what follows, unless the two merge at the border.
                    reply = reply[len(prompt) :] if reply[: len(prompt)] == prompt else self.encode([turn.reply])[0]
                end = self._encode_end_of_turn(turn.end_of_turn)
                if not self._eos_ids.isdisjoint(reply) or (end and end[-1] in reply):
                    return RowSkipped("end_of_turn_in_reply")
                reply = reply + end
            else:
                reply = turn.reply
                if (problem := self._problem_of(reply)) is not None:
                    return problem
                start = self.tokenizer.decode(reply[:16])
                if all(i in self._eos_ids for i in reply):
                    return RowSkipped("empty_reply")
            ids = prompt + reply
            mask = [False] * len(prompt) + [True] * len(reply)
        if self.max_length is not None and len(ids) > self.max_length:
            is_cut = is_cut or mask[-1]
            had_supervision = any(mask)
            ids, mask = ids[: self.max_length], mask[: self.max_length]
            if had_supervision and not any(mask):
                return RowSkipped("prompt_too_long", f"the reply starts behind max_length={self.max_length}")
        return ChatSample(ids, mask, number, is_cut, _EMPTY_THINKING.match(start) is not None)

    def _problem_of(self, ids: list[int]) -> RowSkipped | None:
        """Of token ids that came with the row: those of another vocabulary."""
        largest = max(ids, default=0)
        if largest >= self._vocabulary_size:
            return RowSkipped("bad_token_ids", f"id {largest}, but the tokenizer has {self._vocabulary_size} ids")
        return None

    def _encode_end_of_turn(self, text: str) -> list[int]:
        if not text:
            return []
        if text not in self._end_of_turn_ids:
            self._end_of_turn_ids[text] = self.encode([text])[0]
        return self._end_of_turn_ids[text]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids that `tokenizer(text, add_special_tokens=False)` gives, without the cost of its bookkeeping."""
        if not texts:
            return []
        if self.tokenizer.is_fast:
            core = self.tokenizer.backend_tokenizer
            core.no_truncation()
            core.no_padding()
            return [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def _check_that_replies_are_context_free(self) -> bool:
        """
        Whether a text has the same tokens at the start of the input as behind a special token. SentencePiece tokenizers
        put a space before the first word, so for them a reply must be tokenized behind its prompt.
        """
        if not self._special_texts:
            return False
        special = sorted(self._special_texts)[0]
        (alone,), (behind,), (mark,) = (self.encode([text]) for text in ("A", special + "A", special))
        return behind == mark + alone and self.tokenizer.decode(alone) == "A"


def _for_template(messages: list[dict], arguments_as_text: bool) -> list[dict]:
    """The messages with the keys that templates read."""
    result = []
    for message in messages:
        keys = ("role", "content", "reasoning_content", "tool_calls", "name", "tool_call_id")
        message = {key: message[key] for key in keys if key in message}
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]  # gpt-oss reads this name
        if arguments_as_text and "tool_calls" in message:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in message["tool_calls"]
            ]
        result.append(message)
    return result


def require_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """
    Raises:
        `ValueError`: there is no chat template, so nothing can be rendered.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template: give the one that the target is served with (`--chat-template FILE`)."
        )


def opened_thinking(prompt: str) -> tuple[str, str] | None:
    """The thinking tags, if the generation prompt opens thinking and leaves it open."""
    end = prompt.rstrip()
    return next((tags for tags in THINKING_TAGS if end.endswith(tags[0])), None)


def _is_thinking_closed(prompt: str) -> bool:
    """Whether the generation prompt ends with a think block that is over."""
    end = prompt.rstrip()
    return any(end.endswith(closing) for _, closing in THINKING_TAGS)


def _behind_prompt(prompt: str, rendered: str) -> str:
    """What `rendered` has behind the part that it shares with `prompt`, a tag being shared as a whole or not at all."""
    common = os.path.commonprefix([prompt, rendered])
    return rendered[max(common.rfind(end) for end in "\n>]") + 1 :]


def _join(*parts: str) -> str:
    """Joins parts; where both sides of a border have newlines, those of the template (the longer run) stay."""
    result = parts[0]
    for part in parts[1:]:
        left, right = result.rstrip("\n"), part.lstrip("\n")
        newlines = max(len(result) - len(left), len(part) - len(right))
        both = len(result) > len(left) and len(part) > len(right)
        result = left + "\n" * newlines + right if both else result + part
    return result
