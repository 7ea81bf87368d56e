# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import datasets
import pytest

from hf_dflash.evaluation.prompt_sets import PROMPT_SETS, read_prompt_set


# The columns of each set on the Hub that are read.
ROWS = {
    "gsm8k": {"question": "How many?"},
    "math500": {"problem": "What is x?"},
    "humaneval": {"prompt": "def f():", "task_id": "HumanEval/0"},
    "mbpp": {"prompt": "Write f.", "task_id": 1},
    "mtbench": {"prompt": ["Write a poem.", "Now without rhymes."], "prompt_id": 1},
}


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_every_set_becomes_user_turns_with_its_own_ids(name):
    rows = datasets.Dataset.from_list([ROWS[name]] * 5)
    prompts = read_prompt_set(name, rows, limit=3, seed=1)
    assert len(prompts) == len({prompt["id"] for prompt in prompts}) == 3
    assert {prompt["domain"] for prompt in prompts} == {name}
    turns = prompts[0]["turns"]
    assert len(turns) == (2 if name == "mtbench" else 1)
    text = ROWS[name].get("question") or ROWS[name].get("problem") or ROWS[name]["prompt"]
    assert (text[0] if isinstance(text, list) else text) in turns[0]


def test_the_same_seed_draws_the_same_prompts():
    rows = datasets.Dataset.from_list([{"question": str(i)} for i in range(50)])
    assert read_prompt_set("gsm8k", rows, 10, seed=3) == read_prompt_set("gsm8k", rows, 10, seed=3)
    assert read_prompt_set("gsm8k", rows, 10, seed=3) != read_prompt_set("gsm8k", rows, 10, seed=4)
