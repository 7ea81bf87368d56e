# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hf_dflash.training.plan import place_targets


ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "accelerate_configs").glob("*.yaml"))

# Devices of a machine that each file is for.
DEVICES = {
    "one_process": 2,
    "two_pairs": 4,
    "same_device": 2,
    "eight_gpus": 8,
    "two_machines": 4,
    "fsdp2": 8,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_it_the_devices_suffice_and_it_says_what_was_run(path):
    config = load_config_from_file(str(path))
    options = yaml.safe_load(path.read_text())
    assert config.num_processes == options["num_processes"]
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"--config_file recipes/accelerate_configs/{path.name}" in line for line in header)
    assert any("run" in line.lower() for line in header)
    local = options["num_processes"] // options["num_machines"]
    devices = "same" if path.stem == "same_device" else None
    placed = [place_targets(rank, local, DEVICES[path.stem], target_devices=devices) for rank in range(local)]
    assert len(placed) == local


@pytest.mark.compat
def test_one_process_is_run_as_its_header_says():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--cpu"),
            *("--config_file", str(ROOT / "recipes" / "accelerate_configs" / "one_process.yaml")),
            str(ROOT / "tests" / "training" / "launched.py"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr
