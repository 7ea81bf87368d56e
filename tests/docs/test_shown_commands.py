# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What the pages tell a reader to type: the scripts and options are there, and what a command reads is said."""

import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hf_dflash import cli
from hf_dflash.data.mixture_file import load_mixture
from hf_dflash.training.arguments import DFlashTrainingArguments
from hf_dflash.training.run import JobArguments


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("recipes/**/README.md"))]
SCRIPT = re.compile(r"(benchmarks|recipes|docs)/[\w/]+\.py$")
TRAINING = {f"--{field.name}": field for cls in (DFlashTrainingArguments, JobArguments) for field in fields(cls)}


def shown_commands(page):
    """The words of each command of a page: in blocks of code, in indented ones, and within a line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines()
    lines += re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+ [^`\n]+)`", text)
    for line in lines:
        if re.match(r"(python|torchrun|accelerate|hf-dflash) ", line):
            yield shlex.split(line, comments=True)


COMMANDS = [(page, words) for page in PAGES for words in shown_commands(page)]


def names_of_options(words):
    return {word.split("=")[0] for word in words if word.startswith("--")}


def test_scripts_that_are_shown_exist_and_have_their_options():
    shown = [(page, words[at:]) for page, words in COMMANDS for at, word in enumerate(words) if SCRIPT.match(word)]
    assert len(shown) > 20
    for page, (script, *arguments) in shown:
        text = (ROOT / script).read_text(encoding="utf-8")
        known = set(re.findall(r"--[\w-]+", text)) | (set(TRAINING) if "parse_job" in text else set())
        assert names_of_options(arguments) <= known, f"{page.name}: {script}"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_has_the_options_that_pages_show(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    known = {option.replace("_", "-") for option in re.findall(r"--[\w-]+", capsys.readouterr().out)}
    for page, words in COMMANDS:
        if words[:2] == ["hf-dflash", command]:
            assert {option.replace("_", "-") for option in names_of_options(words)} <= known, page.name


def test_the_quality_benchmark_takes_what_is_shown_and_measures_anew(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quality

    shown = [words[2:] for _, words in COMMANDS if words[:2] == ["python", "benchmarks/quality.py"]]
    shown += [
        shlex.split(line.partition("#")[0])[2:]
        for line in quality.__doc__.splitlines()
        if line.startswith("    python benchmarks/quality.py")
    ]
    parser = quality.make_parser("")
    for arguments in map(parser.parse_args, shown):
        trains = not (arguments.report or arguments.example_card or arguments.tiny)
        # A finished result in the folder of the committed ones would be taken as it is.
        assert not trains or (arguments.target and arguments.results != parser.get_default("results"))


@pytest.mark.parametrize("page", ["README.md", "docs/ablations.md"])
def test_a_file_that_a_page_copies_ships(page):
    copied = re.findall(r"cp (\S+) ", (ROOT / page).read_text(encoding="utf-8"))
    assert copied and all((ROOT / file).is_file() for file in copied)


def test_no_measured_figure_has_a_command_with_parts_left_out():
    rows = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Measured\n")[2].splitlines()
    commands = [
        code for row in rows if row.startswith("| ") for code in re.findall(r"`([^`]+)`", row.split(" | ")[-1])
    ]
    assert len(commands) > 10
    assert not [command for command in commands if "..." in command]


@pytest.mark.parametrize("page", ["README.md", "docs/completions.md"])
def test_a_page_that_shows_the_reference_mixture_names_the_folders_that_it_reads(page):
    mixture = load_mixture(ROOT / "recipes/mixtures/qwen36.yaml")
    paths = [*mixture.evaluation_prompts["path"], *(source.path for source in mixture.sources)]
    local = [path for path in paths if "://" not in path]
    assert len(local) == 2
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [path for path in local if path not in text] == []


def test_the_options_beside_train_are_those_of_the_smollm2_recipe_and_no_defaults():
    (comment,) = re.findall(r"^# The SmolLM2 figures.*?(?=^[^#])", (ROOT / "README.md").read_text(), re.M | re.S)
    words = comment.replace("\n#", "").replace(":", " ").split()
    shown = {word: words[at + 1] for at, word in enumerate(words) if word.startswith("--")}
    recipe = yaml.safe_load((ROOT / "recipes/smollm2.yaml").read_text())
    assert {name: yaml.safe_load(value) for name, value in shown.items() if name != "--learning_rate"} == {
        name: recipe[name[2:]] for name in shown if name != "--learning_rate"
    }
    assert float(shown["--learning_rate"]) == recipe["learning_rate"]
    assert not [name for name in shown if recipe[name[2:]] == TRAINING[name].default]
    # What decides the figures and is left out is the default.
    decisive = "token_budget num_hidden_layers warmup_steps loss_type labels weight_decay max_grad_norm".split()
    assert not [name for name in decisive if recipe[name] != TRAINING[f"--{name}"].default]


def test_extras_are_installed_from_the_checkout_and_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for name, wanted in re.findall(
            r"pip install[^`\n]*?'([\w.-]+)\[([\w,]+)\]'", page.read_text(encoding="utf-8")
        ):
            # The package is on no index yet.
            assert name == "." and set(wanted.split(",")) <= extras.keys(), page.name
