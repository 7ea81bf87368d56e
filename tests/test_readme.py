# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dflash
from hf_dflash import cli


ROOT = Path(hf_dflash.__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def command_lines():
    """The shell commands of the README, without comments."""
    lines = "".join(code_blocks("bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


HF_DFLASH_LINES = [words for words in command_lines() if words[0] == "hf-dflash"]


def test_the_example_runs(tmp_path):
    (example,) = code_blocks("python")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "example.py").write_text(example)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "outputs/drafter/model.safetensors").exists()


def test_every_command_is_shown_once():
    assert sorted(words[1] for words in HF_DFLASH_LINES) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("words", HF_DFLASH_LINES, ids=lambda words: words[1])
def test_the_options_of_a_shown_command_exist_and_none_is_missing(words, monkeypatch):
    class Parsed(Exception):
        pass

    parse = argparse.ArgumentParser.parse_known_args

    def stop_after_parsing(self, *args, **kwargs):
        _, unknown = parse(self, *args, **kwargs)
        raise Parsed(unknown)

    # The command stops once its arguments are read: argparse has ended it already if they are wrong.
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop_after_parsing)
    with pytest.raises(Parsed) as stop:
        cli.main(words[1:])
    assert stop.value.args == ([],)


@pytest.mark.parametrize("words", [words for words in command_lines() if words[0] == "make"], ids=" ".join)
def test_the_make_targets_that_are_shown_exist(words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words[1:]) <= set(targets)


def test_the_file_tree_names_what_exists_and_every_folder_with_code():
    (tree,) = code_blocks("text")
    entries = [(line[: len(line) - len(line.lstrip())], line.split()[0]) for line in tree.splitlines()]
    paths, parent = set(), ""
    for indent, name in entries:
        if not indent:
            parent = name
        paths.add(name if not indent else parent + name)
    for path in paths:
        assert (ROOT / path).exists(), path
    folders = {file.parent for file in (ROOT / "hf_dflash").glob("*/*.py") if file.name != "__init__.py"}
    assert {f"hf_dflash/{folder.name}/" for folder in folders} <= paths


def test_no_placeholder_is_left():
    assert "<!--" not in README
