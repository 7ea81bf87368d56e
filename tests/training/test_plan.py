# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_dflash.training.plan import check_launch, main, place_targets, place_targets_of_this_process


def everywhere(world_size, device_count, **options):
    return [place_targets(rank, world_size, device_count, **options) for rank in range(world_size)]


def test_targets_sit_behind_the_drafters_without_sharing_a_device():
    assert everywhere(2, 4) == [["cuda:2"], ["cuda:3"]]
    assert everywhere(1, 2) == [["cuda:1"]]
    assert everywhere(2, 8, targets_per_process=3) == [["cuda:2", "cuda:3", "cuda:4"], ["cuda:5", "cuda:6", "cuda:7"]]


def test_one_device_is_shared_and_so_is_any_if_asked():
    assert everywhere(1, 1) == [["cuda:0"]]
    assert everywhere(2, 2, target_devices="same") == [["cuda:0"], ["cuda:1"]]


def test_without_cuda_everything_is_on_the_cpu():
    assert everywhere(2, 0, targets_per_process=2) == [["cpu", "cpu"]] * 2


def test_a_list_of_devices_is_dealt_in_order():
    assert everywhere(2, 4, target_devices="cuda:3, cuda:2") == [["cuda:3"], ["cuda:2"]]
    with pytest.raises(ValueError, match="names 1 devices, 2 process"):
        everywhere(2, 4, target_devices="cuda:3")


def test_too_few_devices_show_the_wanted_map():
    with pytest.raises(
        ValueError, match="3 CUDA device.*4 are wanted.*rank 1: drafter cuda:1.*cuda:2, cuda:3"
    ) as error:
        everywhere(2, 3)
    assert "--target_devices same" in str(error.value)
    with pytest.raises(ValueError, match="cuda:7"):
        everywhere(1, 2, target_devices="cuda:7")
    with pytest.raises(ValueError, match="at least one target"):
        everywhere(1, 2, targets_per_process=0)


def test_a_process_reads_its_place_from_the_launcher(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert place_targets_of_this_process(None, 1, use_cpu=False) == ["cuda:3"]
    assert place_targets_of_this_process(None, 1, use_cpu=True) == ["cpu"]
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert place_targets_of_this_process(None, 1, use_cpu=False) == ["cuda:1"]


@pytest.mark.compat
def test_plan_shows_map_memory_and_balance_of_machines_that_are_not_here(job_file, capsys):
    assert main(["--config", str(job_file), "--num_processes", "2", "--num_devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "rank 1: drafter cuda:1, target cuda:3" in out
    assert "TFLOP" in out and "at equal speed" in out
    # Targets with devices of their own compute ahead; what they have ready stands with the drafter.
    assert out.count("drafter: features in flight") == 2
    assert (
        main(["--config", str(job_file), "--num_processes", "1", "--num_devices", "1", "--num_anchors", "auto"]) == 0
    )
    assert "features in flight" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="3 CUDA device"):
        main(["--config", str(job_file), "--num_processes", "2", "--num_devices", "3"])


@pytest.mark.compat
def test_several_devices_may_share_a_target():
    devices = "cuda:2+cuda:3,cuda:4+cuda:5"
    assert place_targets(1, 2, 6, target_devices=devices) == ["cuda:4+cuda:5"]
    with pytest.raises(ValueError, match="5 CUDA device"):
        place_targets(1, 2, 5, target_devices=devices)
    with pytest.raises(ValueError, match="gpu3"):
        place_targets(0, 1, 5, target_devices="cuda:2+gpu3")


@pytest.mark.compat
def test_a_launch_that_asked_for_several_processes_and_got_one_is_an_error():
    # What accelerate says about itself is the point, so it is really run; test_accelerate_configs.py launches one process.
    script = Path(__file__).with_name("launched.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", "2", str(script)]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "torchrun" in done.stderr and "went on" not in done.stdout, done.stderr


@pytest.mark.compat
def test_a_world_of_several_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes were asked for and this one is alone"):
        check_launch(1)
    check_launch(4)
