# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The benchmarks of speed in their tiny form: they run, and save what they measured."""

import json
import runpy
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(script: str, *arguments: str) -> dict:
        monkeypatch.syspath_prepend(str(FOLDER))
        output = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [script, "--tiny", "--output", str(output), *arguments])
        with pytest.raises(SystemExit) as error:
            runpy.run_path(str(FOLDER / script), run_name="__main__")
        assert not error.value.code
        result = json.loads(output.read_text())
        assert result["device"] == "cpu" and "torch" in result["versions"]
        failed = {stage: values for stage, values in result["stages"].items() if "not measured" in values}
        assert not failed
        return result

    return run


def test_train_step(run):
    stages = run("train_step.py", "--stages", "loss", "ours")["stages"]
    assert stages["hf_dflash, fp32"]["step_ms"] > 0 and stages["labels"]["positions"] > 0


def test_target_forward(run):
    stages = run("target_forward.py")["stages"]
    assert {"stock", "labels, stock", "half of the layers", "ours, FP8"} <= set(stages)


def test_memory(run):
    stages = run("memory.py")["stages"]
    assert stages["varied steps"]["compiled anew"] == 0 and stages["fp32, GiB"]["parameters"] >= 0


def test_a_stage_that_fails_or_takes_too_long_leaves_the_others_and_says_why(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import time

    import torch
    from measuring import Report

    report = Report(tmp_path / "report.json", torch.device("cpu"))
    report.run("slow", lambda: time.sleep(5), seconds=1)
    report.run("wrong", lambda: {}["no key"])
    report.run("right", lambda: {"ms": 1.23456})
    stages = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert "longer than 1 s" in stages["slow"]["not measured"] and "KeyError" in stages["wrong"]["not measured"]
    assert stages["right"] == {"ms": 1.235}
