# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import inspect
import json
import os
import sys

import pytest
from oracle_drafter import make_drafter
from tiny_models import make_target

from hf_dflash.cli import main as hf_dflash
from hf_dflash.evaluation.benchmark import measure_acceptance
from hf_dflash.hub import drafter_files


def test_evaluate_command_writes_table_json_and_plot(tokenizer, tmp_path, capsys, monkeypatch):
    target = make_target("qwen3_5")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target, block_size=4).save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w9 w10"}\n\n{"prompt": "w33"}\n{"prompt": "w34"}\n')
    arguments = ["evaluate", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    arguments += [
        "--prompts",
        str(prompts),
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
        "--output",
        str(tmp_path / "out"),
    ]
    arguments += ["--no-enable-thinking", "--device", "cpu"]
    assert hf_dflash(arguments) == 0
    result = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert result["summary"]["num_prompts"] == 2
    assert result["settings"]["enable_thinking"] is False
    assert (result["summary"]["num_identical"], result["summary"]["num_compared"]) == (2, 2)
    assert (tmp_path / "out" / "acceptance.md").read_text().strip() in capsys.readouterr().out
    picture = tmp_path / "out" / "acceptance.png"
    assert picture.read_bytes().startswith(b"\x89PNG")

    # Without matplotlib the figures are written all the same.
    picture.unlink()
    (tmp_path / "out" / "acceptance.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert hf_dflash(arguments) == 0
    assert "need matplotlib" in capsys.readouterr().err
    assert (tmp_path / "out" / "acceptance.json").exists() and not picture.exists()


def test_a_target_in_the_drafters_place_is_refused_by_name(tokenizer, tmp_path, capsys):
    make_target("qwen3_5").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w9 w10"}\n')
    target = str(tmp_path / "target")
    assert hf_dflash(["evaluate", "--target", target, "--drafter", target, "--prompts", str(prompts)]) == 2
    assert f"{target} is a Qwen3_5ForCausalLM, a target and no drafter" in capsys.readouterr().err


def test_the_hub_is_asked_once_for_a_drafter(tokenizer, tmp_path, monkeypatch):
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target, block_size=4).save_pretrained(tmp_path / "drafter")
    asked = []
    monkeypatch.setattr(
        drafter_files, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path / "drafter")
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w9"}\n')
    options = ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl"), "--device", "cpu"]
    assert hf_dflash(["evaluate", "--drafter", "org/drafter", *options, "--max-new-tokens", "2"]) == 0
    assert asked == ["org/drafter"]


def test_a_prompt_file_given_twice_does_not_count_twice(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    again = str(tmp_path / "p.jsonl")
    assert hf_dflash(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p.jsonl", again]) == 2
    assert f"--prompts {again} is given twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature 0.5", "--temperature changes nothing when decoding is greedy: add --do-sample"),
        ("--temperature 0 --top-k 0", "--top_k changes nothing when decoding is greedy: add --do-sample"),
        ("--sample-drafts", "--sample_drafts changes nothing when decoding is greedy: add --do-sample"),
        ("--do-sample --temperature 0", "leave out --do-sample"),
        ("--do-sample --top-p 2", "top_p must be in (0, 1], but is 2.0"),
        ("--do-sample --top-p 0", "top_p must be in (0, 1], but is 0.0"),
        ("--output {file}", "is a file: give a folder"),
        ("", "--prompts gsm9k is neither a file here nor one of the sets gsm8k"),
    ],
)
def test_options_that_would_do_nothing_or_fail_late_are_refused_before_anything_loads(
    tmp_path, capsys, options, message
):
    (tmp_path / "file").touch()
    options = options.format(file=tmp_path / "file").split()
    assert hf_dflash(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "gsm9k", *options]) == 2
    assert message in capsys.readouterr().err


def test_temperature_0_is_greedy_and_prompts_may_come_from_a_pipe(tokenizer, tmp_path):
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target, block_size=4).save_pretrained(tmp_path / "drafter")
    read, write = os.pipe()
    os.write(write, b'{"prompt": "w9"}\n')
    os.close(write)
    options = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--max-new-tokens", "4"]
    options += ["--prompts", f"/dev/fd/{read}", "--temperature", "0", "--device", "cpu", "--output", str(tmp_path)]
    assert hf_dflash(["evaluate", *options]) == 0
    os.close(read)
    settings = json.loads((tmp_path / "acceptance.json").read_text())["settings"]
    assert settings["do_sample"] is False and "temperature" not in settings


@pytest.mark.parametrize("option", ["--limit", "--max-new-tokens", "--tree-budget"])
def test_none_of_what_is_counted_is_refused_by_the_name_of_the_option(capsys, option):
    with pytest.raises(SystemExit):
        hf_dflash(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p.jsonl", option, "0"])
    assert f"argument {option}: must be at least 1, but is 0" in capsys.readouterr().err


def test_the_command_and_the_function_write_as_many_tokens(capsys):
    default = inspect.signature(measure_acceptance).parameters["max_new_tokens"].default
    with pytest.raises(SystemExit):
        hf_dflash(["evaluate", "--help"])
    assert f"of each turn (default: {default})" in capsys.readouterr().out
