# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: steps between two logs wait for no device; targets that compute ahead on streams and devices of their own.

python3 -m pytest -m gpu tests/gpu/test_pipeline_on_cuda.py      # one GPU; two for the rest
"""

import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from tiny_training import assert_same, make_dataset, make_trainer, training_state
from transformers import TrainerCallback

from hf_dflash import FrozenTarget
from hf_dflash.target.pipeline import TargetForwardError
from hf_dflash.training.checkpoint import find_last_checkpoint


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# Where targets are, and whether they compute ahead.
WAYS = [
    pytest.param(["cuda:0"], "off", id="in turn on one device"),
    pytest.param(["cuda:0"], "on", id="ahead on one device"),
    pytest.param(["cuda:1"], "off", id="in turn on two devices", marks=two_devices),
    pytest.param(["cuda:1"], "on", id="ahead on two devices", marks=two_devices),
    pytest.param(["cuda:1", "cuda:1"], "on", id="two targets", marks=two_devices),
]


def trainer_of(folder, places, mode, kind="qwen3", **options):
    targets = [FrozenTarget(make_target(kind), [1, 3], device=place) for place in places]
    return make_trainer(
        folder,
        target=targets,
        # Flex attention takes no narrower heads.
        drafter=make_drafter(targets[0].model, head_dim=16),
        **{
            "use_cpu": False,
            "bf16": True,
            "pipeline": mode,
            "compile_layers": "off",
            "attention_backend": "dense",
            **options,
        },
    )


class NoWaits(TrainerCallback):
    """Makes each operation that waits for a device an error, from one step's begin to another's."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.first:
            torch.cuda.set_sync_debug_mode("error")
        if state.global_step == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.parametrize("places, mode", WAYS)
def test_no_step_between_two_logs_waits_for_a_device(places, mode, attention, tmp_path):
    trainer = trainer_of(
        tmp_path,
        places,
        mode,
        attention_backend=attention,
        gradient_accumulation_steps=2,
        logging_steps=12,
        max_steps=13,
        num_train_epochs=9,
        # All rows in a micro-batch or two, so that the window holds an epoch's end too.
        token_budget=256,
        callbacks=[NoWaits(3, 11)],
    )
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 13


def reference(folder, **options):
    trainer = trainer_of(folder, ["cuda:0"], "off", **options)
    trainer.train()
    return training_state(trainer)


OPTIONS = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "num_train_epochs": 2}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("places, mode", WAYS[1:])
@pytest.mark.parametrize("by_host", [False, True])
def test_all_ways_are_bit_equal(places, mode, by_host, kind, tmp_path):
    if by_host and (mode == "off" or places == ["cuda:0"]):
        pytest.skip("nothing passes through the host here")
    options = {**OPTIONS, "eval_dataset": make_dataset(4, seed=2), "kind": kind}
    trainer = trainer_of(tmp_path / "other", places, mode, **options)
    for route in trainer.pipeline._routes:
        # As between devices that cannot reach one another.
        route.is_direct = route.is_direct and not by_host
    trainer.train()
    assert_same(training_state(trainer), reference(tmp_path / "reference", **options))
    entry = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert entry["time/target"] > 0 and entry["time/drafter"] > 0 and entry["memory/drafter"] > 0


@pytest.mark.parametrize("places, mode", WAYS)
def test_memory_is_flat(places, mode, tmp_path):
    peaks = []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "memory/drafter" in logs:
                peaks.append((logs["memory/drafter"], logs["memory/target"]))

    # One micro-batch over and over.
    options = {"dataset": make_dataset(8), "token_budget": 4096, "num_train_epochs": 60, "logging_steps": 10}
    trainer_of(tmp_path, places, mode, callbacks=[Watch()], **options).train()
    assert len(peaks) == 6 and len(set(peaks[2:])) == 1


class FailingTarget(FrozenTarget):
    count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.count == 5:
            torch.empty(1 << 50, device=self.device)
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("place, mode", [("cuda:0", "on"), pytest.param("cuda:1", "on", marks=two_devices)])
def test_a_target_that_runs_out_of_memory_leaves_a_checkpoint_and_the_run_goes_on_from_there(place, mode, tmp_path):
    trainer = trainer_of(tmp_path, [place], mode, **{**OPTIONS, "eval_strategy": "no"})
    trainer.targets[0].__class__ = FailingTarget
    with pytest.raises(TargetForwardError, match="OutOfMemoryError"):
        trainer.train()
    assert find_last_checkpoint(tmp_path).endswith("checkpoint-2")
    resumed = trainer_of(tmp_path, [place], mode, **{**OPTIONS, "eval_strategy": "no"})
    resumed.train(resume_from_checkpoint=True)
    expected = reference(tmp_path / "reference", **{**OPTIONS, "eval_strategy": "no"})
    assert_same(training_state(resumed), expected)
