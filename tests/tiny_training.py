# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Whole training runs that take a second: random documents, a random target, a random drafter."""

import logging
import math
import random
from contextlib import contextmanager

import torch
from datasets import Dataset
from tiny_drafters import make_drafter, make_rows
from tiny_models import make_target
from transformers import TrainerCallback

from hf_dflash import DFlashTrainer, DFlashTrainingArguments, FrozenTarget


# What a log line says about the machine, or about one call of `train`, not about the run.
OF_THE_CALL = {"total_flos"}


def make_dataset(num_rows: int = 23, longest: int = 40, seed: int = 1) -> Dataset:
    """Random documents: a prompt, a reply, now and then a second turn; some have nothing that a block could learn."""
    draw = random.Random(seed)
    masks = []
    for i in range(num_rows):
        mask = "0" * draw.randint(1, 5) + "1" * draw.randint(3, longest // 2)
        if i % 4 == 0:
            mask += "0" * draw.randint(1, 5) + "1" * draw.randint(1, longest // 3)
        if i % 7 == 3:
            mask = "0" * len(mask)
        masks.append(mask)
    return Dataset.from_list(make_rows(masks, seed=seed, first_row_id=100))


def make_trainer(
    output_dir,
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "qwen3",
    dataset: Dataset | None = None,
    target=None,
    drafter=None,
    drafter_options: dict | None = None,
    callbacks=None,
    eval_dataset=None,
    peft_config=None,
    **options,
) -> DFlashTrainer:
    """A trainer on the CPU; `options` are those of [`DFlashTrainingArguments`]."""
    options = {
        "num_train_epochs": 2,
        "token_budget": 64,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        **options,
    }
    target = make_target(kind, dtype) if target is None else target
    drafter = make_drafter(target, dtype, **(drafter_options or {})) if drafter is None else drafter
    more = {"peft_config": peft_config} if peft_config is not None else {}
    return DFlashTrainer(
        drafter,
        target,
        DFlashTrainingArguments(str(output_dir), **options),
        train_dataset=make_dataset() if dataset is None else dataset,
        eval_dataset=eval_dataset,
        callbacks=callbacks,
        **more,
    )


def comparable(log_history: list[dict]) -> list[dict]:
    """The log without what differs from one machine, or one call of `train`, to the next."""

    def is_of_the_machine(name):
        return name.endswith(("runtime", "_per_second")) or name.startswith(("time/", "memory/", "mfu/"))

    return [
        {k: v for k, v in entry.items() if k not in OF_THE_CALL and not is_of_the_machine(k)} for entry in log_history
    ]


def training_state(trainer: DFlashTrainer) -> dict:
    """Everything that a resumed run must share with one that never stopped."""
    optimizer = trainer.optimizer.state_dict()
    return {
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "optimizer": optimizer,
        "schedule": trainer.lr_scheduler.state_dict(),
        "log": comparable(trainer.state.log_history),
        "step": trainer.state.global_step,
    }


def assert_same(state, other, path: str = "") -> None:
    """Equal to the last bit, through nested dicts and lists."""
    assert type(state) is type(other), (path, type(state), type(other))
    if isinstance(state, dict):
        assert state.keys() == other.keys(), (path, state.keys() ^ other.keys())
        for key in state:
            assert_same(state[key], other[key], f"{path}/{key}")
    elif isinstance(state, list | tuple):
        assert len(state) == len(other), (path, len(state), len(other))
        for i, (one, two) in enumerate(zip(state, other, strict=True)):
            assert_same(one, two, f"{path}/{i}")
    elif isinstance(state, torch.Tensor):
        assert torch.equal(state, other), (path, (state - other).abs().max())
    else:
        assert state == other, (path, state, other)


@contextmanager
def heard_by_pytest():
    """Our loggers, like transformers', keep to themselves; pytest listens at the root."""
    logger = logging.getLogger("hf_dflash")
    was, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = was


class GradientRecorder(TrainerCallback):
    """Keeps the gradients of the first optimizer step, and every step's true norm."""

    def __init__(self):
        self.first = None
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {name.removeprefix("module."): p.grad.detach().clone() for name, p in model.named_parameters()}
        if self.first is None:
            self.first = gradients
        self.norms.append(float(torch.cat([g.flatten() for g in gradients.values()]).double().norm()))


def relative_difference(gradients: dict, reference: dict) -> float:
    """max |difference| / max |g|, over all tensors together."""
    largest = max(float(g.abs().max()) for g in reference.values())
    return max(float((gradients[name] - reference[name]).abs().max()) for name in reference) / largest


class BrokenTarget(FrozenTarget):
    """Features of one document (those that start with `first_token`) are not finite, or zero, from its second token on."""

    first_token, value = None, None

    def __call__(self, input_ids, lengths, label_positions=None, **options):
        features = super().__call__(input_ids, lengths, label_positions, **options)
        starts = lengths.cumsum(0) - lengths
        for row, start, length in zip(input_ids, starts.tolist(), lengths.tolist(), strict=True):
            if int(row[0]) == self.first_token:
                features.context_hidden_states[start + 1 : start + length, 3] = self.value
                if features.label_hidden_states is not None and not math.isfinite(self.value):
                    own = (label_positions >= start) & (label_positions < start + length)
                    features.label_hidden_states[own] = self.value
        return features
