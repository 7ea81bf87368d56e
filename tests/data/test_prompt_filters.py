# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from mixture_examples import user

from hf_dflash.data.prompt_filters import PromptFilters


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"min_characters": 41}, "too_short"),
        ({"max_characters": 42}, "too_long"),
        ({"max_turns": 1}, "too_many_turns"),
        ({"languages": ["de", "fr"]}, "other_language"),
        ({"min_characters": 40, "max_characters": 43, "max_turns": 2, "languages": ["en"]}, None),
    ],
)
def test_each_filter_says_why_it_removes_a_prompt_and_one_within_all_limits_stays(filters, expected):
    messages = [
        {"role": "system", "content": "sys"},
        user("How are you today?"),
        {"role": "assistant", "content": ""},
        user("And what is the time?!"),
    ]
    assert PromptFilters(**filters).reason_against(messages) == expected
