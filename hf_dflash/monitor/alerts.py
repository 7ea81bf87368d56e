# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What goes wrong in a run, told once an episode, with the likely cause and what to do about it.

Each rule looks at one thing and says what is wrong with it, that nothing is, or that it cannot tell from what was logged.
"""

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass


_FIGURE = "_acceptance_length"

# Gradient norms to compare with, and how many are enough; logs in a row of a drafter that waits.
_NUM_NORMS, _FEWEST_NORMS = 50, 20
_NUM_WAITS = 5
# Tokens of acceptance length that may be chance.
_SMALLEST_FALL = 0.05
_GIB = 2**30


@dataclass(frozen=True)
class AlertLimits:
    """
    Args:
        grad_norm_factor (`float`): times the median of the latest 50 gradient norms.
        acceptance_drop (`float`): share of the best acceptance length so far.
        wait_share (`float`): of a step, in which the drafter waits.
        free_gib (`float`): free space of the disk that `output_dir` is on, in GiB.
        upload_minutes (`float`): that an upload may take, in minutes.
    """

    grad_norm_factor: float
    acceptance_drop: float
    wait_share: float
    free_gib: float
    upload_minutes: float


@dataclass(frozen=True)
class Waiting:
    """
    An upload that has not arrived.

    Args:
        name (`str`): of the checkpoint.
        place (`str`): `"S3"` or `"the Hub"`.
        seconds (`float`): since it was handed over.
    """

    name: str
    place: str
    seconds: float


@dataclass(frozen=True)
class Alert:
    """
    Args:
        name (`str`): of the rule.
        message (`str`): what is wrong.
        cause (`str`): the likely one.
        fix (`str`): what to do.
        is_over (`bool`): the end of an episode.
    """

    name: str
    message: str
    cause: str
    fix: str
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.message} Likely cause: {self.cause} What helps: {self.fix}"

    def to_dict(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "is_over"}


# name -> likely cause, what helps
_ADVICE = {
    "loss": (
        "the learning rate is too high, or fp16 overflows.",
        "go on from the checkpoint before with a lower --learning_rate or a longer warm-up; --bf16 instead of --fp16.",
    ),
    "skipped_blocks": (
        "the target's hidden states overflow on some documents.",
        "their blocks are left out and training goes on; if it keeps on, load the target with --target_dtype float32 or "
        "take these documents out.",
    ),
    "grad_norm": (
        "a batch unlike all others, or a learning rate that is too high.",
        "one jump is harmless, --max_grad_norm holds it back; if it comes again, lower --learning_rate.",
    ),
    "acceptance": (
        "the learning rate is too high, or the drafter learns its training data by heart.",
        "keep the best checkpoint (--load_best_model_at_end); fewer epochs, more completions, a lower --learning_rate.",
    ),
    "starving": (
        "the target is slower than the drafter: too little drafter work for each target token.",
        "more target devices (--targets_per_process), more blocks (--anchor_ratio, --num_anchors); `hf-dflash plan` shows "
        "the balance.",
    ),
    "disk": (
        "checkpoints fill the disk.",
        "set --save_total_limit, or make room before the next save fails.",
    ),
    "upload": (
        "the network or the service is slow or down, or the credentials have run out.",
        "look at the warnings above for the error; the checkpoint is still in output_dir and is tried again.",
    ),
}


class AlertWatch:
    """
    Looks at each log of a run.

    Args:
        limits ([`AlertLimits`]): from where on something is wrong.
    """

    def __init__(self, limits: AlertLimits):
        self.limits = limits
        self.active: dict[str, Alert] = {}
        self._norms: deque[float] = deque(maxlen=_NUM_NORMS)
        self._waits: deque[float] = deque(maxlen=_NUM_WAITS)
        self._best: dict[str, float] = {}
        self._fallen: dict[str, str] = {}

    def observe(
        self,
        figures: dict[str, float],
        *,
        free_bytes: int | None = None,
        checkpoint_bytes: int = 0,
        waiting: list[Waiting] = (),
    ) -> list[Alert]:
        """
        Args:
            figures (`dict[str, float]`): of one log.
            free_bytes (`int`, *optional*): on the disk of `output_dir`; `None` if not known.
            checkpoint_bytes (`int`, *optional*): size of the last checkpoint.
            waiting (`list[Waiting]`, *optional*): uploads under way.

        Returns:
            `list[Alert]`: those that begin now, and, with `is_over`, those whose episode ends now.
        """
        problems: dict[str, str | None] = {}
        problems |= self._check_loss(figures)
        problems |= self._check_grad_norm(figures)
        problems |= self._check_acceptance(figures)
        problems |= self._check_waits(figures)
        problems |= self._check_disk(free_bytes, checkpoint_bytes)
        problems |= self._check_uploads(waiting)

        changes = []
        for name, message in problems.items():
            if message is not None and name not in self.active:
                self.active[name] = Alert(name, message, *_ADVICE[name])
                changes.append(self.active[name])
            elif message is None and name in self.active:
                ended = self.active.pop(name)
                changes.append(Alert(name, ended.message, ended.cause, ended.fix, is_over=True))
        return changes

    def _check_loss(self, figures) -> dict[str, str | None]:
        if "loss" not in figures:
            return {}
        steps, skipped = figures.get("skipped_nonfinite_steps", 0), figures.get("skipped_nonfinite_blocks", 0)
        loss = None if math.isfinite(figures["loss"]) else f"The loss is {figures['loss']}."
        if steps:
            # Without any other step there is no loss.
            loss = f"{steps:.0f} steps were passed over: loss or gradients are not finite."
        return {
            "loss": loss,
            "skipped_blocks": f"{skipped:.0f} blocks were left out: their features are not finite."
            if skipped
            else None,
        }

    def _check_grad_norm(self, figures) -> dict[str, str | None]:
        norm = figures.get("grad_norm")
        if norm is None:
            return {}
        if not math.isfinite(norm):
            return {"grad_norm": f"The gradient norm is {norm}."}
        usual = statistics.median(self._norms) if len(self._norms) >= _FEWEST_NORMS else None
        self._norms.append(norm)
        if usual is None or norm <= self.limits.grad_norm_factor * usual:
            return {"grad_norm": None}
        return {
            "grad_norm": f"The gradient norm jumped to {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}."
        }

    def _check_acceptance(self, figures) -> dict[str, str | None]:
        """Held-out figures only: the mean over the anchors of ten steps jumps about by itself."""
        names = [
            name
            for name, value in figures.items()
            if name.endswith(_FIGURE)
            and name.startswith(("eval_", "decoded_"))
            and not name.endswith("anchor" + _FIGURE)
            and math.isfinite(value)
        ]
        for name in names:
            best = self._best[name] = max(self._best.get(name, 0.0), figures[name])
            self._fallen.pop(name, None)
            # Of the tokens behind the bonus token, which is always there.
            fall = best - figures[name]
            if fall > max(_SMALLEST_FALL, self.limits.acceptance_drop * (best - 1)):
                self._fallen[name] = f"{name} fell to {figures[name]:.3f}; its best was {best:.3f}."
        return {"acceptance": " ".join(self._fallen.values()) or None} if names else {}

    def _check_waits(self, figures) -> dict[str, str | None]:
        wait, step = figures.get("time/wait"), figures.get("time/step")
        if wait is None or not step:
            return {}
        self._waits.append(wait / step)
        if len(self._waits) < _NUM_WAITS:
            return {}
        share = min(self._waits)
        message = f"The drafter waits for {statistics.mean(self._waits):.0%} of each step."
        return {"starving": message if share > self.limits.wait_share else None}

    def _check_disk(self, free_bytes, checkpoint_bytes) -> dict[str, str | None]:
        if free_bytes is None:
            return {}
        # One that is being written, beside the one that is to be deleted.
        needed = max(self.limits.free_gib * _GIB, 2 * checkpoint_bytes)
        message = f"{free_bytes / _GIB:.1f} GiB are free where the run is saved; {needed / _GIB:.1f} GiB are wanted."
        return {"disk": message if free_bytes < needed else None}

    def _check_uploads(self, waiting) -> dict[str, str | None]:
        stalled = [upload for upload in waiting if upload.seconds > 60 * self.limits.upload_minutes]
        if not stalled:
            return {"upload": None}
        oldest = max(stalled, key=lambda upload: upload.seconds)
        return {
            "upload": f"{oldest.name} has been on its way to {oldest.place} for {oldest.seconds / 60:.0f} minutes."
        }
