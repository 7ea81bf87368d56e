# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest

from hf_dflash.data import conversations
from hf_dflash.data.conversations import ROLES, RowSkipped, TokenizedRow, read_messages, read_row, read_tools


EXPECTED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": EXPECTED},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "response": "a"},
        {"prompt": [EXPECTED[0]], "completion": [EXPECTED[1]]},
        {"prompt": [EXPECTED[0]], "completion": "a"},
        # As a column of structs gives them: every key in every message.
        {"messages": [{"role": "user", "content": "q", "tool_calls": None, "from": None, "value": None}, EXPECTED[1]]},
        {"messages": [{"role": None, "content": None, "from": "human", "value": "q"}, EXPECTED[1]]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, EXPECTED[1]]},
    ],
)
def test_all_layouts_are_one_conversation(row):
    assert read_row(row).messages == EXPECTED


def test_the_documented_tables_name_every_layout_and_every_role():
    for name, role in ROLES.items():
        assert name in conversations.__doc__
        assert read_messages([{"role": name, "content": "x"}])[0]["role"] == role
    for reason in ("empty_reply", "unknown_role"):
        assert reason in conversations.SKIP_REASONS


def test_a_system_column_is_a_first_message_unless_there_is_one():
    row = {"system": "Be brief.", "prompt": "q", "completion": "a"}
    assert read_row(row).messages == [{"role": "system", "content": "Be brief."}, *EXPECTED]
    own = [{"role": "system", "content": "mine"}, *EXPECTED]
    assert read_row({"system": "Be brief.", "messages": own}).messages == own


def test_how_a_row_was_served_goes_with_it():
    row = {"prompt": "q", "completion": "a", "enable_thinking": False, "chat_template_kwargs": {"effort": "low"}}
    assert read_row(row).chat_template_kwargs == {"effort": "low", "enable_thinking": False}
    row = {"messages": [*EXPECTED, EXPECTED[0], {"role": "assistant", "content": "b"}], "finish_reason": "length"}
    messages = read_row(row).messages
    assert "finish_reason" not in messages[1] and messages[3]["finish_reason"] == "length"


def test_completion_ids_belong_to_the_last_turn():
    row = read_row({"messages": EXPECTED[:1], "completion_token_ids": [1, 2]})
    assert row.messages[1] == {"role": "assistant", "content": "", "completion_token_ids": [1, 2]}
    row = read_row({"messages": EXPECTED, "completion_token_ids": [1, 2]})
    assert row.messages[1] == {"role": "assistant", "content": "a", "completion_token_ids": [1, 2]}
    assert read_row({"input_ids": [1, 2], "loss_mask": [0, True]}) == TokenizedRow([1, 2], [False, True])


def test_tools_given_as_a_list_as_its_json_or_not_at_all():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read_tools(tools) == read_tools('[{"type": "function", "function": {"name": "f"}}]') == tools
    assert read_tools(None) is read_tools([]) is read_tools("") is read_tools("[]") is None
    with pytest.raises(RowSkipped, match="wrong_type: tools is not a list of objects"):
        read_tools(["f"])


def test_the_reasoning_has_one_name_whatever_the_row_calls_it():
    for name in ("reasoning_content", "reasoning", "thinking"):
        (message,) = read_messages([{"role": "assistant", "content": "a", name: "r"}])
        assert message == {"role": "assistant", "content": "a", "reasoning_content": "r"}
