# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One unit of work of tokenizing: rows are read, rendered and tokenized, and their samples become an Arrow file.

Each worker process does whole units and writes their files itself; nothing but a unit's number and that of its samples goes
between processes. The files and columns are described in `tokenization.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_dflash.atomic_files import replacing, write_json

from .chat import ChatRenderer, ChatSample
from .conversations import ROLES, SKIP_REASONS, RowSkipped, TokenizedRow, read_row
from .sources import Part, Source, parse_line, read_rows
from .tokenized_dataset import hash_reply


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Rows that are read, rendered and tokenized together; their samples are one Arrow record batch.
_BATCH_ROWS = 256
_BATCH_BYTES = 4 * 2**20

# `row_id` = source << 44 | line << 12 | turn: unique, and the same however the work was cut and spread.
_LINE_BITS, _TURN_BITS = 32, 12


def row_origin(row_id: int) -> tuple[int, int, int]:
    """Source number, line (from 1) and assistant turn (from 0) that a `row_id` was made of."""
    return row_id >> (_LINE_BITS + _TURN_BITS), (row_id >> _TURN_BITS) % (1 << _LINE_BITS), row_id % (1 << _TURN_BITS)


class UnitTokenizer:
    """What a process needs to do units of one run: see [`tokenize_completions`]."""

    def __init__(
        self, output_dir: str, manifest: dict, tokenizer: "PreTrainedTokenizerBase", endpoint_url: str | None
    ):
        options = manifest["options"]
        self.output_dir = Path(output_dir)
        self.sources = [Source(**source) for source in manifest["sources"]]
        self.units = [[Part(**part) for part in unit] for unit in manifest["units"]]
        self.endpoint_url = endpoint_url
        self.roles = {**ROLES, **options["extra_roles"]}
        self.min_supervised_tokens = options["min_supervised_tokens"]
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(
            tokenizer,
            enable_thinking=options["enable_thinking"],
            chat_template_kwargs=options["chat_template_kwargs"],
            max_length=options["max_length"],
            eos_token_ids=options["eos_token_ids"],
        )

    def process(self, index: int) -> dict:
        """
        Does one unit: writes its samples, then its counts (the sign that it is done), and returns the counts.
        """
        import pyarrow as pa

        counts = new_counts()
        # Workers of a run that was killed may still be at their last unit: the same files, by another process.
        schema = dataset_features().arrow_schema
        with (
            replacing(unit_path(self.output_dir, index, ".arrow"), "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
            replacing(unit_path(self.output_dir, index, ".skipped.jsonl")) as self._skipped,
        ):
            for batch in self._batches(self.units[index]):
                samples = self._process_rows(batch, counts)
                if samples:
                    writer.write_batch(_record_batch(samples, schema))
        write_json(unit_path(self.output_dir, index, ".json"), counts)
        return counts

    def _batches(self, unit: list[Part]) -> Iterator[list[tuple[int, int, bytes | dict]]]:
        """Rows as (source, line, content), some at a time."""
        batch, size = [], 0
        for part in unit:
            for line, content in read_rows(self.sources[part.source], part, endpoint_url=self.endpoint_url):
                batch.append((part.source, line, content))
                size += len(content) if isinstance(content, bytes) else 0
                if len(batch) == _BATCH_ROWS or size > _BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _process_rows(self, batch: list, counts: dict) -> list[tuple[int, int, ChatSample]]:
        """The samples of some rows, as (source, row_id, sample); the others are counted and written down."""
        outcomes = []  # (source, line, what became of each turn)
        turns = []
        for source_id, line, content in batch:
            if isinstance(content, bytes) and not content.strip():
                counts["blank_lines"] += 1
                continue
            try:
                row = read_row(parse_line(content), self.roles)
                found = [row] if isinstance(row, TokenizedRow) else self.renderer.turns(row)
            except RowSkipped as skipped:
                found = [skipped]
            except ValueError:
                raise  # a mistake of the run, which holds for all rows: there is no chat template
            except Exception as error:
                raise RuntimeError(
                    f"{self.sources[source_id].uri}:{line}: an error of ours, not of the row"
                ) from error
            outcomes.append((source_id, line, found))
            turns += [turn for turn in found if not isinstance(turn, RowSkipped)]
        tokenized = iter(self.renderer.samples(turns))

        samples = []
        for source_id, line, found in outcomes:
            counts["rows"] += 1
            of_source = counts["of_sources"].setdefault(str(source_id), {"rows": 0, "samples": 0})
            of_source["rows"] += 1
            results = [turn if isinstance(turn, RowSkipped) else self._check(next(tokenized)) for turn in found]
            good = [(turn, result) for turn, result in enumerate(results) if isinstance(result, ChatSample)]
            bad = [(turn, result) for turn, result in enumerate(results) if isinstance(result, RowSkipped)]
            for turn, sample in good:
                row_id = (source_id << _LINE_BITS | line) << _TURN_BITS | turn
                samples.append((source_id, row_id, sample))
                counts["samples"] += 1
                of_source["samples"] += 1
                counts["tokens"] += len(sample.input_ids)
                counts["supervised_tokens"] += sum(sample.loss_mask)
                counts["cut"] += sample.is_cut
                counts["empty_thinking"] += sample.is_thinking_empty
            if good:
                counts["rows_used"] += 1
            for number, (turn, skipped) in enumerate(bad):
                # A row of which nothing is left counts once; a turn that is left out of a used row counts apart.
                kind = "turns_skipped" if good else "rows_skipped"
                if good or number == 0:
                    counts[kind][skipped.reason] = counts[kind].get(skipped.reason, 0) + 1
                entry = {
                    "source": self.sources[source_id].uri,
                    "line": line,
                    "turn": turn,
                    "reason": skipped.reason,
                    "detail": skipped.detail or SKIP_REASONS[skipped.reason],
                }
                counts["first_skipped"].setdefault(skipped.reason, entry)
                self._skipped.write(json.dumps(entry) + "\n")
        return samples

    def _check(self, sample: ChatSample | RowSkipped) -> ChatSample | RowSkipped:
        if isinstance(sample, RowSkipped):
            return sample
        supervised = sum(sample.loss_mask)
        if supervised < self.min_supervised_tokens:
            return RowSkipped("too_few_supervised", f"{supervised} supervised tokens")
        if sample.turn >= 1 << _TURN_BITS:
            return RowSkipped("too_many_turns")
        return sample


def _record_batch(samples: list[tuple[int, int, ChatSample]], schema):
    import pyarrow as pa

    lengths = np.array([len(sample.input_ids) for _, _, sample in samples], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    input_ids = np.empty(offsets[-1], dtype=np.int32)
    loss_mask = np.empty(offsets[-1], dtype=bool)
    hashes = []
    for (_, _, sample), start, end in zip(samples, offsets[:-1], offsets[1:], strict=True):
        input_ids[start:end] = sample.input_ids
        loss_mask[start:end] = sample.loss_mask
        hashes.append(hash_reply(input_ids[start:end][loss_mask[start:end]]))
    supervised = np.add.reduceat(loss_mask, offsets[:-1], dtype=np.int32)
    columns = {
        "row_id": pa.array([row_id for _, row_id, _ in samples], pa.int64()),
        "source_id": pa.array([source for source, _, _ in samples], pa.int32()),
        "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(input_ids)),
        "loss_mask": pa.ListArray.from_arrays(pa.array(offsets), pa.array(loss_mask)),
        "length": pa.array(lengths),
        "num_supervised": pa.array(supervised),
        "reply_hash": pa.array(hashes, pa.int64()),
        "is_cut": pa.array([sample.is_cut for _, _, sample in samples]),
        "is_thinking_empty": pa.array([sample.is_thinking_empty for _, _, sample in samples]),
    }
    return pa.record_batch([columns[name].cast(schema.field(name).type) for name in schema.names], schema=schema)


def dataset_features():
    """Columns of the dataset, as `datasets.Features`."""
    from datasets import Features, Sequence, Value

    return Features(
        {
            "row_id": Value("int64"),
            "source_id": Value("int32"),
            "input_ids": Sequence(Value("int32")),
            "loss_mask": Sequence(Value("bool")),
            "length": Value("int32"),
            "num_supervised": Value("int32"),
            "reply_hash": Value("int64"),
            "is_cut": Value("bool"),
            "is_thinking_empty": Value("bool"),
        }
    )


def new_counts() -> dict:
    return {
        "rows": 0,
        "rows_used": 0,
        "rows_skipped": {},
        "turns_skipped": {},
        "blank_lines": 0,
        "samples": 0,
        "tokens": 0,
        "supervised_tokens": 0,
        "cut": 0,
        "empty_thinking": 0,
        "first_skipped": {},  # reason -> the first row or turn that was skipped for it
        "of_sources": {},  # source -> its rows and samples
    }


def unit_path(output_dir: Path, index: int, suffix: str) -> Path:
    return output_dir / f"unit-{index:05d}{suffix}"
