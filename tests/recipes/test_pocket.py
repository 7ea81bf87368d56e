# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The shipped pocket target and the completions it wrote."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


POCKET = Path(__file__).resolve().parents[2] / "recipes" / "pocket"
MAX_MODEL_BYTES = 10_000_000
MODEL_FILES = ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def read_completions(part: str) -> list[dict]:
    with gzip.open(POCKET / f"completions_{part}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POCKET)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def parts():
    return {part: read_completions(part) for part in ("train", "heldout")}


def repeated_share(ids: list[int], n: int = 4) -> tuple[int, int]:
    """(n-grams that stood earlier in the same completion, all n-grams)."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)


def render(tokenizer, row: dict) -> tuple[str, str]:
    prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
    return prompt, tokenizer.apply_chat_template(row["messages"], tokenize=False)


@pytest.mark.compat
def test_it_is_a_hybrid_of_the_reference_architecture_and_small(model):
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert {"linear_attention", "full_attention"} == set(model.config.layer_types)
    assert 3e6 <= sum(p.numel() for p in model.parameters()) <= 5e6
    assert sum((POCKET / name).stat().st_size for name in MODEL_FILES) <= MAX_MODEL_BYTES


def test_the_shipped_weights_are_bfloat16_and_round_trip(model, tmp_path):
    stored = AutoModelForCausalLM.from_pretrained(POCKET, dtype="auto")
    assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
    stored.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.mark.compat
def test_special_tokens_are_distinct_and_reserved_rows_are_never_produced(tokenizer, model, parts):
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, pad) and end != pad
    assert set(model.generation_config.eos_token_id) == {end, pad}
    reserved = set(tokenizer.convert_tokens_to_ids([f"<|reserved_{i}|>" for i in range(8)]))
    assert len(reserved) == 8 and max(reserved) < model.config.vocab_size
    assert not any(reserved.intersection(row["completion_token_ids"]) for rows in parts.values() for row in rows)


@pytest.mark.compat
def test_text_survives_the_tokenizer(tokenizer):
    text = "def f(x, *, y=None):\n    '''naïve → ✓'''\n\treturn {'a': [x ** 2 for _ in range(10)]}\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_two_thinking_modes_end_the_prompt_as_the_reference_template_does(tokenizer):
    chat = [{"role": "user", "content": "hello"}]
    start = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == start
    off = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert off == start + "\n</think>\n\n"


def test_thinking_of_earlier_turns_is_left_out(tokenizer):
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "secret", "content": "b"}]
    text = tokenizer.apply_chat_template([*turn, {"role": "user", "content": "c"}], tokenize=False)
    assert "secret" not in text and "<think>" not in text


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_prompt_and_completion_are_the_rendered_conversation(tokenizer, parts, part):
    for row in parts[part]:
        if row["finish_reason"] == "stop":
            prompt, whole = render(tokenizer, row)
            assert prompt + tokenizer.decode(row["completion_token_ids"]) + "\n" == whole


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_every_completion_ends_its_turn_or_says_that_it_was_cut(model, parts, part):
    stops = model.generation_config.eos_token_id
    for row in parts[part]:
        ids = row["completion_token_ids"]
        assert (ids[-1] in stops) == (row["finish_reason"] == "stop")
        assert row["finish_reason"] in ("stop", "length")
        assert not set(stops).intersection(ids[:-1])


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_at_most_a_fifth_of_the_4grams_repeat(parts, part):
    counts = [repeated_share(row["completion_token_ids"]) for row in parts[part]]
    assert sum(repeated for repeated, _ in counts) <= 0.2 * sum(total for _, total in counts)


def test_there_are_enough_completions_and_no_held_out_prompt_is_in_the_training_part(parts):
    train, heldout = ({row["messages"][0]["content"] for row in parts[part]} for part in ("train", "heldout"))
    assert len(parts["train"]) >= 3000 and len(parts["heldout"]) >= 100
    assert not train & heldout
    ids = [row["id"] for rows in parts.values() for row in rows]
    assert len(set(ids)) == len(ids)


def test_shipped_completions_are_the_greedy_ones_of_the_shipped_weights(tokenizer, model, parts):
    # One pass over prompt + completion: each token must be the argmax, up to the first near-tie (margin under 1e-3).
    checked = 0
    for row in parts["heldout"][:20]:
        prompt = tokenizer(render(tokenizer, row)[0])["input_ids"]
        completion = torch.tensor(row["completion_token_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tolist()]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        best = logits.topk(2, dim=-1)
        ties = (best.values[:, 0] - best.values[:, 1] < 1e-3).nonzero()[:, 0]
        end = int(ties[0]) if len(ties) else len(completion)
        assert torch.equal(best.indices[:end, 0], completion[:end]), row["id"]
        checked += end
    assert checked > 500


@pytest.fixture(scope="module")
def chores(tmp_path_factory):
    work = tmp_path_factory.mktemp("chores")
    command = [sys.executable, str(POCKET / "make_tasks.py"), "--work", str(work), "--rows", "1500"]
    subprocess.run(command, check=True, capture_output=True)
    with gzip.open(work / "tasks.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_a_chore_is_in_one_split_and_its_question_says_what_its_answer_needs(chores):
    assert len({row["question"] for row in chores}) == len(chores)
    assert {row["split"] for row in chores} == {"train", "prompts", "heldout"}
    assert len({row["source"] for row in chores}) == 16
    for row in (row for row in chores if row["source"].endswith(("sql_table", "data_class", "command_line"))):
        fields = re.findall(r"(\w+) \((str|int|float|bool)\)", row["question"])
        assert fields and all(name in row["answer"] for name, _ in fields)


def test_the_shipped_answers_to_chores_are_what_the_target_wrote_not_the_corpus(parts, chores):
    """A chore's own answer would be no completion of the target: some differ."""
    written = {row["id"]: row["messages"][1]["content"] for rows in parts.values() for row in rows}
    asked = [row for row in chores if row["id"] in written]
    right = [row["answer"].strip() == written[row["id"]].strip() for row in asked]
    assert len(asked) > 30 and 0.5 < sum(right) / len(right) < 1
