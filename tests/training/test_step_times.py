# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import make_target
from tiny_training import make_trainer

import hf_dflash.training.step_times as step_times
from hf_dflash.target.moment import Moment
from hf_dflash.training.estimate import drafter_flops, peak_flops, sizes_of, target_flops


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("Something else", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_name(name, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda:0")) == (None if teraflops is None else teraflops * 1e12)
    assert peak_flops(CPU) is None


def test_utilization_is_flops_by_wall_time_and_peak_of_all_devices(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, targets_per_process=2, bf16=True, target=make_target("qwen3", torch.bfloat16))
    times = trainer._step_times
    sizes = sizes_of(trainer.target.model, trainer.model)
    times.__dict__["_sizes"] = sizes
    monkeypatch.setattr(step_times, "peak_flops", lambda device: 1e9)
    figures = times._utilizations({"tokens": 100.0, "anchors": 20.0, "labels": 40.0}, 0.5)
    assert figures == {
        "mfu/target": target_flops(sizes, 100, 40) / (0.5 * 1e9 * 2),
        "mfu/drafter": drafter_flops(sizes, 100, 20) / (0.5 * 1e9),
    }
    # Parameters that a token does not meet would count, and so would a peak that is not of this arithmetic.
    sizes.is_dense, times._computes_in_half = False, False
    assert times._utilizations({"tokens": 100.0, "anchors": 20.0, "labels": 40.0}, 0.5) == {}


class Pending(Moment):
    """A point that the device has not reached."""

    is_past = False


def test_what_is_under_way_is_read_at_the_next_log(tmp_path):
    times = make_trainer(tmp_path)._step_times
    for make_moment in (Moment, Pending, Moment):
        step = times._step
        step.drafter.append((Moment(CPU), make_moment(CPU)))
        times.end_step()
    # Steps are read in their order; the third waits for the second.
    assert float(times.collect()["time/steps"]) == 1
    Pending.is_past = True
    sums = times.collect()
    assert float(sums["time/steps"]) == 2 and float(sums["count/steps"]) == 0
