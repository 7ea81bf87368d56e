# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
The YAML file that describes a mixture of prompt sources (see recipes/mixtures/qwen36.yaml).

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

`prompt_mapping.py` lists the keys of a mapping, `mixture.py` says what becomes of the rows.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from .prompt_filters import PromptFilters
from .prompt_mapping import check_mapping
from .prompt_overlap import FEWEST_WORDS


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
            Key of the table in `prompt_mapping.py` -> field of the source.
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
        check_mapping(self.mapping, self.name)
        if self.rows is not None and self.weight is not None:
            raise ValueError(f"{self.name} has rows and weight: give one of them.")
        is_weight = self.weight is None or 0 < self.weight < math.inf
        if (self.rows is not None and self.rows < 1) or not is_weight:
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
            `path` of prompts that must not be trained on; a prompt that shares `words` words in a row (10 by default, at least
            4) with one is removed.
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
        if self.rows is not None and self.rows < 1:
            raise ValueError("rows of the mixture must be positive.")
        if self.near_duplicates is not None:
            _check_entry(self.near_duplicates, {"similarity": float, "words": int}, "near_duplicates", ())
            if self.near_duplicates.get("words", 1) < 1:
                raise ValueError("words of near_duplicates must be positive.")
        if self.evaluation_prompts is not None:
            known = {"path": str | list[str], "words": int}
            _check_entry(self.evaluation_prompts, known, "evaluation_prompts", ("path",))
            if self.evaluation_prompts.get("words", FEWEST_WORDS) < FEWEST_WORDS:
                raise ValueError(
                    f"words of evaluation_prompts must be at least {FEWEST_WORDS}: fewer in a row are shared by prompts that have "
                    "nothing in common."
                )

    def wanted(self, source: MixtureSource) -> int | None:
        """Rows to take of a source; `None` is all. Those of the sources with a weight add up to `rows`."""
        if source.weight is None:
            return source.rows
        weighted = [other for other in self.sources if other.weight is not None]
        weights = [other.weight for other in weighted]
        place = next(index for index, other in enumerate(weighted) if other is source)
        before, after = (round(self.rows * sum(weights[:end]) / sum(weights)) for end in (place, place + 1))
        return after - before


def load_mixture(path: str | os.PathLike) -> Mixture:
    """
    Reads a mixture from its YAML file.

    Raises:
        `ValueError`: no YAML, an unknown key, or a value that makes no sense; the message names it.
    """
    try:
        content = _without_empty_keys(yaml.safe_load(Path(path).read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not describe a mixture: see recipes/mixtures/qwen36.yaml for one.")
    _check_entry(content, get_type_hints(Mixture) | {"sources": list, "filters": dict}, str(path), ("output",))
    sources = []
    for number, entry in enumerate(content.get("sources") or [], 1):
        where = f"source {entry.get('name', number) if isinstance(entry, dict) else number} of {path}"
        known = get_type_hints(MixtureSource) | {"filters": dict}
        _check_entry(entry, known, where, ("mapping", "name", "path"))
        entry["filters"] = _read_filters(entry.get("filters"), where)
        sources.append(MixtureSource(**entry))
    content["sources"] = sources
    content["filters"] = _read_filters(content.get("filters"), str(path)) or PromptFilters()
    return Mixture(**content)


def _without_empty_keys(content: Any) -> Any:
    """`key:` with nothing behind it is a key that was left out."""
    if isinstance(content, dict):
        return {key: _without_empty_keys(value) for key, value in content.items() if value is not None}
    return [_without_empty_keys(item) for item in content] if isinstance(content, list) else content


def _read_filters(entry: dict | None, where: str) -> PromptFilters | None:
    if entry is None:
        return None
    _check_entry(entry, get_type_hints(PromptFilters), f"filters of {where}", ())
    return PromptFilters(**entry)


def _check_entry(entry: Any, known: dict[str, Any], where: str, needed: tuple[str, ...]) -> None:
    """Refuses what YAML makes of a slip: another type, a key that is unknown, one that is missing or empty."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {entry!r}: its keys belong there, of {', '.join(sorted(known))}.")
    if unknown := entry.keys() - known.keys():
        raise ValueError(f"{where}: there is no {min(map(str, unknown))!r}; the keys are {', '.join(sorted(known))}.")
    for name, value in entry.items():
        if not _is_of(value, known[name]):
            raise ValueError(f"{where}: {name} is {value!r}, but must be {_name_of(known[name])}.")
    for name in needed:
        if entry.get(name) in (None, "", []):
            raise ValueError(f"{where} has no {name}.")


# What YAML's types are called in Python, and by whoever writes YAML.
_TYPES = {
    str: "text (in quotes if YAML takes it for something else, as it does with no, on and 2024)",
    int: "a whole number in plain digits",
    float: "a number",
    bool: "true or false",
    dict: "keys with values",
    list: "a list",
}


def _is_of(value: Any, wanted: Any) -> bool:
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(_is_of(item, *get_args(wanted)) for item in value)
    if get_origin(wanted) is None:
        return type(value) is wanted or (wanted is float and type(value) is int)
    if get_origin(wanted) is dict:
        return isinstance(value, dict)
    return any(_is_of(value, option) for option in get_args(wanted))


def _name_of(wanted: Any) -> str:
    if get_origin(wanted) is list:
        return f"a list, each of it {_name_of(*get_args(wanted))}"
    if get_origin(wanted) in (None, dict):
        return _TYPES[get_origin(wanted) or wanted]
    return " or ".join(_name_of(option) for option in get_args(wanted) if option is not type(None))
