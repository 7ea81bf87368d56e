# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
from pathlib import Path

import pytest
from mixture_examples import CASES

from hf_dflash.data.conversations import RowSkipped
from hf_dflash.data.mixture_file import load_mixture
from hf_dflash.data.on_policy import PromptConversation, Reply
from hf_dflash.data.prompt_mapping import map_row


RECIPE = Path(__file__).parents[2] / "recipes" / "mixtures" / "qwen36.yaml"


@pytest.mark.parametrize("name", CASES)
def test_the_reference_mixture_reads_each_set(name):
    (source,) = (source for source in load_mixture(RECIPE).sources if source.name == name)
    row, messages, tools = CASES[name]
    assert map_row(row, source.mapping) == (messages, tools)


def test_every_source_of_the_reference_mixture_has_a_case_and_a_licence():
    sources = load_mixture(RECIPE).sources
    assert {source.name for source in sources} == CASES.keys()
    assert all(source.license for source in sources)


def test_a_mapped_tool_conversation_goes_on_when_the_target_calls_the_same_tool():
    row, _, _ = CASES["glaive-function-calling-v2"]
    messages, tools = map_row(row, {"system": "system", "transcript": "chat"})
    conversation = PromptConversation({"messages": messages, "tools": tools})
    call = {"id": "c", "type": "function", "function": {"name": "get_tide", "arguments": '{"port": "Brest"}'}}
    conversation.add(Reply("", tool_calls=[call], finish_reason="tool_calls"))
    assert conversation.messages[-1]["role"] == "tool"


@pytest.mark.parametrize(
    ("row", "mapping", "reason"),
    [
        ({"q": 5}, {"prompt": "q"}, "wrong_type"),
        ({"other": "x"}, {"prompt": "q"}, "missing_field"),
        ({"q": "  "}, {"prompt": "q"}, "missing_field"),
        ({"m": "[broken"}, {"messages": "m"}, "bad_json"),
        ({"m": [{"role": "wizard", "content": "x"}]}, {"messages": "m"}, "unknown_role"),
        ({"s": "SYSTEM: use {broken", "c": "USER: hi"}, {"system": "s", "transcript": "c"}, "bad_json"),
        ({"c": "no turns here"}, {"transcript": "c"}, "missing_field"),
    ],
)
def test_a_row_that_does_not_fit_is_counted_by_reason(row, mapping, reason):
    with pytest.raises(RowSkipped) as skipped:
        map_row(row, mapping)
    assert skipped.value.reason == reason
