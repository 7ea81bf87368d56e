# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import gzip
import json

import datasets
import pytest
from tiny_tokenizers import CHATML_TEMPLATE, THINKING_TEMPLATE, make_tokenizer

from hf_dflash.atomic_files import locked_folder
from hf_dflash.data import sources as sources_module
from hf_dflash.data import unit_workers
from hf_dflash.data.chat import ChatRenderer, render_conversation
from hf_dflash.data.tokenization import tokenize_completions
from hf_dflash.data.unit_tokenization import UnitTokenizer, row_origin


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML_TEMPLATE)


def conversation(number, reply=None):
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} + {number}?"},
            {"role": "assistant", "content": reply or f"The sum of the two numbers is {2 * number}, I think."},
        ]
    }


def write_lines(path, lines):
    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    text = "".join(line + "\n" for line in lines)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def tokenize(sources, tokenizer, output, **options):
    options = {"gates": None, "num_workers": 1, "disable_tqdm": True, **options}
    return tokenize_completions(sources, tokenizer, output, **options)


def test_the_dataset_holds_what_the_conversations_render_to(tokenizer, tmp_path):
    rows = [conversation(number) for number in range(600)]
    rows[3]["messages"] *= 2
    dataset = tokenize(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "out", max_length=80)
    expected = [
        (line, sample)
        for line, row in enumerate(rows, 1)
        for sample in render_conversation(tokenizer, row["messages"], max_length=80)
    ]
    assert len(dataset) == len(expected) == 601
    for row, (line, sample) in zip(dataset, expected, strict=True):
        assert row["input_ids"] == sample.input_ids
        assert row["loss_mask"] == sample.loss_mask
        assert row["length"] == len(sample.input_ids)
        assert row["num_supervised"] == sum(sample.loss_mask)
        assert row["is_cut"] == sample.is_cut
        assert row_origin(row["row_id"]) == (0, line, sample.turn)
    assert dataset.features["loss_mask"].feature.dtype == "bool"
    assert datasets.load_from_disk(str(tmp_path / "out"))[:] == dataset[:]


def test_the_result_does_not_depend_on_how_the_work_is_cut_and_spread(tokenizer, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", [conversation(n) for n in range(100)] + ["", "broken", "  "])
    whole = tokenize(source, tokenizer, tmp_path / "whole")
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 2000)
    parts = tokenize(source, tokenizer, tmp_path / "parts")
    spread = tokenize(source, tokenizer, tmp_path / "spread", num_workers=2)
    assert len(list((tmp_path / "parts").glob("unit-*.arrow"))) > 3
    assert whole[:] == parts[:] == spread[:]
    names = {path.name for path in (tmp_path / "parts").iterdir()}
    for name in names - {".lock"}:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "spread" / name).read_bytes()
    skipped = [json.loads(line) for line in (tmp_path / "parts" / "skipped.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["reason"]) for entry in skipped] == [(102, "bad_json")]


def test_the_bar_counts_the_samples_of_all_units_and_those_of_a_stopped_run(tokenizer, tmp_path, monkeypatch, capsys):
    source = write_lines(tmp_path / "a.jsonl", [conversation(number) for number in range(50)])
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 2000)
    done = []

    class Interrupted(UnitTokenizer):
        def process(self, index):
            if len(done) == 2:
                raise KeyboardInterrupt
            done.append(index)
            return super().process(index)

    options = {"num_workers": 1, "gates": None, "disable_tqdm": False}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(unit_workers, "UnitTokenizer", Interrupted)
        tokenize_completions(source, tokenizer, tmp_path / "out", **options)
    capsys.readouterr()
    assert len(tokenize_completions(source, tokenizer, tmp_path / "out", **options)) == 50
    assert "samples=50]" in capsys.readouterr().err


def test_rows_that_came_with_tokens_pass_through(tokenizer, tmp_path):
    prompt, completion = tokenizer.encode("one two"), [*tokenizer.encode("three four"), tokenizer.eos_token_id]
    rows = [
        {"input_ids": prompt + completion, "loss_mask": [0] * len(prompt) + [1] * len(completion)},
        {"prompt_token_ids": prompt, "completion_token_ids": completion},
        {"messages": [{"role": "user", "content": "hi"}], "completion_token_ids": completion},
        {"input_ids": [1, 10**6], "loss_mask": [0, 1]},
    ]
    dataset = tokenize(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "out")
    assert len(dataset) == 3
    assert dataset[0]["input_ids"] == dataset[1]["input_ids"] == prompt + completion
    assert dataset[0]["loss_mask"] == dataset[1]["loss_mask"] == [False] * len(prompt) + [True] * len(completion)
    served = tokenizer.apply_chat_template(rows[2]["messages"], add_generation_prompt=True)["input_ids"]
    assert dataset[2]["input_ids"] == served + completion
    assert len(set(dataset["reply_hash"])) == 1
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["rows_skipped"] == {"bad_token_ids": 1}


def test_replies_shorter_than_two_supervised_tokens_are_skipped_and_counted(tokenizer, tmp_path):
    rows = [{"prompt_token_ids": [5, 6], "completion_token_ids": [7] * count} for count in range(5)]
    dataset = tokenize(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "out")
    assert dataset["num_supervised"][:] == [2, 3, 4]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["rows_skipped"] == {"too_few_supervised": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"a\.jsonl: empty"),
        (["", "  "], r"a\.jsonl: empty"),
        (["{broken"], r"a\.jsonl:1: bad_json: Expecting property name"),
        (["", "[1, 2]"], r"a\.jsonl:2: not_an_object"),
        ([{"messages": [{"role": "user", "content": "hi"}]}], r"a\.jsonl:1: no_assistant_turn"),
        ([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}], r"a\.jsonl:1: too_few_supervised"),
        ([{"text": "hi"}], r"a\.jsonl:1: missing_field: .*the row has text"),
    ],
)
def test_a_source_without_anything_usable_is_an_error_that_names_file_line_and_reason(
    tokenizer, tmp_path, lines, message
):
    source = write_lines(tmp_path / "a.jsonl", lines)
    other = write_lines(tmp_path / "b.jsonl", [conversation(1)])
    for sources, output in ((source, "alone"), ([other, source], "beside_a_good_one")):
        with pytest.raises(ValueError, match=message):
            tokenize(sources, tokenizer, tmp_path / output)


def test_a_finished_dataset_is_reused_and_one_made_in_another_way_is_refused(tokenizer, tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [conversation(n) for n in range(5)])
    tokenize(source, tokenizer, tmp_path / "out")
    arrow = tmp_path / "out" / "unit-00000.arrow"
    before = arrow.stat().st_mtime_ns
    tokenize(source, tokenizer, tmp_path / "out")
    assert arrow.stat().st_mtime_ns == before

    with pytest.raises(ValueError, match="max_length: 4096, now 64"):
        tokenize(source, tokenizer, tmp_path / "out", max_length=64)
    with pytest.raises(ValueError, match="chat_template_digest"):
        tokenize(source, make_tokenizer(THINKING_TEMPLATE), tmp_path / "out")
    other = write_lines(tmp_path / "b.jsonl", [conversation(1)])
    with pytest.raises(ValueError, match=r"new source: .*b\.jsonl"):
        tokenize([source, other], tokenizer, tmp_path / "out")
    write_lines(source, [conversation(n) for n in range(6)])
    with pytest.raises(ValueError, match=r"changed source: .*a\.jsonl"):
        tokenize(source, tokenizer, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"holds something else \(thesis.tex\)"):
        tokenize(source, tokenizer, tmp_path / "full")


def test_a_dataset_without_one_sample_says_why_and_gives_way_to_what_was_mended(tokenizer, tmp_path):
    source = write_lines(tmp_path / "a.jsonl", ["{broken"])
    for _ in range(2):
        with pytest.raises(ValueError, match="bad_json"):
            tokenize(source, tokenizer, tmp_path / "out")
    assert "bad_json" in (tmp_path / "out" / "skipped.jsonl").read_text()
    write_lines(source, [conversation(1)])
    assert len(tokenize(source, tokenizer, tmp_path / "out", max_length=64)) == 1
    assert (tmp_path / "out" / "skipped.jsonl").read_text() == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_before_its_first_unit_leaves_no_folder(tokenizer, tmp_path, monkeypatch, error):
    source = write_lines(tmp_path / "a.jsonl", [conversation(1)])

    def fail(*_):
        raise error

    monkeypatch.setattr(UnitTokenizer, "process", fail)
    with pytest.raises(error):
        tokenize(source, tokenizer, tmp_path / "new" / "out")
    with pytest.raises(FileNotFoundError):
        tokenize(tmp_path / "nothing-here", tokenizer, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == [source]


def test_a_run_that_was_killed_before_its_first_unit_forbids_no_other_options(tokenizer, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", [conversation(number) for number in range(50)])
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 2000)
    tokenize(source, tokenizer, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name, units in (("nothing", []), ("one", ["unit-00000.json", "unit-00000.arrow"])):
        left = tmp_path / name
        left.mkdir()
        (left / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
        for unit in [*units, "unit-00001.arrow.1.partial"]:
            (left / unit).touch()
    assert len(tokenize(source, tokenizer, tmp_path / "nothing", max_length=64)) == 50
    with pytest.raises(ValueError, match="max_length: 4096, now 64"):
        tokenize(source, tokenizer, tmp_path / "one", max_length=64)


def test_files_folders_globs_and_gz_are_found_in_a_fixed_order(tokenizer, tmp_path):
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    write_lines(data / "b.jsonl", [conversation(2)])
    write_lines(data / "a.jsonl.gz", [conversation(1)])
    write_lines(data / "deep" / "c.ndjson", [conversation(3)])
    (data / "readme.md").write_text("not data")
    folder = tokenize(data, tokenizer, tmp_path / "folder")
    listed = tokenize([data / "deep", data / "b.jsonl", data / "*.gz"], tokenizer, tmp_path / "listed")
    assert folder[:] == listed[:]
    prompts = [tokenizer.decode(ids).split("\n")[1] for ids in folder["input_ids"]]
    assert prompts == [f"What is {number} + {number}?<|im_end|>" for number in (1, 2, 3)]
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        tokenize(tmp_path / "nothing-here", tokenizer, tmp_path / "x")
    with pytest.raises(ValueError, match="named twice"):
        tokenize([data, data / "b.jsonl"], tokenizer, tmp_path / "y")
    with pytest.raises(ValueError, match="not named like a JSONL file"):
        tokenize(data / "readme.md", tokenizer, tmp_path / "z")


def test_a_hub_dataset_is_a_source(tokenizer, tmp_path, monkeypatch):
    # A folder of data files stands for the Hub: it goes through the same `datasets.load_dataset`.
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 20 * sources_module.HUB_ROW_BYTES)
    rows = [{**conversation(number), "note": None if number % 2 else "struct columns"} for number in range(50)]
    rows[5]["messages"][0]["name"] = "somebody"  # then every message has a name, most of them None
    (tmp_path / "hub").mkdir()
    write_lines(tmp_path / "hub" / "train.jsonl", rows)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    dataset = tokenize(f"hub://{tmp_path / 'hub'}", tokenizer, tmp_path / "out")
    assert [row_origin(row_id) for row_id in dataset["row_id"]] == [(0, line, 0) for line in range(1, 51)]
    plain = tokenize(write_lines(tmp_path / "a.jsonl", rows), tokenizer, tmp_path / "plain")
    assert plain["input_ids"][:] == dataset["input_ids"][:]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["sources"][0]["uri"] == f"hub://{tmp_path / 'hub'}#train" and len(manifest["units"]) == 3
    tokenize(f"hub://{tmp_path / 'hub'}", tokenizer, tmp_path / "out")  # found finished


def test_a_second_process_is_kept_out_of_the_folder(tokenizer, tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [conversation(1)])
    with locked_folder(tmp_path / "out", "tokenizing into"):
        with pytest.raises(ValueError, match="Another process is tokenizing"):
            tokenize(source, tokenizer, tmp_path / "out")


def test_ids_are_those_that_the_tokenizer_itself_gives(tokenizer):
    texts = ["", " ", "plain", "<|im_end|>\n", "né 🙂 \t x" * 50, "a\u0000b"]
    ids = ChatRenderer(tokenizer).encode(texts)
    assert ids == tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_a_target_without_a_chat_template_is_an_error_unless_rows_need_none(tokenizer, tmp_path):
    bare = make_tokenizer(None)
    source = write_lines(tmp_path / "a.jsonl", [conversation(1)])
    with pytest.raises(ValueError, match="no chat template"):
        tokenize(source, bare, tmp_path / "given")
    # The same folder: nothing was made yet that a template would contradict.
    given = tokenize(source, bare, tmp_path / "given", chat_template=CHATML_TEMPLATE)
    assert given["input_ids"][:] == tokenize(source, tokenizer, tmp_path / "own")["input_ids"][:]
    tokens = write_lines(tmp_path / "b.jsonl", [{"prompt_token_ids": [5, 6], "completion_token_ids": [7, 8]}])
    assert len(tokenize(tokens, make_tokenizer(None), tmp_path / "tokens")) == 1


@pytest.mark.parametrize("num_workers", [0, -1])
def test_a_number_of_workers_below_one_is_refused(tokenizer, tmp_path, num_workers):
    source = write_lines(tmp_path / "a.jsonl", [conversation(1)])
    with pytest.raises(ValueError, match=f"num_workers is {num_workers}"):
        tokenize(source, tokenizer, tmp_path / "out", num_workers=num_workers)
