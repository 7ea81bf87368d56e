# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A training run in the terminal: one bar with the figures that matter, plain lines where there is none, a summary."""

import math
import sys
import time

from transformers import TrainerCallback

from ..monitor.remaining_time import RemainingTime, format_duration
from ..progress import ProgressBar


_FIGURE = "_acceptance_length"
_SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "K"))


class TerminalCallback(TrainerCallback):
    """
    Takes the place of `Trainer`'s bar and of its printed dicts.

    Args:
        bar (`bool`): show a bar if the terminal has room for one; `False` for plain lines in any case.
    """

    def __init__(self, bar: bool):
        self._wants_bar = bar and sys.stderr.isatty()
        self._disable_evaluation_bar = not bar
        self._training_bar: ProgressBar | None = None
        self._evaluation_bar: ProgressBar | None = None
        self._figures: dict[str, float] = {}
        self.remaining_time = RemainingTime()

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self._began, self._first_step = time.monotonic(), state.global_step
        self._figures = {}
        self.remaining_time.clear()
        self.remaining_time.add(state.global_step, time.monotonic())
        if self._wants_bar:
            self._training_bar = ProgressBar(
                total=state.max_steps,
                initial=state.global_step,
                desc="Training",
                unit=" steps",
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def on_step_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self.remaining_time.add(state.global_step, time.monotonic())
        if self._training_bar is not None:
            self._training_bar.set_postfix_str(self._describe(state), refresh=False)
            self._training_bar.update(state.global_step - self._training_bar.n)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if self._evaluation_bar is None:
            self._evaluation_bar = ProgressBar(
                total=len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None,
                desc="Evaluating",
                unit=" batches",
                leave=False,
                dynamic_ncols=True,
                disable=self._disable_evaluation_bar,
            )
        self._evaluation_bar.update()

    def on_evaluate(self, args, state, control, **kwargs):
        if self._evaluation_bar is not None:
            self._evaluation_bar.close()
            self._evaluation_bar = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        self._figures |= logs
        if any(name.startswith(("eval_", "decoded_")) for name in logs):
            self._write(f"step {state.global_step}: {describe_evaluation(logs)}")
        elif self._training_bar is None and "loss" in logs:
            self._write(f"step {state.global_step}/{state.max_steps}, {self._describe(state)}")

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        if self._training_bar is not None:
            self._training_bar.close()
            self._training_bar = None
        seconds, steps = time.monotonic() - self._began, state.global_step - self._first_step
        has_ended = state.global_step >= state.max_steps
        verb = "Trained" if has_ended else "Stopped after"
        done = f"{verb} {steps:,} step{'' if steps == 1 else 's'} in {format_duration(seconds)}, at step"
        if has_ended and 0 < self._first_step == state.global_step:
            done = "The run had ended before, at step"
        parts = [f"{done} {state.global_step:,} of {state.max_steps:,}"]
        parts += describe_figures(self._figures)
        if state.best_metric is not None and state.best_model_checkpoint is not None:
            best = state.best_model_checkpoint.rstrip("/").rpartition("/")[2]
            parts.append(f"best {args.metric_for_best_model} {state.best_metric:.3f} in {best}")
        self._write(", ".join(parts) + ".")

    def _describe(self, state) -> str:
        remaining = None
        if state.global_step < state.max_steps:
            remaining = self.remaining_time.estimate(state.max_steps - state.global_step)
        return ", ".join(describe_figures(self._figures) + ([f"{remaining} left"] if remaining is not None else []))

    def _write(self, line: str) -> None:
        if self._training_bar is not None:
            self._training_bar.write(line, file=sys.stderr)
        else:
            print(line, flush=True)


def describe_figures(figures: dict[str, float]) -> list[str]:
    """The few that matter of everything that was logged: loss, acceptance length, speed.

    Acceptance length is the newest held-out one; before the first evaluation it is the mean over training anchors, and says so.
    """
    parts = []
    if "loss" in figures:
        parts.append(f"loss {figures['loss']:.4g}")
    held_out = [
        name for name in figures if name.startswith("eval_") and name.endswith(_FIGURE) and "anchor" not in name
    ]
    if held_out and math.isfinite(figures[held_out[0]]):
        parts.append(f"acceptance length {figures[held_out[0]]:.3f} held-out")
    elif "anchor_acceptance_length" in figures:
        parts.append(f"acceptance length {figures['anchor_acceptance_length']:.3f} over anchors")
    if "tokens_per_second" in figures:
        parts.append(f"{abbreviate(figures['tokens_per_second'])} tokens/s")
    return parts


def describe_evaluation(figures: dict[str, float]) -> str:
    """One line: without the figures slot by slot, which the monitor shows."""
    shown = [
        f"{name.removeprefix('eval_').removeprefix('decoded_').replace('_', ' ')} {value:.4g}"
        for name, value in figures.items()
        if name != "epoch"
        and "_slot_" not in name
        and not name.endswith(("_preparation_time", "_runtime", "_per_second"))
        and isinstance(value, int | float)
    ]
    kind = "held-out" if any(name.startswith("eval_") for name in figures) else "decoded"
    return f"{kind}: {', '.join(shown)}"


def abbreviate(value: float) -> str:
    """`"128.7K"`."""
    for size, suffix in _SUFFIXES:
        if value >= size:
            return f"{value / size:.1f}{suffix}"
    return f"{value:.0f}"
