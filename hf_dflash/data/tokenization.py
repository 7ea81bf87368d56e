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

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dflash.atomic_files import locked_folder, replacing, write_json
from hf_dflash.object_store import ObjectStore

from .conversations import ROLES
from .dataset_gates import DatasetGates, run_gates
from .sources import Part, Source, cut_into_units, digest_of, list_sources, size_of
from .unit_tokenization import dataset_features, new_counts, unit_path
from .unit_workers import process_units


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


FORMAT_VERSION = 1


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
    Tokenizes completions into a dataset for training.

    A folder that holds a finished dataset of the same sources and options is used as it is; a stopped run goes on where it
    was; a folder with other sources or options is refused, unless there is not one sample in it.

    Args:
        sources (`str` or `list[str]`):
            JSONL files (plain or .gz), folders, globs, `s3://bucket/prefix`, `hub://dataset`, `hub://dataset#split`. The
            layouts and roles of their rows are in the tables of `conversations.py`.
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
            Split of a Hub dataset that names none.
        num_workers (`int`, *optional*):
            Processes, this one included. By default one for each core; no more than there are units of work. The others import
            the script again: with several it must call this under `if __name__ == "__main__":`.
        gates ([`~data.dataset_gates.DatasetGates`], *optional*):
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
        [`~data.dataset_gates.DatasetRefused`]: a gate failed. The folder stays as it is, for `hf-dflash check`.
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
    _check_options(options, num_workers)

    with locked_folder(output_dir, "tokenizing into"):
        manifest = _start_or_resume(output_dir, sources, tokenizer, options, endpoint_url, split)
        if manifest["status"] != "finished":
            try:
                _run_units(output_dir, manifest, tokenizer, num_workers, endpoint_url, disable_tqdm)
            except BaseException:  # Ctrl+C too
                if not _has_results(output_dir, manifest):
                    _forget(output_dir)
                raise
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


# ---- what the run is: tokenizer, options, manifest


def _require_datasets() -> None:
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ImportError("Tokenizing needs the package datasets: pip install 'hf-dflash[data]'") from None


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


def _check_options(options: dict, num_workers: int | None) -> None:
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}: give at least 1, or nothing for one on each core.")
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
    differences = _differences(earlier, manifest) if earlier else []
    if differences and not _has_results(output_dir, earlier):
        # What stopped that run, or left it without one sample, may be what is different now.
        _forget(output_dir)
        earlier = None
    if earlier is None:
        strangers = [item.name for item in output_dir.iterdir() if item.name != ".lock"]
        if strangers:
            raise ValueError(
                f"{output_dir} holds something else ({', '.join(sorted(strangers)[:3])}): choose an empty folder."
            )
        manifest["units"] = [[asdict(part) for part in unit] for unit in cut_into_units(found)]
        write_json(path, manifest)
        return manifest
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


# ---- the work: units, in one process or several


def _run_units(output_dir, manifest, tokenizer, num_workers, endpoint_url, disable_tqdm) -> None:
    from ..progress import ProgressBar

    sources = [Source(**source) for source in manifest["sources"]]
    # Large ones first: those that are left for the end, when not all workers have one, are small.
    sizes = [sum(size_of(Part(**part), sources) for part in unit) for unit in manifest["units"]]
    counts = [unit_path(output_dir, index, ".json") for index in range(len(sizes))]
    todo = [index for index, path in enumerate(counts) if not path.exists()]
    num_samples = sum(json.loads(path.read_text())["samples"] for path in counts if path.exists())
    todo.sort(key=lambda index: -sizes[index])
    num_workers = min(num_workers or len(os.sched_getaffinity(0)), max(1, len(todo)))
    with ProgressBar(
        total=sum(sizes),
        initial=sum(sizes) - sum(sizes[index] for index in todo),
        unit="B",
        unit_scale=True,
        desc="Tokenizing",
        disable=disable_tqdm,
    ) as bar:
        for index, samples in process_units(todo, (str(output_dir), manifest, tokenizer, endpoint_url), num_workers):
            num_samples += samples
            bar.set_postfix(samples=num_samples, refresh=False)
            bar.update(sizes[index])


# ---- the dataset


def _finish(output_dir: Path, manifest: dict) -> dict:
    """Adds up the units and makes the folder a dataset."""
    import datasets

    total = new_counts()
    files = []
    for index in range(len(manifest["units"])):
        counts = json.loads(unit_path(output_dir, index, ".json").read_text())
        _add_counts(total, counts)
        if counts["samples"]:
            files.append(unit_path(output_dir, index, ".arrow").name)
    files = files or [unit_path(output_dir, 0, ".arrow").name]

    with replacing(output_dir / "skipped.jsonl", "wb") as together:
        for index in range(len(manifest["units"])):
            together.write(unit_path(output_dir, index, ".skipped.jsonl").read_bytes())

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
    write_json(output_dir / "state.json", state)
    write_json(output_dir / "manifest.json", manifest)
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


def _has_results(output_dir: Path, manifest: dict) -> bool:
    """Whether a run has left something that another start can go on with."""
    if manifest["status"] == "finished":
        return manifest["counts"]["samples"] > 0
    return any(output_dir.glob("unit-*.json"))


def _forget(output_dir: Path) -> None:
    """Takes away what a run has written; the manifest last, for without it the rest would be a stranger's."""
    names = ("skipped.jsonl", "dataset_info.json", "state.json", "report.json", "report.png", "manifest.json")
    for pattern in ("unit-*", "*.partial", *names):
        for path in output_dir.glob(pattern):
            path.unlink(missing_ok=True)


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
    from ..progress import ProgressBar

    with ProgressBar(unit="file", desc="Uploading", disable=disable_tqdm) as bar:
        ObjectStore(endpoint_url=endpoint_url).upload_folder(
            output_dir, uri, last=("manifest.json",), on_file=lambda name: bar.update()
        )
