# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch

from hf_dflash.training.plan import place_targets, place_targets_of_this_process


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
