# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""10,000 rows with every kind of damage: each is accounted for by reason, and the exit status says that it happened."""

import json
from collections import Counter

import pytest
from tiny_tokenizers import CHATML_TEMPLATE, make_tokenizer

from hf_dflash.data.conversations import SKIP_REASONS
from hf_dflash.data.tokenize_command import main
from hf_dflash.data.unit_tokenization import row_origin


GOOD = 9000


def chat(*messages, **fields):
    return json.dumps({"messages": list(messages), **fields}).encode()


def user(content="What is it?"):
    return {"role": "user", "content": content}


def assistant(content="It is this, and the reply is long enough to be of use.", **fields):
    return {"role": "assistant", "content": content, **fields}


def good_row(number):
    """The same conversation in all layouts and spellings, number by number."""
    question, answer = f"What is {number}?", f"The number {number} is what it is, and this is long enough."
    layouts = [
        chat(user(question), assistant(answer)),
        json.dumps(
            {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        ).encode(),
        json.dumps({"prompt": question, "completion": answer, "extra": {"any": ["thing", None]}}).encode(),
        json.dumps({"prompt": [user(question)], "response": [assistant(answer)]}).encode(),
        json.dumps(
            {"messages": None, "conversations": [user(question), {"role": "model", "content": answer}]}
        ).encode(),
        chat(
            {"role": "user", "content": [{"type": "text", "text": question}]}, assistant(answer), tools="[]", id=number
        ),
    ]
    return layouts[number % len(layouts)]


# reason -> lines that must be skipped for it
DAMAGE = {
    "bad_json": [b"{", b"not json", b'{"messages": [}', b'{"a": 1} {"b": 2}', b"[" * 100_000, b"9" * 5000],
    "bad_utf8": [b'{"messages": "\xff\xfe"}', chat(user(), assistant()).replace(b"What", b"Wh\xe9t")],
    "nul_byte": [b"\0" * 100, chat(user(), assistant()).replace(b"What", b"Wh\0t")],
    "lone_surrogate": [chat(user("\ud83d what"), assistant()), chat(user(), assistant("x" * 50 + "\udc00"))],
    "not_an_object": [b"[]", b"null", b'"text"', b"17", b"true"],
    "missing_field": [
        b"{}",
        b'{"text": "hi"}',
        b'{"messages": []}',
        b'{"prompt": "hi"}',
        chat({"content": "no role"}, assistant()),
        chat(user(), {"role": "assistant"}),
    ],
    "wrong_type": [
        b'{"messages": "hi"}',
        b'{"messages": ["hi"]}',
        b'{"prompt": 7, "completion": "x"}',
        chat({"role": "user", "content": 7}, assistant()),
        chat({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, assistant()),
        chat(user(), assistant(reasoning_content=["a"])),
        chat(user(), assistant(tool_calls="f()")),
        chat(user(), assistant(), tools="{not json"),
        chat(user(), assistant(), tools=7),
        chat(user(), assistant(), chat_template_kwargs="x"),
        chat(user(), assistant(), enable_thinking="yes"),
        chat(user(), assistant(), system=7),
        chat(user(), assistant(), finish_reason=["stop"]),
    ],
    "unknown_role": [
        chat({"role": "laguna_s", "content": "x"}, assistant()),
        chat({"role": 7, "content": "x"}, assistant()),
    ],
    "bad_tool_arguments": [
        chat(user(), assistant(tool_calls=[{"function": {"name": "f", "arguments": "{broken"}}])),
        chat(user(), assistant(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])),
    ],
    "bad_token_ids": [
        b'{"input_ids": [1, 2], "loss_mask": [1]}',
        b'{"input_ids": [1, 2], "loss_mask": [0, 2]}',
        b'{"input_ids": [1, -2], "loss_mask": [0, 1]}',
        b'{"input_ids": [1, true], "loss_mask": [0, 1]}',
        b'{"input_ids": [1, 99999999], "loss_mask": [0, 1]}',
        b'{"input_ids": "1 2", "loss_mask": [0, 1]}',
        chat(user(), completion_token_ids=[1, 99999999]),
        chat(user(), completion_token_ids=["a"]),
    ],
    "no_assistant_turn": [chat(user()), chat({"role": "system", "content": "x"}, user())],
    "empty_reply": [chat(user(), assistant("")), chat(user(), assistant(" \n ")), chat(user(), assistant(None))],
    "template_refused": [chat(assistant(), user())],
    "template_lost_reply": [chat(user(), assistant(tool_calls=[{"function": {"name": "f", "arguments": {}}}]))],
    "thinking_not_rendered": [chat(user(), assistant(reasoning_content="hm"))],
    "end_of_turn_in_reply": [chat(user(), assistant("one<|im_end|>two"))],
    "prompt_too_long": [chat(user("long " * 5000), assistant())],
    "too_few_supervised": [b'{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}', b'{"input_ids": [], "loss_mask": []}'],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer(CHATML_TEMPLATE).save_pretrained(folder)
    return folder


def test_every_row_is_accounted_for_by_reason_and_the_exit_status_says_so(target, tmp_path, capsys):
    lines = [good_row(number) for number in range(GOOD)]
    reasons = [None] * GOOD
    # A 5 MB line is a row like any other: its prompt fits no sample, so it is counted as that.
    damage = {**DAMAGE, "prompt_too_long": [*DAMAGE["prompt_too_long"], chat(user("7 " * 2_500_000), assistant())]}
    kinds = [(reason, line) for reason, bad in damage.items() for line in bad]
    large = {reason: line for reason, line in kinds if len(line) > 10_000}
    for number in range(1000):
        reason, line = kinds[number % len(kinds)]
        if len(line) > 10_000 and number >= len(kinds):
            reason, line = "bad_json", b"{"  # the large ones are there once
        place = (number * 7919) % (len(lines) + 1)
        lines.insert(place, line)
        reasons.insert(place, reason)
    assert len(lines) == 10_000 and large
    source = tmp_path / "damaged.jsonl"
    # Blank lines, line ends of Windows, and a byte order mark are no damage.
    source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines[:5000]) + b"\n\n  \n" + b"\n".join(lines[5000:]))

    output = tmp_path / "out"
    arguments = [str(source), "--target", str(target), "--output", str(output), "--quiet", "--num-workers", "1"]
    assert main([*arguments, "--max-short-share", "0.05"]) == 3
    counts = json.loads((output / "manifest.json").read_text())["counts"]
    expected = Counter(reason for reason in reasons if reason)
    assert counts["rows_skipped"] == dict(expected)
    assert counts["rows"] == 10_000 and counts["rows_used"] == counts["samples"] == GOOD
    assert counts["blank_lines"] == 2
    assert counts["turns_skipped"] == {}

    # Each skipped row is named with its line; each line is either skipped or in the dataset.
    import datasets

    skipped = [json.loads(line) for line in (output / "skipped.jsonl").read_text().splitlines()]
    number_of = {place: place + 1 + (2 if place >= 5000 else 0) for place in range(10_000)}
    assert {entry["line"]: entry["reason"] for entry in skipped} == {
        number_of[place]: reason for place, reason in enumerate(reasons) if reason
    }
    used = {row_origin(row_id)[1] for row_id in datasets.load_from_disk(str(output))["row_id"]}
    assert used == {number_of[place] for place, reason in enumerate(reasons) if reason is None}

    printed = capsys.readouterr().out
    assert all(reason in printed for reason in expected)
    assert main([*arguments, "--max-short-share", "0.05", "--allow-skipped", "0.11"]) == 0
    assert main(arguments) == 1  # more than 1% of the rows are empty or too short
    assert expected.keys() <= SKIP_REASONS.keys()


def test_a_role_of_the_data_can_be_mapped(target, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_bytes(
        chat(user(), {"role": "laguna_s", "content": "The reply, which is long enough for a block of 16."})
    )
    arguments = [str(source), "--target", str(target), "--quiet"]
    assert main([*arguments, "--output", str(tmp_path / "out"), "--map-role", "laguna_s=assistant"]) == 0
    with pytest.raises(ValueError, match=r"a\.jsonl:1: unknown_role: 'laguna_s' in messages\[1\]"):
        main([*arguments, "--output", str(tmp_path / "out2")])
    with pytest.raises(ValueError, match="'laguna_s' cannot be read as 'robot'"):
        main([*arguments, "--output", str(tmp_path / "out3"), "--map-role", "laguna_s=robot"])


def test_a_line_that_cannot_be_a_row_is_not_read_into_memory(target, tmp_path, monkeypatch):
    from hf_dflash.data import sources

    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(sources, "_READ_BYTES", 64)
    good = chat(user(), assistant())
    for number, end in enumerate((b"\n" + good + b"\n", b"\n", b"")):
        source = tmp_path / f"{number}.jsonl"
        source.write_bytes(good + b"\n" + b"x" * 5000 + end)
        main([str(source), "--target", str(target), "--output", str(tmp_path / f"out{number}"), "--quiet"])
        counts = json.loads((tmp_path / f"out{number}" / "manifest.json").read_text())["counts"]
        assert counts["rows_skipped"] == {"line_too_long": 1}
        assert counts["rows_used"] == (2 if number == 0 else 1)
