# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import random
import re

import pytest
from mixture_examples import CASES, FILLER, user, write_mixture

from hf_dflash.data import sources
from hf_dflash.data.mixture import build_mixture, format_report, main
from hf_dflash.data.on_policy import PromptConversation
from hf_dflash.data.prompt_overlap import words_of


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "mixture.json", "prompts.jsonl"]

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
    assert words_of(conversation.messages) == "how high is the water in brest".split()


def test_a_mapping_that_fits_no_row_is_an_error_that_shows_one(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "why?"}] * 3)
    mixture = write_mixture(tmp_path, "sources: [{name: a, path: TMP/a.jsonl, mapping: {prompt: text}}]")
    with pytest.raises(ValueError, match=r"a gives no prompt; does its mapping fit\? .*a\.jsonl:1: missing_field"):
        build_mixture(mixture, disable_tqdm=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("mapping", "rows", "message"),
    [
        ("{prompt: text}", [], "a gives no prompt (its files hold no rows)"),
        ("{prompt: text}", ["[1, 2]", "3"], "a gives no prompt; does its mapping fit?"),
        ("{prompt: text}", [{"text": "short"}] * 2, "a gives no prompt (read 2, too_short 2)"),
        (
            "{prompt: text, system: sistem}",
            [{"text": "long enough", "system": "hi"}],
            "No row of a has the field 'sistem'",
        ),
    ],
)
def test_a_source_that_gives_nothing_or_lacks_a_field_is_an_error(tmp_path, mapping, rows, message):
    write_jsonl(tmp_path / "a.jsonl", rows)
    text = f"filters: {{min_characters: 8}}\nsources: [{{name: a, path: TMP/a.jsonl, mapping: {mapping}}}]"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_mixture(write_mixture(tmp_path, text), disable_tqdm=True)
    assert not (tmp_path / "out").exists()


def test_a_field_that_some_rows_lack_is_no_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a question"}, {"text": "another one", "system": "hi"}])
    text = "sources: [{name: a, path: TMP/a.jsonl, mapping: {prompt: text, system: system}}]"
    assert build_mixture(write_mixture(tmp_path, text), disable_tqdm=True)["rows"] == 2


def test_evaluation_prompts_that_are_not_there_are_named_by_their_key(tmp_path):
    text = "evaluation_prompts: {path: [TMP/eval]}\nsources: [{name: a, path: TMP/a.jsonl, mapping: {prompt: text}}]"
    with pytest.raises(FileNotFoundError, match="`evaluation_prompts` of the mixture: .*eval"):
        build_mixture(write_mixture(tmp_path, text), disable_tqdm=True)


def test_a_file_that_is_not_there_is_named_with_its_source_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_describe_hub_dataset", lambda *_: pytest.fail("fetched"))
    text = "sources: [{name: hub, path: hub://some/set, mapping: {prompt: text}}, {name: mine, path: TMP/prompts, mapping: {prompt: text}}]"
    with pytest.raises(FileNotFoundError, match="Source `mine` of the mixture: .*prompts"):
        build_mixture(write_mixture(tmp_path, text), disable_tqdm=True)
