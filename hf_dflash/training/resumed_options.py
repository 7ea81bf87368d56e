# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Options of optimizer and schedule that are changed where a run goes on hold from there.

The states in a checkpoint bring those of the run that saved it along, and `load_state_dict` puts them in place of the new ones.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.optim.lr_scheduler import LambdaLR


# What a parameter group holds of the options of a run, beside the learning rate. Some optimizers keep states there too.
_OPTIONS = ("weight_decay", "betas", "eps", "momentum")


@contextmanager
def keep_options(optimizer: torch.optim.Optimizer, schedule) -> Iterator[None]:
    """A context in which states are loaded into an optimizer and its schedule, and which leaves them their options.

    A schedule that is a function of the step goes on as if it had had its options from the start. One that reacts to what it
    measures (`reduce_lr_on_plateau`) keeps the learning rate of the checkpoint.

    Args:
        optimizer (`torch.optim.Optimizer`), schedule: as they were made for this run.
    """
    schedule = getattr(schedule, "scheduler", schedule)
    of_torch = getattr(optimizer, "optimizer", optimizer)
    options = [{name: group[name] for name in _OPTIONS if name in group} for group in optimizer.param_groups]
    peaks = list(schedule.base_lrs) if isinstance(schedule, LambdaLR) else None
    with ExitStack() as hooks:
        for part in getattr(of_torch, "parts", [of_torch]):
            hooks.callback(part.register_load_state_dict_pre_hook(_stay_fused).remove)
        yield
    for group, of_this_run in zip(optimizer.param_groups, options, strict=True):
        group.update(of_this_run)
    if peaks is None:
        return
    schedule.base_lrs = peaks
    schedule._last_lr = [
        peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)
    ]
    for group, peak, rate in zip(optimizer.param_groups, peaks, schedule._last_lr, strict=True):
        group["initial_lr"], group["lr"] = peak, rate


def _stay_fused(optimizer: torch.optim.Optimizer, state_dict: dict) -> dict:
    """The state of one that was not fused, for one that is: the trainer tells it of lost steps, which only fused ones can be told."""
    groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    return state_dict | {
        "param_groups": [saved | {"fused": True} if own.get("fused") else saved for saved, own in groups]
    }
