# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Several prompt sources -> one prompt set, described by a YAML file (see recipes/mixtures/qwen36.yaml).

    output: prompts/mine            # folder of prompts.jsonl and mixture.json (the manifest and report)
    seed: 0
    rows: 100000                    # only with weights
    filters:                        # of all sources; a source may have its own
      min_characters: 10            # of the user turns together
      max_characters: 20000         # of all that the target is shown
      max_turns: 8                  # user turns
      languages: [en]               # of the user turns, ISO 639-1
    near_duplicates: {similarity: 0.8, words: 5}
    evaluation_prompts: {path: [eval/*.jsonl], words: 10}
    sources:
      - name: orca
        path: hub://Open-Orca/OpenOrca   # as for hf-dflash tokenize
        split: train
        license: MIT
        mapping: {system: system_prompt, prompt: question}
        rows: 50000                 # or weight: 2, or neither: all

A mapping names the fields of the source:

| key               | the field holds                                                                                  |
|-------------------|--------------------------------------------------------------------------------------------------|
| `prompt`          | one user turn                                                                                    |
| `messages`        | chat messages in any form of `conversations.py`, or their JSON                                    |
| `transcript`      | a text of `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:` turns; the system text lists functions as JSON |
| `system`          | the system prompt                                                                                |
| `tools`           | tools, or their JSON                                                                             |
| `first_turn_only` | (`true`) of recorded agents: their later user turns answer to another model's commands              |

Recorded answers are not kept: of an assistant turn only its place and the names of the tools that it called remain.

Rows are removed in this order: what cannot be read, filters, exact duplicates across all sources, overlap with evaluation
prompts, near-duplicates. Where two sources have the same prompt, the source that is named first keeps it. What is left over is
sampled and shuffled by a hash of the seed and the prompt, so a prompt's fate does not depend on the order of the files.
"""

import hashlib
import json
import os
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

from hf_dflash.atomic_files import replacing, write_json

from ..command_line import CommandParser
from ..progress import ProgressBar
from .conversations import ROLES, RowSkipped, read_messages, read_tools
from .on_policy import PromptConversation
from .sources import Source, cut_into_units, list_sources, parse_line, read_rows


# Permutations of a MinHash: the standard error of the estimated similarity is at most 0.06.
_NUM_PERMUTATIONS = 64


@dataclass(frozen=True)
class PromptFilters:
    """
    What a prompt must fulfil; `None` demands nothing.

    Args:
        min_characters (`int`, *optional*):
            Of the user turns together.
        max_characters (`int`, *optional*):
            Of all that the target is shown.
        max_turns (`int`, *optional*):
            User turns.
        languages (`list[str]`, *optional*):
            Of the user turns, as ISO 639-1 codes.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    max_turns: int | None = None
    languages: list[str] | None = None

    def reason_against(self, messages: list[dict]) -> str | None:
        """Why a prompt is removed, or `None`."""
        user_turns = [message["content"] for message in messages if message["role"] == "user"]
        if self.min_characters is not None and sum(map(len, user_turns)) < self.min_characters:
            return "too_short"
        if self.max_characters is not None and sum(len(m["content"]) for m in messages) > self.max_characters:
            return "too_long"
        if self.max_turns is not None and len(user_turns) > self.max_turns:
            return "too_many_turns"
        if self.languages is not None and _language_of("\n".join(user_turns)) not in self.languages:
            return "other_language"
        return None


@dataclass(frozen=True)
class MixtureSource:
    """
    One source of a mixture; see the module's description.

    Args:
        name (`str`):
            Goes into the rows as `source`.
        path (`str` or `list[str]`):
            Files, folders, globs, `s3://` prefixes or `hub://` datasets.
        mapping (`dict`):
            Key of the table above -> field of the source.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a Hub dataset.
        license (`str`, *optional*):
            For the manifest.
        rows (`int`, *optional*):
            Prompts to take.
        weight (`float`, *optional*):
            Share of the mixture's `rows`, relative to the other weights.
        filters ([`PromptFilters`], *optional*):
            Instead of those of the mixture.
    """

    name: str
    path: str | list[str]
    mapping: dict[str, Any]
    split: str = "train"
    license: str | None = None
    rows: int | None = None
    weight: float | None = None
    filters: PromptFilters | None = None

    def __post_init__(self):
        known = {"prompt", "messages", "transcript", "system", "tools", "first_turn_only"}
        if unknown := self.mapping.keys() - known:
            raise ValueError(f"The mapping of {self.name} has {sorted(unknown)[0]!r}; the keys are {sorted(known)}.")
        if len(self.mapping.keys() & {"prompt", "messages", "transcript"}) != 1:
            raise ValueError(f"The mapping of {self.name} must have one of prompt, messages and transcript.")
        if self.rows is not None and self.weight is not None:
            raise ValueError(f"{self.name} has rows and weight: give one of them.")
        if (self.rows is not None and self.rows < 1) or (self.weight is not None and self.weight <= 0):
            raise ValueError(f"rows and weight of {self.name} must be positive.")


@dataclass(frozen=True)
class Mixture:
    """
    The YAML file; see the module's description.

    Args:
        output (`str`):
            Folder of the prompt set.
        sources (`list[MixtureSource]`):
            In order of precedence.
        seed (`int`, *optional*, defaults to 0):
            For sampling and shuffling.
        rows (`int`, *optional*):
            Prompts of all sources with a weight together.
        filters ([`PromptFilters`], *optional*):
            For sources without filters of their own.
        near_duplicates (`dict`, *optional*):
            `similarity` (Jaccard, of the `words`-grams of the user turns) from which on a prompt is a near-duplicate.
        evaluation_prompts (`dict`, *optional*):
            `path` of prompts that must not be trained on; a prompt that shares `words` words in a row with one is removed.
    """

    output: str
    sources: list[MixtureSource]
    seed: int = 0
    rows: int | None = None
    filters: PromptFilters = field(default_factory=PromptFilters)
    near_duplicates: dict[str, Any] | None = None
    evaluation_prompts: dict[str, Any] | None = None

    def __post_init__(self):
        names = Counter(source.name for source in self.sources)
        if not self.sources or max(names.values()) > 1:
            raise ValueError("A mixture needs sources, each with a name of its own.")
        weighted = [source.name for source in self.sources if source.weight is not None]
        if bool(weighted) != (self.rows is not None):
            raise ValueError("rows of the mixture are shared among the sources with a weight: give both or neither.")
        _check_keys(self.near_duplicates or {}, {"similarity", "words"}, "near_duplicates")
        _check_keys(self.evaluation_prompts or {}, {"path", "words"}, "evaluation_prompts")

    def wanted(self, source: MixtureSource) -> int | None:
        """Rows to take of a source; `None` is all."""
        if source.weight is None:
            return source.rows
        weights = sum(other.weight for other in self.sources if other.weight is not None)
        return round(self.rows * source.weight / weights)


def load_mixture(path: str | os.PathLike) -> Mixture:
    """
    Reads a mixture from its YAML file.

    Raises:
        `ValueError`: no YAML, an unknown key, or a value that makes no sense; the message names it.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not describe a mixture: see recipes/mixtures/qwen36.yaml for one.")
    _check_keys(content, {item.name for item in fields(Mixture)}, str(path))
    sources = []
    for number, entry in enumerate(content.get("sources") or [], 1):
        where = f"source {entry.get('name', number)} of {path}"
        _check_keys(entry, {item.name for item in fields(MixtureSource)}, where)
        if missing := {"name", "path", "mapping"} - entry.keys():
            raise ValueError(f"{where} has no {sorted(missing)[0]}.")
        sources.append(MixtureSource(**{**entry, "filters": _read_filters(entry.get("filters"), where)}))
    content["sources"] = sources
    content["filters"] = _read_filters(content.get("filters"), str(path)) or PromptFilters()
    if "output" not in content:
        raise ValueError(f"{path} has no output.")
    return Mixture(**content)


def _read_filters(entry: dict | None, where: str) -> PromptFilters | None:
    if entry is None:
        return None
    _check_keys(entry, {item.name for item in fields(PromptFilters)}, f"filters of {where}")
    return PromptFilters(**entry)


def _check_keys(entry: dict, known: set[str], where: str) -> None:
    if unknown := entry.keys() - known:
        raise ValueError(f"{where}: there is no {sorted(unknown)[0]!r}; the keys are {', '.join(sorted(known))}.")


# ---- one row of a source -> one prompt


def map_row(row: dict, mapping: dict[str, Any]) -> tuple[list[dict], list[dict] | None]:
    """
    Reads a prompt out of a row.

    Args:
        row (`dict`):
            A row of a source, in that source's own schema.
        mapping (`dict`):
            Key of the module's table -> field.

    Returns:
        `tuple[list[dict], list[dict] | None]`: messages up to the last turn that is not the assistant's, and tools. Assistant
        turns are empty, but for the tools that they called.

    Raises:
        [`~data.conversations.RowSkipped`]: the row has no prompt, or a part of it has the wrong type.
    """
    system = _text_of(row, mapping.get("system"))
    tools = read_tools(row.get(mapping["tools"])) if "tools" in mapping else None
    if "transcript" in mapping:
        messages = _read_transcript(_text_of(row, mapping["transcript"]))
        system, found = _take_functions(system)
        tools = tools or found
    elif "prompt" in mapping:
        messages = [{"role": "user", "content": _text_of(row, mapping["prompt"])}]
    else:
        messages = row.get(mapping["messages"])
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except ValueError as error:
                raise RowSkipped("bad_json", f"{mapping['messages']}: {error}") from None
        messages = read_messages(messages, ROLES, mapping["messages"])
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if mapping.get("first_turn_only"):
        first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise RowSkipped("missing_field", "there is no user turn")
        messages = messages[: first + 1]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise RowSkipped("missing_field", "there is no user turn")
    # Read once more, as `hf-dflash generate` will.
    PromptConversation({"messages": messages, "tools": tools})
    return [_without_answer(message) for message in messages], tools


def _text_of(row: dict, name: str | None) -> str:
    if name is None or row.get(name) is None:
        return ""
    if not isinstance(row[name], str):
        raise RowSkipped("wrong_type", f"{name} is a {type(row[name]).__name__}, not a string")
    return row[name]


def _without_answer(message: dict) -> dict:
    if message["role"] != "assistant":
        return {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    result = {"role": "assistant", "content": ""}
    if message.get("tool_calls"):
        result["tool_calls"] = message["tool_calls"]
    return result


_TRANSCRIPT_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):[ \t]*")
_TRANSCRIPT_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TRANSCRIPT_CALL = re.compile(r"<functioncall>\s*\{\s*\"name\":\s*\"([^\"]+)\"")


def _read_transcript(text: str) -> list[dict]:
    """
    Messages of a transcript in the style of Glaive. Of a call only the function's name is read: its arguments are often no
    JSON, and the target writes its own.
    """
    parts = _TRANSCRIPT_TURN.split(text)
    if len(parts) < 3:
        raise RowSkipped("missing_field", "the transcript has no USER: turn")
    messages: list[dict] = []
    for label, content in zip(parts[1::2], parts[2::2], strict=True):
        content = content.replace("<|endoftext|>", "").strip()
        message = {"role": _TRANSCRIPT_ROLES[label], "content": content}
        if label == "ASSISTANT":
            calls = [{"name": name, "arguments": {}} for name in _TRANSCRIPT_CALL.findall(content)]
            if calls:
                message["tool_calls"] = calls
        messages.append(message)
    return read_messages(messages)


def _take_functions(system: str) -> tuple[str, list[dict] | None]:
    """
    The functions that a system text lists as JSON objects, as tools. The text around them only says that they are there, and
    the target's chat template says it in its own words.
    """
    system = system.strip().removeprefix("SYSTEM:").strip()
    decoder, tools, position = json.JSONDecoder(), [], system.find("{")
    while position >= 0:
        try:
            function, end = decoder.raw_decode(system, position)
        except ValueError:
            raise RowSkipped("bad_json", "the functions in the system text are not JSON") from None
        tools.append(function if function.get("type") == "function" else {"type": "function", "function": function})
        position = system.find("{", end)
    return ("", tools) if tools else (system, None)


# ---- what two prompts have in common


def _words_of(messages: list[dict]) -> list[str]:
    """Lower-case words of the user turns. System prompts are left out: whole sources share them."""
    text = "\n".join(message["content"] for message in messages if message["role"] == "user")
    return re.findall(r"\w+", text.lower())


def _digest(*parts: Any, size: int = 16) -> bytes:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=size).digest()


class EvaluationOverlap:
    """
    Finds prompts that share `words` words in a row with an evaluation prompt, or all words of a shorter one.

    Args:
        prompts (`list[list[str]]`):
            Words of the evaluation prompts.
        words (`int`, *optional*, defaults to 10):
            Length of what is compared. An evaluation prompt of fewer than 4 words is not looked for.
    """

    def __init__(self, prompts: list[list[str]], words: int = 10):
        self._grams: dict[int, set[int]] = {}
        for prompt in prompts:
            length = min(words, len(prompt))
            if length >= 4:
                self._grams.setdefault(length, set()).update(_grams(prompt, length))

    def __contains__(self, words: list[str]) -> bool:
        return any(not known.isdisjoint(_grams(words, length)) for length, known in self._grams.items())


def _grams(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


class NearDuplicates:
    """
    Remembers prompts by their MinHash, and finds those that are nearly the same.

    Args:
        similarity (`float`, *optional*, defaults to 0.8):
            Jaccard similarity of the word n-grams from which on a prompt is a near-duplicate.
        words (`int`, *optional*, defaults to 5):
            Length of an n-gram.

    Raises:
        `ImportError`: datasketch is not installed.
    """

    def __init__(self, similarity: float = 0.8, words: int = 5):
        try:
            from datasketch import MinHashLSH
        except ImportError:
            raise ImportError(
                "Removing near-duplicates needs the package datasketch: pip install hf-dflash[data]"
            ) from None
        if not 0 < similarity <= 1:
            raise ValueError(f"similarity must be in (0, 1], but is {similarity}.")
        self.similarity, self.words = similarity, words
        self._index = MinHashLSH(threshold=similarity, num_perm=_NUM_PERMUTATIONS)
        self._hashes: list[np.ndarray] = []

    def add_unless_known(self, words: list[str]) -> bool:
        """Remembers a prompt, and returns `True`, unless a similar one is known."""
        from datasketch import MinHash

        grams = [" ".join(gram).encode() for gram in _grams(words, min(self.words, len(words)))]
        minhash = MinHash(num_perm=_NUM_PERMUTATIONS)
        minhash.update_batch(grams or [b""])
        for candidate in self._index.query(minhash):
            if np.mean(self._hashes[candidate] == minhash.hashvalues) >= self.similarity:
                return False
        self._index.insert(len(self._hashes), minhash, check_duplication=False)
        self._hashes.append(minhash.hashvalues.astype(np.uint32))
        return True


def _language_of(text: str) -> str:
    try:
        import py3langid
    except ImportError:
        raise ImportError("Filtering by language needs the package py3langid: pip install hf-dflash[data]") from None
    return py3langid.classify(text[:2000])[0]


# ---- the mixture


def build_mixture(
    mixture: Mixture, *, output_dir: str | None = None, endpoint_url: str | None = None, disable_tqdm: bool = False
) -> dict:
    """
    Builds the prompt set (issue 8).

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
        `ValueError`: a source gives no prompt at all.
    """
    output = Path(output_dir or mixture.output)
    overlap = _read_evaluation_prompts(mixture, endpoint_url)
    files = {
        source.name: list_sources(source.path, endpoint_url=endpoint_url, split=source.split)
        for source in mixture.sources
    }
    output.mkdir(parents=True, exist_ok=True)
    reports: dict[str, Counter] = {source.name: Counter() for source in mixture.sources}
    with tempfile.TemporaryFile(dir=output) as stage:
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
        known = NearDuplicates(**mixture.near_duplicates) if mixture.near_duplicates is not None else None
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
    for where, content in _lines(list_sources(options.pop("path"), endpoint_url=endpoint_url), endpoint_url):
        try:
            prompts.append(_words_of(PromptConversation(parse_line(content)).messages))
        except RowSkipped as skipped:
            raise ValueError(f"{where} is no evaluation prompt: {skipped}") from None
    return EvaluationOverlap(prompts, **options)


def _lines(files: list[Source], endpoint_url: str | None) -> Iterator[tuple[str, bytes | dict]]:
    for parts in cut_into_units(files):
        for part in parts:
            for line, content in read_rows(files[part.source], part, endpoint_url=endpoint_url):
                if not isinstance(content, bytes) or content.strip():
                    yield f"{files[part.source].uri}:{line}", content


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
    for where, content in ProgressBar(
        _lines(files, endpoint_url), desc=source.name, unit=" rows", disable=disable_tqdm
    ):
        report["read"] += 1
        try:
            messages, tools = map_row(parse_line(content), source.mapping)
        except RowSkipped as skipped:
            first_problem = first_problem or f"{where}: {skipped}"
            report[skipped.reason] += 1
            continue
        if reason := filters.reason_against(messages):
            report[reason] += 1
            continue
        words = _words_of(messages)
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
            if not known.add_unless_known(_words_of(json.loads(stage.readline())["messages"])):
                report["near_duplicate"] += 1
                continue
        chosen.append((ranks[index], offsets[index]))
    stage.seek(0, os.SEEK_END)
    report["written"] = len(chosen)
    if wanted is not None:
        report["missing"] = wanted - len(chosen)
    return chosen


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
