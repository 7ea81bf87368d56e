# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import random
from pathlib import Path

import pytest

from hf_dflash.data.conversations import RowSkipped
from hf_dflash.data.mixture import (
    EvaluationOverlap,
    NearDuplicates,
    PromptFilters,
    _words_of,
    build_mixture,
    format_report,
    load_mixture,
    main,
    map_row,
)
from hf_dflash.data.on_policy import PromptConversation


RECIPE = Path(__file__).parents[2] / "recipes" / "mixtures" / "qwen36.yaml"
FILLER = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon".split()
)


def user(text):
    return {"role": "user", "content": text}


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_mixture(tmp_path, text):
    path = tmp_path / "mixture.yaml"
    path.write_text(f"output: {tmp_path}/out\n{text.replace('TMP', str(tmp_path))}")
    return load_mixture(path)


# ---- the reference mixture: rows of our own in each set's schema

GLAIVE_FUNCTION = {
    "name": "get_tide",
    "description": "Height of the tide",
    "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
}
GLAIVE_SYSTEM = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(GLAIVE_FUNCTION, indent=4)
    + "\n"
)
GLAIVE_CHAT = (
    "USER: How high is the water in Brest?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "get_tide", "arguments": \'{"port": "Brest"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"height": 3.1}\n\n\n'
    "ASSISTANT: It is 3.1 metres. <|endoftext|>\n\n\n"
    "USER: Thanks!\n\n\nASSISTANT: You are welcome. <|endoftext|>\n"
)
GLAIVE_CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "get_tide", "arguments": {}}}]}  # fmt: skip

CASES = {
    "glaive-function-calling-v2": (
        {"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT},
        [
            user("How high is the water in Brest?"),
            GLAIVE_CALL,
            {"role": "tool", "content": '{"height": 3.1}'},
            {"role": "assistant", "content": ""},
            user("Thanks!"),
        ],
        [{"type": "function", "function": GLAIVE_FUNCTION}],
    ),
    "evol-codealpaca": (
        {"instruction": "Sort a list in Rust.", "output": "v.sort();"},
        [user("Sort a list in Rust.")],
        None,
    ),
    "magicoder-oss-instruct": (
        {
            "lang": "python",
            "raw_index": 3,
            "index": 7,
            "seed": "def f(x):",
            "openai_fingerprint": "fp",
            "problem": "Write f.",
            "solution": "pass",
        },
        [user("Write f.")],
        None,
    ),
    "magicoder-evol-instruct": (
        {"instruction": "Explain recursion.", "response": "See recursion."},
        [user("Explain recursion.")],
        None,
    ),
    "agentic-coding-trajectories": (
        {
            "session_id": "made-up::1",
            "source_dataset": "made-up",
            "source_id": "1",
            "agent_framework": "swe-agent",
            "recorded_model": "unknown",
            "messages_json": json.dumps(
                [
                    {"role": "system", "content": "You can use a shell."},
                    user("Fix the failing test."),
                    {"role": "assistant", "content": "ls"},
                    user("OBSERVATION: setup.py"),
                ]
            ),
            "n_turns": 1,
            "max_isl": 40,
            "total_tokens": 41,
            "ground_truth_meta_json": "{}",
        },
        [{"role": "system", "content": "You can use a shell."}, user("Fix the failing test.")],
        None,
    ),
    "qwen3.5-tool-calling-v2": (
        {
            "messages": [
                {"role": "system", "content": "You have these functions: {}"},
                user("Find a lamp."),
                {"role": "assistant", "content": '{"name": "search"}'},
                user("FUNCTION RESPONSE: []"),
                {"role": "assistant", "content": "There is none."},
            ]
        },
        [
            {"role": "system", "content": "You have these functions: {}"},
            user("Find a lamp."),
            {"role": "assistant", "content": ""},
            user("FUNCTION RESPONSE: []"),
        ],
        None,
    ),
    "openorca": (
        {"id": "flan.1", "system_prompt": "Think aloud.", "question": "Is ice cold?", "response": "Yes."},
        [{"role": "system", "content": "Think aloud."}, user("Is ice cold?")],
        None,
    ),
}


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
    from hf_dflash.data.on_policy import Reply

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


# ---- what is removed


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
def test_filters(filters, expected):
    messages = [
        {"role": "system", "content": "sys"},
        user("How are you today?"),
        {"role": "assistant", "content": ""},
        user("And what is the time?!"),
    ]
    assert PromptFilters(**filters).reason_against(messages) == expected


def jaccard(first, second, length=5):
    def grams(words):
        return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}

    return len(grams(first) & grams(second)) / len(grams(first) | grams(second))


def test_near_duplicates_are_those_of_brute_force_away_from_the_border():
    draw = random.Random(0)
    texts = [[draw.choice(FILLER) for _ in range(120)] for _ in range(60)]
    for text in texts[:60]:
        changed = list(text)
        for _ in range(draw.choice([0, 1, 1, 4, 8, 20])):
            changed[draw.randrange(120)] = f"new{draw.randrange(1000)}"
        texts.append(changed)
    known, kept = NearDuplicates(similarity=0.7), []
    compared = {True: 0, False: 0}
    for text in texts:
        highest = max((jaccard(text, other) for other in kept), default=0.0)
        is_new = known.add_unless_known(text)
        if not 0.5 < highest < 0.86:
            assert is_new == (highest < 0.7), highest
            compared[is_new] += 1
        if is_new:
            kept.append(text)
    assert min(compared.values()) > 15


def test_overlap_with_evaluation_prompts_is_ten_words_in_a_row():
    evaluation = [FILLER[:15], ["what", "is", "two", "plus", "two"], ["too", "short"]]
    overlap = EvaluationOverlap(evaluation, words=10)
    assert ["x", *FILLER[3:13], "y"] in overlap
    assert ["x", *FILLER[3:12], "y"] not in overlap
    assert ["hello", "what", "is", "two", "plus", "two"] in overlap
    assert ["too", "short"] not in overlap


# ---- the whole


def prompts(texts):
    return [{"text": text} for text in texts]


def test_a_mixture_removes_counts_and_samples(tmp_path):
    long = [" ".join(random.Random(n).sample(FILLER, 20)) for n in range(60)]
    write_jsonl(tmp_path / "a.jsonl", [*prompts(long[:20]), "{broken", {"other": 1}, *prompts(["hi"])])
    # The same prompts in other letters, nearly the same ones, new ones, and one that will be measured.
    near = [text + " and more" for text in long[:4]]
    write_jsonl(tmp_path / "b.jsonl", prompts([long[5].upper() + "!", *near, *long[20:59], long[59] + " please"]))
    write_jsonl(tmp_path / "eval.jsonl", [{"messages": [user(long[59])]}])
    text = """
seed: 3
filters: {min_characters: 5}
near_duplicates: {similarity: 0.7}
evaluation_prompts: {path: TMP/eval.jsonl}
sources:
  - {name: a, path: TMP/a.jsonl, mapping: {prompt: text}}
  - {name: b, path: TMP/b.jsonl, mapping: {prompt: text}, rows: 30}
"""
    mixture = write_mixture(tmp_path, text)
    manifest = build_mixture(mixture, disable_tqdm=True)
    reports = manifest["report"]
    assert reports["a"] == {"read": 23, "bad_json": 1, "missing_field": 1, "too_short": 1, "written": 20}
    b = reports["b"]
    assert (b["read"], b["exact_duplicate"], b["evaluation_overlap"], b["written"]) == (45, 1, 1, 30)
    # Sampling stops when it has enough: some of the near-duplicates are met before.
    assert b["near_duplicate"] + b["not_sampled"] == 13 and b["missing"] == 0
    rows = read_jsonl(tmp_path / "out" / "prompts.jsonl")
    assert len(rows) == manifest["rows"] == 50
    assert len({row["id"] for row in rows}) == 50
    sources = [row["source"] for row in rows]
    assert sources != sorted(sources)
    assert all(row["messages"][0]["content"] not in near for row in rows)
    assert "exact_duplicate" in format_report(manifest) and "65" not in format_report(manifest).splitlines()[0]
    assert json.loads((tmp_path / "out" / "mixture.json").read_text())["report"] == reports
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mixture.json", "prompts.jsonl"]

    # What is drawn depends on the prompts and the seed, not on the order of the files or their rows.
    first = (tmp_path / "out" / "prompts.jsonl").read_text()
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    write_jsonl(tmp_path / "b.jsonl", lines[::-1])
    build_mixture(mixture, disable_tqdm=True)
    assert sorted((tmp_path / "out" / "prompts.jsonl").read_text()) == sorted(first)
    again = write_mixture(tmp_path, text.replace("seed: 3", "seed: 4"))
    build_mixture(again, disable_tqdm=True)
    assert (tmp_path / "out" / "prompts.jsonl").read_text() != first


def test_weights_share_the_rows_and_what_is_missing_is_reported(tmp_path):
    for name, count in (("a", 50), ("b", 50), ("c", 5)):
        write_jsonl(tmp_path / f"{name}.jsonl", prompts([f"{name} question number {n}" for n in range(count)]))
    sources = "\n".join(
        f"  - {{name: {name}, path: TMP/{name}.jsonl, mapping: {{prompt: text}}, weight: {weight}}}"
        for name, weight in (("a", 2), ("b", 1), ("c", 1))
    )
    manifest = build_mixture(write_mixture(tmp_path, f"rows: 40\nsources:\n{sources}\n"), disable_tqdm=True)
    written = {name: (report["written"], report["missing"]) for name, report in manifest["report"].items()}
    assert written == {"a": (20, 0), "b": (10, 0), "c": (5, 5)}


def test_the_prompt_set_is_what_generate_reads(tmp_path, capsys):
    rows = [CASES["glaive-function-calling-v2"][0]]
    write_jsonl(tmp_path / "glaive" / "rows.jsonl", rows)
    (tmp_path / "mixture.yaml").write_text(
        f"output: {tmp_path}/out\nsources:\n"
        f"  - {{name: g, path: {tmp_path}/glaive, mapping: {{system: system, transcript: chat}}}}\n"
    )
    assert main([str(tmp_path / "mixture.yaml")]) == 0
    assert "1 prompts in" in capsys.readouterr().out
    (row,) = read_jsonl(tmp_path / "out" / "prompts.jsonl")
    conversation = PromptConversation(row)
    assert conversation.id == row["id"].strip() and conversation.tools == row["tools"]
    assert _words_of(conversation.messages) == "how high is the water in brest".split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{"id": 2}', "is not YAML: (.|\n)*line 2"),
        ("sauces: []", "there is no 'sauces'"),
        ("sources: []", "needs sources"),
        ("sources: [{name: a, path: x}]", "source a of .* has no mapping"),
        ("sources: [{name: a, path: x, mapping: {promt: y}}]", "has 'promt'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, weight: 1}]", "both or neither"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, rows: 1, filters: {min: 1}}]", "there is no 'min'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y, messages: z}}]", "one of prompt, messages"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        write_mixture(tmp_path, text)


def test_a_mapping_that_fits_no_row_is_an_error_that_shows_one(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "why?"}] * 3)
    mixture = write_mixture(tmp_path, "sources: [{name: a, path: TMP/a.jsonl, mapping: {prompt: text}}]")
    with pytest.raises(ValueError, match=r"a gives no prompt; does its mapping fit\? .*a\.jsonl:1: missing_field"):
        build_mixture(mixture, disable_tqdm=True)
    assert not (tmp_path / "out" / "prompts.jsonl").exists()
