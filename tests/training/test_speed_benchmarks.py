# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The benchmarks of whole optimizer steps, tiny, on a CPU: they run, and what they claim to be equal is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    def load(name):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_pipeline_benchmark_measures_both_sides_and_the_whole(load, tmp_path):
    output = tmp_path / "pipeline.json"
    assert load("pipeline").main(["--tiny", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    stages = results["stages"]
    assert stages["at the same time and in turn"] == {"losses and weights bit-equal": True}
    balance = stages["balance"]
    assert 0 < balance["seconds to the end of the first step"] < balance["seconds in all"]
    for name in ("at the same time", "target alone", "drafter alone", "in turn"):
        assert stages[name]["ms per step"] > 0
    assert stages["at the same time"]["num_anchors"] == stages["in turn"]["num_anchors"]
    # The drafter alone had no target to wait for.
    assert stages["drafter alone"]["time/target"] == 0 < stages["in turn"]["time/target"]
    assert len(stages["memory"]["drafter GiB"]) == 10
    assert results["versions"]["torch"] and len(results["ratios"]) == 3


def test_the_data_parallel_benchmark_adds_its_layout_to_the_file(load, tmp_path):
    output = tmp_path / "layouts.json"
    tiny = ["--shapes", "tiny", "--use_cpu", "--steps", "1", "--gradient_accumulation_steps", "2"]
    module = load("data_parallel")
    module.main([*tiny, "--resume", "--output", str(output)])
    module.main([*tiny, "--targets_per_process", "3", "--pipeline", "on", "--output", str(output)])
    layouts = list(json.loads(output.read_text())["layouts"].values())
    assert [one["targets_per_process"] for one in layouts] == [1, 3]
    assert layouts[0]["resume"]["weights and losses bit-equal"]
    assert layouts[0]["training"]["drafter waits"] == 0 < layouts[1]["training"]["drafter waits"]


@pytest.mark.slow
@pytest.mark.distributed
def test_three_processes_take_the_same_steps_and_go_on_bit_equal(tmp_path):
    output = tmp_path / "layouts.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    tiny = ["--shapes", "tiny", "--use_cpu", "--steps", "1", "--resume", "--output", str(output)]
    done = subprocess.run(
        [*command, str(BENCHMARKS / "data_parallel.py"), *tiny],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (layout,) = json.loads(output.read_text())["layouts"].values()
    assert layout["gradients of all ranks bit-equal"]
    # Three ranks add in an order, which DDP changes behind the first step of a run.
    assert layout["resume"]["weights and losses bit-equal"]
