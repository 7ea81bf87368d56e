# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Completions -> a loss-masked dataset on disk, in parallel, resumable, with every row accounted for.

The folder is what `datasets.load_from_disk` reads, and beside it:

    manifest.json       sources, tokenizer, template, options, units of work, counts; written first, completed last
    skipped.jsonl       one line for each row or turn that gave no sample: file, line, turn, reason, detail
    unit-00000.arrow    the samples of one unit of work (see sources.py)
    unit-00000.json     only in a folder that is not finished: what happened in the unit, and that it is done

Nothing in the folder depends on the number of workers, on the time, or on how often the run was stopped.

Columns, one row for each assistant turn:

| column              | type          | content                                                                     |
|---------------------|---------------|-----------------------------------------------------------------------------|
| `row_id`            | int64         | where it comes from: source, line and turn (`row_origin` takes it apart)    |
| `source_id`         | int32         | the source's number in the manifest                                         |
| `input_ids`         | list of int32 | prompt as served + reply + end of turn                                      |
| `loss_mask`         | list of bool  | `True` on the reply (thinking included) and its end of turn; one bit each    |
| `length`            | int32         | tokens                                                                      |
| `num_supervised`    | int32         | supervised tokens                                                           |
| `reply_hash`        | int64         | hash of the supervised tokens: equal replies have equal hashes              |
| `is_cut`            | bool          | the reply has no end, because generation or `max_length` stopped it         |
| `is_thinking_empty` | bool          | the reply closes its thinking at once                                       |
"""

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dflash.object_store import ObjectStore

from . import conversations
from .chat import ChatRenderer, ChatSample
from .checks import DatasetGates, DatasetRefused, describe_counts, hash_reply, run_gates
from .conversations import ROLES, SKIP_REASONS, RowSkipped, TokenizedRow, read_row
from .sources import MAX_LINE_BYTES, Part, Source, cut_into_units, digest_of, list_sources, read_rows


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


FORMAT_VERSION = 1

# Rows that are read, rendered and tokenized together; their samples are one Arrow record batch.
_BATCH_ROWS = 256
_BATCH_BYTES = 4 * 2**20

# `row_id` = source << 44 | line << 12 | turn: unique, and the same however the work was cut and spread.
_LINE_BITS, _TURN_BITS = 32, 12


def tokenize_completions(
    sources: str | os.PathLike | list[str | os.PathLike],
    target: "str | os.PathLike | PreTrainedTokenizerBase",
    output_dir: str | os.PathLike,
    *,
    max_length: int = 4096,
    min_supervised_tokens: int = 2,
    enable_thinking: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    extra_roles: dict[str, str] | None = None,
    eos_token_ids: Iterable[int] = (),
    split: str = "train",
    num_workers: int | None = None,
    gates: DatasetGates | None = DatasetGates(),  # noqa: B008 (frozen)
    upload_to: str | None = None,
    endpoint_url: str | None = None,
    disable_tqdm: bool = False,
) -> "Dataset":
    """
    Tokenizes completions into a dataset for training (issue 3).

    A folder that holds a finished dataset of the same sources and options is used as it is; a stopped run goes on where it
    was; a folder with other sources or options is refused.

    Args:
        sources (`str` or `list[str]`):
            JSONL files (plain or .gz), folders, globs, `s3://bucket/prefix`, `hub://dataset`. The layouts and roles of
            their rows are in the tables of `conversations.py`.
        target (`str`, `os.PathLike` or `PreTrainedTokenizerBase`):
            The target (folder or Hub id), or its tokenizer.
        output_dir (`str` or `os.PathLike`):
            Where the dataset goes.
        max_length (`int`, *optional*, defaults to 4096):
            Samples are cut to this many tokens on the right: what fits of the reply stays, and no end of turn is made up.
        min_supervised_tokens (`int`, *optional*, defaults to 2):
            A sample with fewer supervised tokens is skipped and counted.
        enable_thinking (`bool`, *optional*):
            As the target was served. `None` leaves it to the template.
        chat_template (`str`, *optional*):
            The template as text, if the target was served with another than its own.
        chat_template_kwargs (`dict`, *optional*):
            Further variables for the template, as the target was served.
        extra_roles (`dict[str, str]`, *optional*):
            Further role names: name in the data -> role.
        eos_token_ids (`Iterable[int]`, *optional*, defaults to `()`):
            Ids that end generation, beside the tokenizer's and those of the target's `generation_config.json`.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a Hub dataset.
        num_workers (`int`, *optional*):
            Processes. By default one for each core, and no more than there are units of work; 1 stays in this process.
        gates ([`~data.checks.DatasetGates`], *optional*):
            What a useful dataset must fulfil. `None` runs no gates.
        upload_to (`str`, *optional*):
            `s3://bucket/prefix` to copy the finished folder to.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        disable_tqdm (`bool`, *optional*, defaults to `False`):
            If `True`, no progress bar is shown.

    Returns:
        `datasets.Dataset`: memory-mapped, with the columns of the table above.

    Raises:
        [`~data.checks.DatasetRefused`]: a gate failed. The folder stays as it is, for `hf-dflash check`.
        `ValueError`: nothing usable in a source that was named, or the folder holds something else.
        `FileNotFoundError`: a source does not exist.
        `ImportError`: the package datasets is not installed.
    """
    _require_datasets()
    output_dir = Path(output_dir)
    tokenizer, eos_token_ids = _load_tokenizer(target, chat_template, eos_token_ids)
    options = {
        "max_length": max_length,
        "min_supervised_tokens": min_supervised_tokens,
        "enable_thinking": enable_thinking,
        "chat_template_kwargs": chat_template_kwargs or {},
        "extra_roles": extra_roles or {},
        "eos_token_ids": eos_token_ids,
    }
    _check_options(options)

    with _locked(output_dir):
        manifest = _start_or_resume(output_dir, sources, tokenizer, options, endpoint_url, split)
        if manifest["status"] != "finished":
            _run_units(output_dir, manifest, tokenizer, num_workers, endpoint_url, disable_tqdm)
            manifest = _finish(output_dir, manifest)
        _remove_leftovers(output_dir)
    _check_that_sources_are_usable(output_dir, manifest, sources)

    import datasets

    dataset = datasets.load_from_disk(str(output_dir))
    if gates is not None:
        run_gates(dataset, manifest=manifest, gates=gates)
    if upload_to is not None:
        _upload(output_dir, upload_to, endpoint_url, disable_tqdm)
    return dataset


def row_origin(row_id: int) -> tuple[int, int, int]:
    """Source number, line (from 1) and assistant turn (from 0) that a `row_id` was made of."""
    return row_id >> (_LINE_BITS + _TURN_BITS), (row_id >> _TURN_BITS) % (1 << _LINE_BITS), row_id % (1 << _TURN_BITS)


# ---- what the run is: tokenizer, options, manifest


def _require_datasets() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ImportError("Tokenizing needs the package datasets: pip install hf-dflash[data]") from None


def _load_tokenizer(target, chat_template, eos_token_ids) -> "tuple[PreTrainedTokenizerBase, list[int]]":
    from transformers import AutoTokenizer, GenerationConfig

    eos_token_ids = set(eos_token_ids)
    if isinstance(target, (str, os.PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(target)
        try:
            ids = GenerationConfig.from_pretrained(target).eos_token_id
        except OSError:
            ids = None  # no such file: the tokenizer's own end of sequence is all there is
        eos_token_ids.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    else:
        tokenizer = target
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer, sorted(eos_token_ids)


def _check_options(options: dict) -> None:
    if options["max_length"] < 2:
        raise ValueError(f"max_length must be at least 2, not {options['max_length']}.")
    if options["min_supervised_tokens"] < 1:
        raise ValueError(f"min_supervised_tokens must be at least 1, not {options['min_supervised_tokens']}.")
    roles = sorted(set(ROLES.values()))
    for name, role in options["extra_roles"].items():
        if role not in roles:
            raise ValueError(f"The role {name!r} cannot be read as {role!r}: it must be one of {', '.join(roles)}.")


def _describe_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> dict:
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        core.no_truncation()
        core.no_padding()
        content = core.to_str()
    else:
        content = json.dumps([tokenizer.get_vocab(), str(tokenizer.added_tokens_decoder)], sort_keys=True)
    return {
        "name": tokenizer.name_or_path,
        "size": len(tokenizer),
        "digest": hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        "chat_template_digest": digest_of(tokenizer.chat_template),
    }


def _start_or_resume(output_dir, sources, tokenizer, options, endpoint_url, split) -> dict:
    """The manifest of this run: that in the folder, if it is of the same run."""
    path = output_dir / "manifest.json"
    earlier = json.loads(path.read_text()) if path.exists() else None
    known = [Source(**source) for source in earlier["sources"]] if earlier else []
    found = list_sources(sources, endpoint_url=endpoint_url, split=split, known=known)
    manifest = {
        "format_version": FORMAT_VERSION,
        "status": "running",
        "tokenizer": _describe_tokenizer(tokenizer),
        "options": json.loads(json.dumps(options)),
        "sources": [asdict(source) for source in found],
    }
    if earlier is None:
        strangers = [item.name for item in output_dir.iterdir() if item.name != ".lock"]
        if strangers:
            raise ValueError(
                f"{output_dir} holds something else ({', '.join(sorted(strangers)[:3])}): choose an empty folder."
            )
        manifest["units"] = [[asdict(part) for part in unit] for unit in cut_into_units(found)]
        _write_json(path, manifest)
        return manifest
    differences = _differences(earlier, manifest)
    if differences:
        raise ValueError(
            f"{output_dir} holds a dataset that was made in another way:\n  "
            + "\n  ".join(differences)
            + "\nChoose another output folder, delete this one, or go back to its options."
        )
    return earlier


def _differences(earlier: dict, now: dict) -> list[str]:
    """What differs between two runs, as lines for a reader."""
    result = []
    if earlier["format_version"] != now["format_version"]:
        result.append(f"format version: {earlier['format_version']}, now {now['format_version']}")
    for part in ("tokenizer", "options"):
        for name, value in now[part].items():
            if name == "name":
                continue  # the same tokenizer may lie elsewhere
            if earlier[part].get(name) != value:
                result.append(f"{name}: {earlier[part].get(name)!r}, now {value!r}")
    before, after = ({s["uri"]: (s["size"], s["version"]) for s in run["sources"]} for run in (earlier, now))
    for change, uris in (
        ("new source", after.keys() - before.keys()),
        ("missing source", before.keys() - after.keys()),
        ("changed source", {uri for uri in before.keys() & after.keys() if before[uri] != after[uri]}),
    ):
        result += [f"{change}: {uri}" for uri in sorted(uris)[:3]]
        if len(uris) > 3:
            result.append(f"{change}: {len(uris) - 3} more")
    return result


@contextmanager
def _locked(output_dir: Path) -> Iterator[None]:
    """Keeps a second run out of the folder. The lock goes with the process, however that ends."""
    output_dir.mkdir(parents=True, exist_ok=True)
    with open(output_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another process is tokenizing into {output_dir}.") from None
        yield


def _write_json(path: Path, content: Any) -> None:
    """Writes a file at once: whoever reads it finds the old content or the new one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(partial, path)


# ---- the work: units, in one process or several


def _run_units(output_dir, manifest, tokenizer, num_workers, endpoint_url, disable_tqdm) -> None:
    from tqdm.auto import tqdm

    sizes = [sum(part["end"] - part["start"] for part in unit) for unit in manifest["units"]]
    todo = [index for index in range(len(sizes)) if not _unit_path(output_dir, index, ".json").exists()]
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), max(1, len(todo)))
    worker = (str(output_dir), manifest, tokenizer, endpoint_url)
    with tqdm(
        total=sum(sizes),
        initial=sum(sizes) - sum(sizes[index] for index in todo),
        unit="B",
        unit_scale=True,
        desc="Tokenizing",
        disable=disable_tqdm,
    ) as bar:
        for index, counts in _map_units(todo, worker, num_workers):
            bar.update(sizes[index])
            bar.set_postfix(samples=counts["samples"], refresh=False)


def _map_units(todo: list[int], worker: tuple, num_workers: int) -> Iterator[tuple[int, dict]]:
    if num_workers == 1:
        _start_worker(*worker)
        yield from map(_process_unit, todo)
        return
    # A fork of this process could inherit locks of its threads (the tokenizer's, torch's, CUDA's). The fork server is a
    # fresh process that imports what workers need once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "datasets", type(worker[2]).__module__])
    with context.Pool(num_workers, _start_pool_worker, worker) as pool:
        yield from pool.imap_unordered(_process_unit, todo)


class _Worker:
    """What a process needs to do units of one run."""

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

        counts = _new_counts()
        arrow = _unit_path(self.output_dir, index, ".arrow")
        # The process in the name: workers of a run that was killed may still be at their last unit.
        partial = _unit_path(self.output_dir, index, f".arrow.{os.getpid()}.partial")
        partial_skipped = _unit_path(self.output_dir, index, f".skipped.jsonl.{os.getpid()}.partial")
        schema = dataset_features().arrow_schema
        with (
            open(partial, "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
            open(partial_skipped, "w", encoding="utf-8") as self._skipped,
        ):
            for batch in self._batches(self.units[index]):
                samples = self._process_rows(batch, counts)
                if samples:
                    writer.write_batch(_record_batch(samples, schema))
        os.replace(partial, arrow)
        os.replace(partial_skipped, _unit_path(self.output_dir, index, ".skipped.jsonl"))
        _write_json(_unit_path(self.output_dir, index, ".json"), counts)
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


_worker: _Worker


def _start_worker(*arguments) -> None:
    global _worker
    _worker = _Worker(*arguments)


def _start_pool_worker(*arguments) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    _start_worker(*arguments)


def _process_unit(index: int) -> tuple[int, dict]:
    return index, _worker.process(index)


def _new_counts() -> dict:
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


def _unit_path(output_dir: Path, index: int, suffix: str) -> Path:
    return output_dir / f"unit-{index:05d}{suffix}"


def parse_line(line: bytes | dict) -> dict:
    """
    The JSON of one line.

    Raises:
        [`~data.conversations.RowSkipped`]: the line is not JSON, or holds what no tokenizer can take.
    """
    if isinstance(line, dict):
        return line
    if len(line) > MAX_LINE_BYTES:
        raise RowSkipped("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    if b"\0" in line:
        raise RowSkipped("nul_byte")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowSkipped("bad_utf8", f"byte {error.start + 1} of the line") from None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowSkipped("bad_json", str(error)[:200]) from None
    # Half a surrogate pair can only come from an escape.
    if _SURROGATE_ESCAPE.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise RowSkipped("lone_surrogate") from None
    return row


_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


# ---- the dataset


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


def _finish(output_dir: Path, manifest: dict) -> dict:
    """Adds up the units and makes the folder a dataset."""
    import datasets

    total = _new_counts()
    files = []
    for index in range(len(manifest["units"])):
        counts = json.loads(_unit_path(output_dir, index, ".json").read_text())
        _add_counts(total, counts)
        if counts["samples"]:
            files.append(_unit_path(output_dir, index, ".arrow").name)
    files = files or [_unit_path(output_dir, 0, ".arrow").name]

    partial = output_dir / "skipped.jsonl.partial"
    with open(partial, "wb") as together:
        for index in range(len(manifest["units"])):
            together.write(_unit_path(output_dir, index, ".skipped.jsonl").read_bytes())
    os.replace(partial, output_dir / "skipped.jsonl")

    manifest = {
        **manifest,
        "status": "finished",
        "counts": total,
    }
    datasets.DatasetInfo(features=dataset_features()).write_to_directory(str(output_dir))
    state = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": digest_of(manifest)[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    _write_json(output_dir / "state.json", state)
    _write_json(output_dir / "manifest.json", manifest)
    return manifest


def _add_counts(total: dict, counts: dict) -> None:
    for name, value in counts.items():
        if name == "first_skipped":
            total[name] = dict(sorted((value | total[name]).items()))
        elif name == "of_sources":
            for source, of_source in value.items():
                total[name][source] = dict(Counter(total[name].get(source, {})) + Counter(of_source))
        elif isinstance(value, dict):
            total[name] = dict(sorted((Counter(total[name]) + Counter(value)).items()))
        else:
            total[name] += value


def _remove_leftovers(output_dir: Path) -> None:
    """What a finished folder needs no more: the state of its units, and what a stopped run has left."""
    for pattern in ("*.partial", "unit-*.json", "unit-*.skipped.jsonl"):
        for path in output_dir.glob(pattern):
            path.unlink(missing_ok=True)


def _check_that_sources_are_usable(output_dir: Path, manifest: dict, sources) -> None:
    """
    Refuses a dataset without samples, and a source that was named (not found in a folder or under a prefix) without any.
    """
    named = {str(source) for source in ([sources] if isinstance(sources, (str, os.PathLike)) else sources)}
    places = [
        (str(index), source["uri"]) for index, source in enumerate(manifest["sources"]) if source["uri"] in named
    ]
    total = manifest["counts"]
    for index, uri in [*places, (None, None)]:
        counts = total["of_sources"].get(index, {}) if index else total
        rows, samples = counts.get("rows", 0), counts.get("samples", 0)
        name = uri or f"The {len(manifest['sources'])} sources together"
        if rows == 0:
            raise ValueError(f"{name}: empty, there is not one row.")
        if samples == 0:
            skipped = _first_skipped(output_dir, uri)
            raise ValueError(
                f"{name}: none of {rows} rows can be used. The first is {skipped['source']}:{skipped['line']}: "
                f"{skipped['reason']}: {skipped['detail']}\n(all of them are listed in {output_dir / 'skipped.jsonl'})"
            )


def _first_skipped(output_dir: Path, uri: str | None) -> dict:
    with open(output_dir / "skipped.jsonl", encoding="utf-8") as lines:
        return next(entry for entry in map(json.loads, lines) if uri in (None, entry["source"]))


def _upload(output_dir: Path, uri: str, endpoint_url: str | None, disable_tqdm: bool) -> None:
    from tqdm.auto import tqdm

    with tqdm(unit="file", desc="Uploading", disable=disable_tqdm) as bar:
        ObjectStore(endpoint_url=endpoint_url).upload_folder(
            output_dir, uri, last=("manifest.json",), on_file=lambda name: bar.update()
        )


# ---- the command


def main(argv: list[str] | None = None) -> int:
    """
    `hf-dflash tokenize`.

    Returns:
        `int`: 0 if every row was used; 3 if the dataset is done but rows were skipped (more than `--allow-skipped`);
        1 if a gate refused it. Other mistakes are exceptions, which the command line turns into 2.
    """
    arguments = _parser().parse_args(argv)
    template = Path(arguments.chat_template).read_text(encoding="utf-8") if arguments.chat_template else None
    dataset = None
    try:
        dataset = tokenize_completions(
            arguments.sources,
            arguments.target,
            arguments.output,
            max_length=arguments.max_length,
            min_supervised_tokens=arguments.min_supervised_tokens,
            enable_thinking=arguments.enable_thinking,
            chat_template=template,
            chat_template_kwargs=arguments.chat_template_kwargs,
            extra_roles=dict(arguments.map_role),
            split=arguments.split,
            num_workers=arguments.num_workers,
            gates=DatasetGates.from_arguments(arguments),
            upload_to=arguments.upload_to,
            endpoint_url=arguments.endpoint_url,
            disable_tqdm=arguments.quiet,
        )
    except DatasetRefused as refused:
        print(describe_counts(json.loads((Path(arguments.output) / "manifest.json").read_text())))
        print(f"\n{refused}", file=sys.stderr)
        return 1
    manifest = json.loads((Path(arguments.output) / "manifest.json").read_text())
    print(describe_counts(manifest))
    print(f"{len(dataset)} samples in {arguments.output}. Look at them with: hf-dflash check {arguments.output}")
    counts = manifest["counts"]
    skipped = counts["rows"] - counts["rows_used"] + sum(counts["turns_skipped"].values())
    return 3 if skipped > arguments.allow_skipped * counts["rows"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-dflash tokenize",
        description="Completions (JSONL) -> a loss-masked dataset. A stopped run goes on; a finished one is not redone.",
        epilog="Exit status: 0 every row used; 3 done, but rows were skipped; 1 refused by a gate; 2 an error.\n\n"
        + conversations.__doc__.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="JSONL files (also .gz), folders, globs, s3://bucket/prefix, hub://dataset; layouts and roles are below",
    )
    parser.add_argument(
        "--target", required=True, help="the target (folder or Hub id), for its tokenizer and template"
    )
    parser.add_argument("--output", required=True, help="folder of the dataset")
    parser.add_argument("--max-length", type=int, default=4096, help="cut samples to this many tokens (%(default)s)")
    parser.add_argument(
        "--min-supervised-tokens", type=int, default=2, help="skip samples with fewer supervised tokens (%(default)s)"
    )
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="as the target was served (default: what the template does by itself)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="template the target was served with, if not its own")
    parser.add_argument(
        "--chat-template-kwargs", type=json.loads, metavar="JSON", help="further variables for the template"
    )
    parser.add_argument(
        "--map-role", type=_role, action="append", default=[], metavar="NAME=ROLE", help="read a role name as a role"
    )
    parser.add_argument("--split", default="train", help="split of a Hub dataset (%(default)s)")
    parser.add_argument("--num-workers", type=int, help="processes (default: one for each core)")
    parser.add_argument(
        "--allow-skipped",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="skipped rows that are no reason for status 3",
    )
    parser.add_argument("--upload-to", metavar="S3_URI", help="copy the finished folder there")
    parser.add_argument("--endpoint-url", help="address of the object store, if not Amazon's")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    DatasetGates.add_arguments(parser)
    return parser


def _role(text: str) -> tuple[str, str]:
    name, separator, role = text.partition("=")
    if not (name and separator and role):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=ROLE")
    return name, role
