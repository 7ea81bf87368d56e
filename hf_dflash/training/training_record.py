# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a drafter's card says about the run that made it, read from the trainer and its log."""

import math

import numpy as np
import torch
import transformers

from .. import __version__
from ..hub.model_card import AcceptanceFigure, TrainingRecord
from .callbacks import AcceptanceCallback


HYPERPARAMETERS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "matrix_optimizer",
    "weight_decay",
    "max_grad_norm",
    "num_train_epochs",
    "token_budget",
    "gradient_accumulation_steps",
    "world_size",
    "bf16",
    "num_anchors",
    "anchor_ratio",
    "labels",
    "loss_type",
    "loss_weighting",
    "loss_gamma",
    "seed",
)

_FIGURE = "_acceptance_length"


def describe_training(trainer, *, license: str | None = None, datasets: list[str] | None = None) -> TrainingRecord:
    """
    Args:
        trainer ([`DFlashTrainer`]): during or after training.
        license (`str`, *optional*): of the weights; `--hub_license` by default.
        datasets (`list[str]`, *optional*): Hub ids of the data; `--hub_datasets` by default.

    Returns:
        [`TrainingRecord`]: of plain values only.
    """
    args = trainer.args
    names = HYPERPARAMETERS
    if args.max_steps > 0:
        # It counts in place of the epochs.
        names = ["max_steps" if name == "num_train_epochs" else name for name in HYPERPARAMETERS]
    values = {name: getattr(args, name) for name in names}
    return TrainingRecord(
        data=_describe_data(trainer.train_dataset),
        datasets=datasets or args.hub_datasets or [],
        hyperparameters={name: getattr(value, "value", value) for name, value in values.items()},
        acceptance=_read_acceptance(trainer),
        license=license or args.hub_license,
        progress=_describe_progress(trainer),
        versions={
            "hf_dflash": __version__,
            "Transformers": transformers.__version__,
            "PyTorch": str(torch.__version__),
        },
    )


def _has_ended(state) -> bool:
    return any("train_runtime" in entry and entry["step"] == state.global_step for entry in state.log_history)


def _find_best_step(trainer) -> int | None:
    """The step whose weights were put back when training ended, `None` if the weights are the newest ones."""
    args, state = trainer.args, trainer.state
    is_put_back = args.load_best_model_at_end and state.best_model_checkpoint is not None and _has_ended(state)
    return state.best_global_step if is_put_back else None


def _describe_progress(trainer) -> str | None:
    state, best_step = trainer.state, _find_best_step(trainer)
    if not state.global_step:
        return None
    if state.global_step >= state.max_steps:
        text = f"{state.global_step} steps."
    else:
        word = "Ended at" if _has_ended(state) else "Under way:"
        text = f"{word} step {state.global_step} of {state.max_steps}."
    if best_step not in (None, state.global_step):
        text += f" The weights are those of step {best_step}, the best by `{trainer.args.metric_for_best_model}`."
    return text


def _describe_data(dataset) -> str | None:
    if dataset is None:
        return None
    text = f"{len(dataset):,} samples with {int(np.sum(dataset['length'])):,} tokens"
    if "num_supervised" in dataset.column_names:
        text += f", {int(np.sum(dataset['num_supervised'])):,} of them in supervised replies"
    return f"{text}."


def _read_acceptance(trainer) -> list[AcceptanceFigure]:
    """The newest figure of each evaluation dataset, and the newest one that was really decoded."""
    newest: dict[str, dict] = {}
    history, best_step = trainer.state.log_history, _find_best_step(trainer)
    if best_step is not None:
        # Figures of the weights that were put back: of their own step, and what was evaluated after they were.
        end = max(i for i, entry in enumerate(history) if "train_runtime" in entry)
        history = [entry for entry in history[:end] if entry["step"] == best_step]
        history += [{**entry, "step": best_step} for entry in trainer.state.log_history[end:]]
    for entry in history:
        for key, value in entry.items():
            if key.endswith(_FIGURE) and math.isfinite(value):
                newest[key.removesuffix(_FIGURE)] = entry
    figures = []
    for name, entry in newest.items():
        if name == "decoded":
            figures.append(_describe_decoded(trainer, entry))
        elif f"{name}_target_agreement" in entry:
            dataset = name.removeprefix("eval").strip("_")
            figures.append(
                AcceptanceFigure(
                    f"held-out replies of `{dataset}`" if dataset else "held-out replies",
                    entry[name + _FIGURE],
                    f"simulated at step {entry['step']}: the drafter walks each reply as decoding does, and a draft counts if it "
                    f"is the reply's token; {entry[f'{name}_target_agreement']:.1%} of those are the target's greedy choice",
                )
            )
    return figures


def _describe_decoded(trainer, entry: dict) -> AcceptanceFigure:
    callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, AcceptanceCallback)), None)
    prompts, length = "held-out prompts", ""
    if callback is not None:
        prompts = f"the first {callback.num_prompts} held-out prompts"
        length = f", at most {callback.max_new_tokens} tokens each"
    return AcceptanceFigure(
        prompts, entry["decoded" + _FIGURE], f"really decoded at step {entry['step']}, greedily{length}"
    )
