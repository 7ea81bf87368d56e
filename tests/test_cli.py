# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hf_dflash
from hf_dflash import cli


@pytest.fixture
def command(monkeypatch):
    """`command(function)` makes `function` what `hf-dflash tokenize` (or another command) calls."""

    def install(function, name="tokenize"):
        module = types.ModuleType("a_command")
        module.main = function
        monkeypatch.setitem(sys.modules, "a_command", module)
        monkeypatch.setitem(cli.COMMANDS, name, ("a_command", "a phrase"))

    monkeypatch.delenv("HF_DFLASH_DEBUG", raising=False)
    return install


def raises(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_module_and_explains_itself(name, capsys):
    module, _ = cli.COMMANDS[name]
    assert callable(importlib.import_module(module).main)
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hf-dflash {name} ")


def test_help_lists_each_command_with_its_phrase(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (_, phrase) in cli.COMMANDS.items():
        assert any(line.split(maxsplit=1) == [name, phrase] for line in lines)


def test_no_command_at_all_is_an_error_that_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def modules_of(*arguments, script=None):
    """What a fresh `hf-dflash ...` prints, and the modules that it imports; as the installed script, or with `python -m`."""
    how = ["-m", "hf_dflash.cli"] if script is None else [str(script)]
    command = [sys.executable, "-X", "importtime", *how, *arguments]
    root = Path(cli.__file__).parents[1]
    result = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "hf-dflash"
    path.write_text("import sys\nfrom hf_dflash.cli import main\nsys.exit(main())\n")
    return path


@pytest.mark.parametrize("is_script", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), *((name, "--help") for name in ("mix", "generate", "tokenize", "check", "monitor"))],
)
def test_what_needs_no_torch_starts_without(arguments, is_script, script):
    out, modules = modules_of(*arguments, script=script if is_script else None)
    assert "hf_dflash" in modules
    assert not {"torch", "transformers", "datasets"} & modules
    if arguments == ("--version",):
        assert out == f"hf-dflash {hf_dflash.__version__}\n"


def test_commands_that_read_drafters_find_them_registered(script):
    code = (
        "import sys, types\n"
        "from hf_dflash import cli\n"
        "sys.modules['a_command'] = module = types.ModuleType('a_command')\n"
        "def main(argv):\n"
        "    from transformers import AutoConfig, AutoModel\n"
        "    print(AutoModel._model_mapping[type(AutoConfig.for_model('dflash'))].__name__)\n"
        "module.main = main\n"
        "cli.COMMANDS['evaluate'] = ('a_command', '')\n"
        "sys.exit(cli.main(['evaluate']))\n"
    )
    script.write_text(code)
    assert modules_of(script=script)[0] == "DFlashForSpeculation\n"


@pytest.mark.parametrize("typed, meant", [("tokenise", "tokenize"), ("evalute", "evaluate"), ("trian", "train")])
def test_an_unknown_command_suggests_the_one_that_was_meant(typed, meant, capsys):
    assert cli.main([typed]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hf-dflash: error: there is no command {typed!r}. Did you mean {meant}")


def test_an_unknown_command_that_resembles_nothing_lists_all(capsys):
    assert cli.main(["xyzxyz"]) == 2
    assert ", ".join(cli.COMMANDS) in capsys.readouterr().err


@pytest.mark.parametrize("status, returned", [(0, None), (0, 0), (3, 3)])
def test_the_command_gets_its_arguments_and_gives_the_exit_status(command, status, returned):
    seen = []
    command(lambda argv: seen.append(argv) or returned)
    assert cli.main(["tokenize", "in.jsonl", "--max_length", "8"]) == status
    assert seen == [["in.jsonl", "--max_length", "8"]]


def test_without_argv_the_process_arguments_are_used(command, monkeypatch):
    seen = []
    command(lambda argv: seen.append(argv))
    monkeypatch.setattr(sys, "argv", ["hf-dflash", "tokenize", "a"])
    assert cli.main() == 0
    assert seen == [["a"]]


@pytest.mark.parametrize(
    "error",
    [ValueError("row 3 is empty"), FileNotFoundError(2, "No such file", "a.jsonl"), ImportError("pip install")],
)
def test_a_users_mistake_is_one_line_without_a_traceback(command, error, capsys):
    command(raises(error))
    assert cli.main(["tokenize"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hf-dflash tokenize: error: {error}\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("option", [["--target", "recipes/pokket"], ["--target=recipes/pokket"]])
def test_a_mistyped_folder_is_named_when_the_hub_cannot_be_reached(option, command, capsys):
    command(raises(OSError("We couldn't connect to 'https://huggingface.co'")))
    assert cli.main(["tokenize", "a.jsonl", *option, "--output", "nowhere"]) == 2
    assert "--target recipes/pokket: there is no such folder here" in capsys.readouterr().err


def test_a_folder_that_is_there_is_not_blamed(command, capsys, tmp_path):
    command(raises(OSError("disk full")))
    assert cli.main(["tokenize", "a.jsonl", "--target", str(tmp_path)]) == 2
    assert "no such folder" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "is_drafter"),
    [
        ('{"model_type": "dflash"}', True),
        ('{"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}', True),
        ('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}', False),
        ("[", False),
        ("[]", False),
    ],
)
def test_a_drafter_in_the_targets_place_is_refused_before_anything_loads(
    config, is_drafter, command, capsys, tmp_path
):
    command(lambda arguments: 0, "check")
    (tmp_path / "config.json").write_text(config)
    for option in ("--target", "--target-model", "--target_model"):
        assert cli.main(["check", "dataset", option, str(tmp_path)]) == 2 * is_drafter
        assert (f"{option} {tmp_path} is a DFlash drafter: give the model" in capsys.readouterr().err) == is_drafter


@pytest.mark.parametrize(
    ("adapter", "is_drafter"),
    [
        ({"auto_mapping": {"base_model_class": "DFlashForSpeculation"}}, True),
        ({"auto_mapping": None, "base_model_name_or_path": "dflash"}, True),
        ({"auto_mapping": None, "base_model_name_or_path": "qwen3"}, False),
        ({"auto_mapping": {"base_model_class": "Qwen3ForCausalLM"}, "base_model_name_or_path": "gone"}, False),
    ],
)
def test_an_adapter_in_the_targets_place_is_refused_if_it_is_one_on_a_drafter(
    adapter, is_drafter, command, tmp_path, monkeypatch
):
    command(lambda arguments: 0)
    monkeypatch.chdir(tmp_path)
    for name in ("dflash", "qwen3", "adapter"):
        (tmp_path / name).mkdir()
    for name in ("dflash", "qwen3"):
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    assert cli.main(["tokenize", "a.jsonl", "--target", "adapter"]) == 2 * is_drafter


@pytest.mark.parametrize("argv", [["--debug", "tokenize"], ["tokenize", "--debug"]])
def test_debug_shows_the_traceback(command, argv):
    command(raises(ValueError("row 3 is empty")))
    with pytest.raises(ValueError, match="row 3 is empty"):
        cli.main(argv)


@pytest.mark.parametrize(
    "argv, left",
    [
        (["train", "--debug", "underflow_overflow"], ["--debug", "underflow_overflow"]),
        (["--debug", "plan", "--debug", "underflow_overflow"], ["--debug", "underflow_overflow"]),
        (["train", "--debug", "--seed", "1"], ["--seed", "1"]),
        (["train", "--seed", "1", "--debug"], ["--seed", "1"]),
        (["--debug", "train", "--seed", "1"], ["--seed", "1"]),
        (["tokenize", "--debug", "a.jsonl"], ["a.jsonl"]),
    ],
    ids=" ".join,
)
def test_debug_with_a_value_is_the_trainers_own_option(command, argv, left):
    seen = []
    command(seen.append, next(word for word in argv if word != "--debug"))
    assert cli.main(argv) == 0
    assert seen == [left]


def test_the_environment_can_ask_for_tracebacks(command, monkeypatch):
    command(raises(ValueError("row 3 is empty")))
    monkeypatch.setenv("HF_DFLASH_DEBUG", "1")
    with pytest.raises(ValueError, match="row 3 is empty"):
        cli.main(["tokenize"])


def test_our_own_bugs_are_never_hidden(command):
    command(raises(KeyError("x")))
    with pytest.raises(KeyError):
        cli.main(["tokenize"])


def test_an_interrupted_command_ends_quietly_with_the_shells_status(command, capsys):
    command(raises(KeyboardInterrupt()))
    assert cli.main(["tokenize"]) == 130
    assert "Traceback" not in capsys.readouterr().err
