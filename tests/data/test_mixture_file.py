# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from mixture_examples import write_mixture


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n{"id": 2}', "is not YAML: (.|\n)*line 2"),
        ("sauces: []", "there is no 'sauces'"),
        ("sources: []", "needs sources"),
        ("sources: [{name: a, path: x}]", "source a of .* has no mapping"),
        ("sources: [{name: a, path: x, mapping: {promt: y}}]", "has 'promt'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, weight: 1}]", "both or neither"),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, rows: 1, filters: {min: 1}}]", "there is no 'min'"),
        ("sources: [{name: a, path: x, mapping: {prompt: y, messages: z}}]", "one of prompt, messages"),
        ("sources: [{name: a, path: x, mapping: {prompt: [y]}}]", r"mapping of a: prompt is \['y'\]"),
        ("sources: [{name: a, path: x, mapping: y}]", "source a of .* mapping is 'y'"),
        ("sources: [{name: a, path: , mapping: {prompt: y}}]", "source a of .* has no path"),
        ("sources: [{name: 2024, path: x, mapping: {prompt: y}}]", "name is 2024, but must be text"),
        (
            "sources: [{name: a, path: x, mapping: {prompt: y}, rows: 1e5}]",
            "rows is '1e5', but must be a whole number",
        ),
        ("sources: [{name: a, path: x, mapping: {prompt: y}, rows: 1.5}]", "rows is 1.5, but must be a whole number"),
        ("rows: 9\nsources: [{name: a, path: x, mapping: {prompt: y}, weight: 0}]", "weight of a must be positive"),
        ("rows: 9\nsources: [{name: a, path: x, mapping: {prompt: y}, weight: .nan}]", "weight of a must be positive"),
        (
            "rows: -9\nsources: [{name: a, path: x, mapping: {prompt: y}, weight: 1}]",
            "of the mixture must be positive",
        ),
        ("sources: [x.jsonl]", "source 1 of .* is 'x.jsonl'"),
        ("sources: {name: a}", "sources is {'name': 'a'}, but must be a list"),
        ("filters: {languages: [no]}", r"languages is \[False\], .*in quotes"),
        ("filters: {languages: en}", "languages is 'en', but must be a list"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        write_mixture(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evaluation_prompts: [x.jsonl]", "evaluation_prompts is"),
        ("evaluation_prompts: {words: 8}", "evaluation_prompts has no path"),
        ("evaluation_prompts: {path: x, words: 3}", "at least 4"),
        ("near_duplicates: true", "near_duplicates is True"),
        ("near_duplicates: {words: 0}", "words of near_duplicates must be positive"),
        ("near_duplicates: {similarity: high}", "similarity is 'high', but must be a number"),
    ],
)
def test_what_would_remove_nothing_or_everything_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        write_mixture(tmp_path, f"{text}\nsources: [{{name: a, path: x, mapping: {{prompt: y}}}}]")


def test_a_key_with_nothing_behind_it_is_one_that_was_left_out(tmp_path):
    sources = "sources: [{name: a, path: x, mapping: {prompt: y}}]"
    empty = "near_duplicates: {words: }\nevaluation_prompts: {path: x, words: }\nfilters: {languages: }\nseed:\n"
    empty += sources.replace("prompt: y", "prompt: y, system: ").replace("path: x", "path: x, split: , filters: ")
    left_out = f"near_duplicates: {{}}\nevaluation_prompts: {{path: x}}\n{sources}"
    assert write_mixture(tmp_path, empty) == write_mixture(tmp_path, left_out)


def test_rows_of_weighted_sources_add_up_to_those_of_the_mixture(tmp_path):
    for weights in ((1, 1, 1), (0.1, 3, 0.7), (2, 1, 1)):
        entries = ", ".join(
            f"{{name: s{i}, path: x, mapping: {{prompt: y}}, weight: {w}}}" for i, w in enumerate(weights)
        )
        for rows in (1, 10, 1001):
            mixture = write_mixture(tmp_path, f"rows: {rows}\nsources: [{entries}]")
            wanted = [mixture.wanted(source) for source in mixture.sources]
            assert sum(wanted) == rows
            shares = [rows * weight / sum(weights) for weight in weights]
            assert all(abs(got - share) < 1 for got, share in zip(wanted, shares, strict=True))
