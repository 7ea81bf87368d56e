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

import os
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .prompt_filters import PromptFilters
from .prompt_mapping import check_mapping


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
