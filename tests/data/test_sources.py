# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import gzip

import pyarrow as pa
import pytest
from pyarrow import parquet

from hf_dflash.data import sources as sources_module
from hf_dflash.data.conversations import read_row
from hf_dflash.data.sources import (
    Part,
    Source,
    cut_into_units,
    list_sources,
    read_all_rows,
    read_rows,
    size_of,
)


@pytest.mark.parametrize("named", ["", "*.jsonl", "**"])
def test_prompts_that_were_not_answered_are_no_completions(named, tmp_path):
    (tmp_path / "completions-00000.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "failures.jsonl").write_text('{"id": "x", "reason": "timeout"}\n')
    assert [source.uri for source in list_sources(str(tmp_path / named))] == [
        str(tmp_path / "completions-00000.jsonl")
    ]
    assert list_sources(tmp_path / "failures.jsonl")


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 100)
    monkeypatch.setattr(sources_module, "MAX_UNIT_BYTES", 800)
    monkeypatch.setattr(sources_module, "UNIT_SHARE", 1 / 8)


def sizes_of(units, sources):
    return [sum(size_of(part, sources) for part in unit) for unit in units]


def test_units_of_a_file_get_smaller_and_give_each_line_once_with_its_number(tmp_path, small_units):
    lines = [f'{{"number": {number}}}'.ljust(12 + number % 30) for number in range(1, 601)]
    (tmp_path / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    sources = list_sources(tmp_path / "a.jsonl")
    units = cut_into_units(sources)
    sizes = sizes_of(units, sources)
    left = sum(sizes)
    assert left == sources[0].size
    for size in sizes[:-1]:
        # A unit ends with the line in which it is large enough.
        wanted = min(800, max(100, left // 8))
        assert wanted <= size <= wanted + 50
        left -= size
    assert sizes[0] >= 800 and sizes[-1] <= 150
    found = [row for unit in units for part in unit for row in read_rows(sources[part.source], part)]
    assert found == list(enumerate((line.encode() for line in lines), 1))


def test_small_files_are_put_together_and_large_compressed_ones_stay_whole(small_units):
    names = ["large.jsonl.gz", *(f"s3://bucket/{number:02d}.jsonl" for number in range(30))]
    sources = [Source(name, 5000 if number == 0 else 40, "version") for number, name in enumerate(names)]
    units = cut_into_units(sources)
    assert units[0] == [Part(0, 0, 5000, 1)]
    assert [part for unit in units for part in unit] == [
        Part(number, 0, source.size, 1) for number, source in enumerate(sources)
    ]
    # 1,200 bytes: an eighth of them is 150, and no unit is wanted smaller than 100.
    assert sizes_of(units[1:4], sources) == [120, 120, 120] and set(sizes_of(units[4:-1], sources)) == {80}


def test_a_hub_dataset_is_cut_as_if_its_rows_were_text():
    row = sources_module.HUB_ROW_BYTES
    sources = [Source("hub://name#train", 3_000_000, "fingerprint")]
    units = cut_into_units(sources)
    assert [unit[0].start for unit in units[1:]] == [unit[0].end for unit in units[:-1]]
    assert (units[0][0].start, units[-1][0].end) == (0, 3_000_000)
    assert all(unit[0].first_line == unit[0].start + 1 for unit in units)
    rows = [part.end - part.start for (part,) in units]
    assert rows[0] == sources_module.MAX_UNIT_BYTES // row and rows[-2] == sources_module.MIN_UNIT_BYTES // row
    assert rows == sorted(rows, reverse=True)


def test_a_hub_dataset_may_name_its_split(tmp_path, monkeypatch):
    # A folder of data files stands for the Hub.
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "hub").mkdir()
    for split, rows in (("train", 3), ("test", 2)):
        (tmp_path / "hub" / f"{split}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * rows)
    name = f"hub://{tmp_path / 'hub'}"
    sizes = {source.uri: source.size for source in list_sources([name, f"{name}#test"])}
    assert sizes == {f"{name}#train": 3, f"{name}#test": 2}


def test_the_fillers_of_struct_columns_are_in_no_tool_and_no_call(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def row(name, arguments):
        function = {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in arguments}}}
        return {
            "messages": [
                {"role": "user", "content": "Do it."},
                {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": arguments}]},
            ],
            "tools": [{"type": "function", "function": function}],
        }

    rows = [row("weather", {"city": "Paris"}), row("convert", {"from": "EUR", "content": "7"})]
    # What `datasets` wrote until it had a type for JSON, and what others write: one struct for the arguments of all tools.
    (tmp_path / "hub").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "hub" / "train.parquet")
    found = [content for _, content in read_all_rows(list_sources(f"hub://{tmp_path / 'hub'}"))]
    assert [content["tools"] for content in found] == [content["tools"] for content in rows]
    assert [read_row(content) for content in found] == [read_row(content) for content in rows]


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"{" + data, lambda data: data[:60] * 2])
def test_a_damaged_compressed_file_is_named(damage, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    text = "".join(f'{{"prompt": "{i * 7919}", "completion": "{i * 104729}"}}\n' for i in range(200))
    path.write_bytes(damage(gzip.compress(text.encode())))
    with pytest.raises(ValueError, match="rows.jsonl.gz is damaged"):
        list(read_all_rows(list_sources(path)))
