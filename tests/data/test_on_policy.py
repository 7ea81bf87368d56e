# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest

from hf_dflash.data.on_policy import PromptConversation, Reply


def answer(conversation, *replies):
    asked = []
    for reply in replies:
        asked.append([(message["role"], message["content"]) for message in conversation.messages])
        conversation.add(reply)
    return asked


def test_every_assistant_turn_is_written_anew_and_shown_to_the_next():
    conversation = PromptConversation(
        {
            "id": 5,
            "licence": "MIT",
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "of another model"},
                {"from": "human", "value": "two"},
                {"from": "gpt", "value": "of another model"},
            ],
        }
    )
    first = Reply("first", reasoning_content="hm", completion_token_ids=[4, 5], num_tokens=2)
    asked = answer(conversation, first, Reply("second", completion_token_ids=[6], finish_reason="length"))
    assert asked == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "one"), ("assistant", "first"), ("user", "two")],
    ]
    assert conversation.is_finished
    assert conversation.completion_row() == {
        "id": "5",
        "licence": "MIT",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {
                "role": "assistant",
                "content": "first",
                "reasoning_content": "hm",
                "finish_reason": "stop",
                "completion_token_ids": [4, 5],
            },
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "second"},
        ],
        "finish_reason": "length",
        "completion_token_ids": [6],
    }


@pytest.mark.parametrize("reply", [Reply("cut", finish_reason="length"), Reply(" ")])
def test_a_conversation_ends_behind_a_reply_that_is_cut_or_empty(reply):
    turns = [("user", "one"), ("assistant", "a"), ("user", "two"), ("assistant", "b"), ("user", "three")]
    conversation = PromptConversation({"messages": [{"role": r, "content": c} for r, c in turns]})
    answer(conversation, reply)
    assert conversation.is_finished
    row = conversation.completion_row()
    assert row["turns_left_out"] == 2
    assert [message["content"] for message in row["messages"]] == ["one", reply.content]


def tool_conversation():
    call = {"id": "recorded", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    return PromptConversation(
        {
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
            "messages": [
                {"role": "user", "content": "Is it warm in Rome?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "31 degrees", "tool_call_id": "recorded"},
                {"role": "assistant", "content": "It is."},
            ],
        }
    )


def test_a_tool_result_follows_only_the_same_call():
    conversation = tool_conversation()
    call = {"id": "new", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Roma"}'}}
    answer(conversation, Reply("", tool_calls=[call], finish_reason="tool_calls"))
    assert not conversation.is_finished
    assert conversation.messages[-1] == {"role": "tool", "content": "31 degrees", "tool_call_id": "new"}
    answer(conversation, Reply("Yes, 31 degrees."))
    assert conversation.is_finished and "turns_left_out" not in conversation.completion_row()

    conversation = tool_conversation()
    answer(conversation, Reply("I do not know."))
    assert conversation.is_finished
    assert conversation.completion_row()["turns_left_out"] == 1


def test_a_row_without_an_id_gets_the_same_one_every_time():
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"messages": [{"role": "human", "content": "a"}]}]
    first, second, third = (PromptConversation(row).id for row in rows)
    assert first == third != second
