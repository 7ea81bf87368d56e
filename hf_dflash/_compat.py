# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Differences between the supported releases of transformers (5.17 to 5.x). Nothing else in the package looks at a version.

Each entry names the oldest supported release at which it can be deleted.
"""

import functools
from typing import TYPE_CHECKING

import torch
import transformers
from packaging.version import Version


if TYPE_CHECKING:
    from transformers import Trainer


TRANSFORMERS_VERSION = Version(transformers.__version__)


# Delete when the oldest supported release is 5.19: set the class attribute `loss_is_scaled_for_ga = True` instead.
def mark_loss_as_scaled(trainer: "Trainer") -> None:
    """
    Tells a `Trainer` that its `compute_loss` already divides by what the whole optimizer step supervises, so that the
    loss of a micro-batch is not divided by the number of gradient accumulation steps once more.

    Args:
        trainer (`transformers.Trainer`):
            A trainer whose class overrides `compute_loss`. To be called once `Trainer.__init__` has run.
    """
    trainer.loss_is_scaled_for_ga = True
    if TRANSFORMERS_VERSION < Version("5.19"):
        # These releases ask only whether there is a loss function. `Trainer.compute_loss` alone would call it.
        trainer.compute_loss_func = _loss_of_an_overridden_compute_loss


def _loss_of_an_overridden_compute_loss(*args, **kwargs):
    raise RuntimeError("`mark_loss_as_scaled` is for trainers that override `compute_loss`.")


# Delete when the oldest supported release is 5.24.
@functools.cache
def restore_onto_numbered_cpus() -> None:
    """
    Lets several processes on a CPU resume: releases before 5.24 load the optimizer onto their device, "cpu:0", a place that
    `torch.load` does not know.
    """
    if TRANSFORMERS_VERSION < Version("5.24"):
        torch.serialization.register_package(0, lambda storage: None, _restore_onto_cpu)


def _restore_onto_cpu(storage, location: str):
    return storage if location.startswith("cpu:") else None
