# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Several prompt sources -> one prompt set: a folder of `prompts.jsonl` and `mixture.json` (the manifest and report).

Rows are removed in this order: what cannot be read, filters, exact duplicates across all sources, overlap with evaluation
prompts, near-duplicates. Where two sources have the same prompt, the source that is named first keeps it. What is left over is
sampled and shuffled by a hash of the seed and the prompt, so a prompt's fate does not depend on the order of the files.
"""

import hashlib
import json
import os
import tempfile
from array import array
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from hf_dflash.atomic_files import locked_folder, replacing, write_json

from ..command_line import CommandParser
from ..progress import ProgressBar
from .conversations import RowSkipped
from .mixture_file import Mixture, MixtureSource, load_mixture
from .on_policy import PromptConversation
from .prompt_mapping import map_row
from .prompt_overlap import EvaluationOverlap, NearDuplicates, words_of
from .sources import HUB_PREFIX, Source, list_sources, parse_line, read_all_rows


def build_mixture(
    mixture: Mixture, *, output_dir: str | None = None, endpoint_url: str | None = None, disable_tqdm: bool = False
) -> dict:
    """
    Builds the prompt set.

    Args:
        mixture ([`Mixture`]):
            What goes in.
        output_dir (`str`, *optional*):
            Instead of `mixture.output`.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        disable_tqdm (`bool`, *optional*, defaults to `False`):
            If `True`, no progress is shown.

    Returns:
        `dict`: the manifest: the mixture, the files it was made of, and for each source how many rows were read, removed
        (by reason) and written. `prompts.jsonl` lies beside it, complete or not at all.

    Raises:
        `FileNotFoundError`: a source does not exist.
        `ValueError`: a source gives no prompt at all, or has no row with a field that its mapping names.
    """
    output = Path(output_dir or mixture.output)
    overlap = _read_evaluation_prompts(mixture, endpoint_url)
    files = _find_files(mixture, endpoint_url)
    reports: dict[str, Counter] = {source.name: Counter() for source in mixture.sources}
    known = NearDuplicates(**mixture.near_duplicates) if mixture.near_duplicates is not None else None
    with locked_folder(output, "writing prompts into"), tempfile.TemporaryFile(dir=output) as stage:
        seen: set[bytes] = set()
        candidates = {
            source.name: _collect(
                source,
                files[source.name],
                mixture,
                overlap,
                seen,
                stage,
                reports[source.name],
                endpoint_url,
                disable_tqdm,
            )
            for source in mixture.sources
        }
        chosen = [
            place
            for source in mixture.sources
            for place in _choose(
                candidates[source.name], mixture.wanted(source), known, stage, reports[source.name], disable_tqdm
            )
        ]
        chosen.sort(key=lambda place: _digest(mixture.seed, "shuffle", place[0]))
        with replacing(output / "prompts.jsonl", "wb") as file:
            for _, offset in chosen:
                stage.seek(offset)
                file.write(stage.readline())
    manifest = {
        "mixture": asdict(mixture),
        "files": {name: [asdict(file) for file in found] for name, found in files.items()},
        "rows": len(chosen),
        "report": {name: dict(report) for name, report in reports.items()},
    }
    write_json(output / "mixture.json", manifest)
    return manifest


def _read_evaluation_prompts(mixture: Mixture, endpoint_url: str | None) -> EvaluationOverlap:
    options = dict(mixture.evaluation_prompts or {})
    if not options:
        return EvaluationOverlap([])
    prompts = []
    try:
        files = list_sources(options.pop("path"), endpoint_url=endpoint_url)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`evaluation_prompts` of the mixture: {error} Put the prompts that you will measure with there as JSONL, or take the key "
            "out of the mixture."
        ) from None
    for where, content in read_all_rows(files, endpoint_url=endpoint_url):
        try:
            prompts.append(words_of(PromptConversation(parse_line(content)).messages))
        except RowSkipped as skipped:
            raise ValueError(f"{where} is no evaluation prompt: {skipped}") from None
    return EvaluationOverlap(prompts, **options)


def _find_files(mixture: Mixture, endpoint_url: str | None) -> dict[str, list[Source]]:
    """The files of each source, in the mixture's order."""
    found = {}
    # Datasets of the Hub last: they take minutes to fetch, for which a mistake in a path need not wait.
    for source in sorted(mixture.sources, key=lambda source: HUB_PREFIX in str(source.path)):
        try:
            found[source.name] = list_sources(source.path, endpoint_url=endpoint_url, split=source.split)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"Source `{source.name}` of the mixture: {error}") from error
    return {source.name: found[source.name] for source in mixture.sources}


def _collect(
    source: MixtureSource,
    files: list[Source],
    mixture: Mixture,
    overlap: EvaluationOverlap,
    seen: set[bytes],
    stage: IO[bytes],
    report: Counter,
    endpoint_url: str | None,
    disable_tqdm: bool,
) -> tuple[array, array]:
    """Writes the usable prompts of a source to the stage. Returns their ranks (64 bits of a hash) and offsets."""
    filters = source.filters or mixture.filters
    ranks, offsets = array("Q"), array("Q")
    first_problem = ""
    # A row may lack its system prompt or tools, but if all of them do, the mapping has a slip.
    never_seen = {source.mapping[key]: key for key in ("system", "tools") if key in source.mapping}
    for where, content in ProgressBar(
        read_all_rows(files, endpoint_url=endpoint_url), desc=source.name, unit=" rows", disable=disable_tqdm
    ):
        report["read"] += 1
        try:
            row = parse_line(content)
            messages, tools = map_row(row, source.mapping)
        except RowSkipped as skipped:
            first_problem = first_problem or f"{where}: {skipped}"
            report[skipped.reason] += 1
            continue
        for field in never_seen.keys() & row.keys():
            del never_seen[field]
        if reason := filters.reason_against(messages):
            report[reason] += 1
            continue
        words = words_of(messages)
        # A prompt without words (formulas, other scripts' signs) is compared by its characters.
        digest = _digest(words or [message["content"] for message in messages])
        if digest in seen:
            report["exact_duplicate"] += 1
            continue
        seen.add(digest)
        if words in overlap:
            report["evaluation_overlap"] += 1
            continue
        row = {"id": f"{source.name}-{digest.hex()[:20]}", "source": source.name, "messages": messages}
        if tools:
            row["tools"] = tools
        ranks.append(int.from_bytes(_digest(mixture.seed, digest.hex(), size=8)))
        offsets.append(stage.tell())
        stage.write(json.dumps(row).encode() + b"\n")
    if not offsets and first_problem:
        raise ValueError(f"{source.name} gives no prompt; does its mapping fit? {first_problem}")
    if not offsets and not (report["exact_duplicate"] or report["evaluation_overlap"]):
        counts = ", ".join(f"{reason} {count}" for reason, count in report.items()) or "its files hold no rows"
        raise ValueError(
            f"{source.name} gives no prompt ({counts}): take it out of the mixture, or mend its files or filters."
        )
    for field, key in never_seen.items():
        raise ValueError(f"No row of {source.name} has the field {field!r}, which its mapping names as {key}.")
    return ranks, offsets


def _choose(
    candidates: tuple[array, array],
    wanted: int | None,
    known: NearDuplicates | None,
    stage: IO[bytes],
    report: Counter,
    disable_tqdm: bool,
) -> list[tuple[int, int]]:
    """Rank and offset of the prompts of a source that are taken: those of the smallest ranks that are new."""
    ranks, offsets = candidates
    chosen = []
    for index in ProgressBar(
        np.argsort(np.array(ranks, dtype=np.uint64)), desc="choosing", unit=" rows", disable=disable_tqdm
    ):
        if wanted is not None and len(chosen) == wanted:
            report["not_sampled"] = len(ranks) - len(chosen) - report["near_duplicate"]
            break
        if known is not None:
            stage.seek(offsets[index])
            if not known.add_unless_known(words_of(json.loads(stage.readline())["messages"])):
                report["near_duplicate"] += 1
                continue
        chosen.append((ranks[index], offsets[index]))
    stage.seek(0, os.SEEK_END)
    report["written"] = len(chosen)
    if wanted is not None:
        report["missing"] = wanted - len(chosen)
    return chosen


def _digest(*parts: Any, size: int = 16) -> bytes:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=size).digest()


def format_report(manifest: dict) -> str:
    """The counts of a mixture as a table: one column for each source."""
    reports = manifest["report"]
    middle = sorted({key for report in reports.values() for key in report} - {"read", "written", "missing"})
    keys = ["read", *middle, "written", "missing"]
    width = max(map(len, keys))
    widths = {name: max(len(name), 9) for name in reports}
    lines = [" " * width + "  " + "  ".join(f"{name:>{widths[name]}}" for name in reports) + "      total"]
    for key in keys:
        counts = [report.get(key, 0) for report in reports.values()]
        if any(counts) or key in ("read", "written"):
            cells = "  ".join(f"{count:>{widths[name]},}" for name, count in zip(reports, counts, strict=True))
            lines.append(f"{key:<{width}}  {cells}  {sum(counts):>9,}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash mix mixture.yaml`."""
    parser = CommandParser(
        prog="hf-dflash mix", description="Several prompt sources -> one prompt set, as a YAML file describes it."
    )
    parser.add_argument("mixture", help="YAML file, such as recipes/mixtures/qwen36.yaml")
    parser.add_argument("--output", help="folder of the prompt set (default: as in the file)")
    parser.add_argument("--endpoint_url", help="address of the object store, if not Amazon's")
    arguments = parser.parse_args(argv)
    mixture = load_mixture(arguments.mixture)
    manifest = build_mixture(mixture, output_dir=arguments.output, endpoint_url=arguments.endpoint_url)
    print(format_report(manifest))
    print(f"{manifest['rows']:,} prompts in {Path(arguments.output or mixture.output) / 'prompts.jsonl'}")
    return 0
