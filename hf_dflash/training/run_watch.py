# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a training run tells about itself: its log for the monitor, its alerts, its uploads."""

import os
import shutil
import time
from pathlib import Path

import torch
import transformers
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging

from .. import __version__
from ..monitor.alerts import Alert, AlertLimits, AlertWatch
from ..monitor.history import RunHistory
from ..monitor.run_log import RunLog
from ..monitor.webhook import Webhook
from ..progress import ProgressBar
from .terminal import TerminalCallback
from .uploads import Uploads


logger = logging.get_logger(__name__)

# A sign of life between two logs, in seconds.
_SECONDS_BETWEEN_SIGNS = 5.0
# Lines after which the history is written beside the log: whoever opens the log has at most so many to read.
_LINES_BETWEEN_OVERVIEWS = 1000


class RunLogCallback(TrainerCallback):
    """
    Writes the run log of rank 0: what is logged, a sign of life every few seconds, checkpoints, uploads, decoded samples.

    Args:
        trainer ([`DFlashTrainer`]): whose run it is.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.log: RunLog | None = None
        self._history: RunHistory | None = None
        self._step = self._num_lines = 0
        self._next_sign = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero or not args.run_log:
            return
        self.log, self._history, self._num_lines = RunLog(args.output_dir), RunHistory(args.output_dir), 0
        self.add_event("begin", state.global_step, run=describe_run_briefly(self.trainer, state))

    def on_step_end(self, args, state, control, **kwargs):
        self._step = state.global_step
        if self.log is not None and not control.should_log and time.monotonic() >= self._next_sign:
            self._add_figures(state.global_step, {})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.log is not None and logs and "train_runtime" not in logs:
            self._add_figures(state.global_step, logs)

    def on_save(self, args, state, control, **kwargs):
        if self.log is None:
            return
        name = f"checkpoint-{state.global_step}"
        self.add_event("checkpoint", state.global_step, name=name, bytes=folder_bytes(Path(args.output_dir, name)))

    def on_train_end(self, args, state, control, **kwargs):
        if self.log is not None:
            how = "finished" if state.global_step >= state.max_steps else "stopped"
            self.add_event("end", state.global_step, how=how)
            self._write_overview()
            # A last evaluation may follow, which opens it again.
            self.log.close()

    def add_event(self, event: str, step: int | None = None, **fields) -> None:
        """Something happened; `step` is the last one done if not given. Any thread may say so."""
        if self.log is not None:
            self.log.add_event(event, self._step if step is None else step, **fields)

    def _add_figures(self, step: int, figures: dict) -> None:
        self.log.add_figures(step, figures)
        self._next_sign = time.monotonic() + _SECONDS_BETWEEN_SIGNS
        self._num_lines += 1
        if self._num_lines % _LINES_BETWEEN_OVERVIEWS == 0:
            self._write_overview()

    def _write_overview(self) -> None:
        try:
            self._history.update()
            self._history.write_overview()
        except OSError as error:
            logger.warning_once(f"The run log has no overview, so the monitor opens it more slowly. {error}")


class AlertCallback(TrainerCallback):
    """
    Tells what goes wrong, once an episode: as a warning, in the run log, and to a webhook.

    Args:
        limits ([`AlertLimits`]): from where on something is wrong.
        run_log ([`RunLogCallback`]): takes the alerts.
        uploads ([`Uploads`]): what is on its way.
        webhook_url (`str`, *optional*): `--alert_webhook`.
    """

    def __init__(self, limits: AlertLimits, run_log: RunLogCallback, uploads: Uploads, webhook_url: str | None = None):
        self.watch = AlertWatch(limits)
        self.run_log, self.uploads, self.webhook_url = run_log, uploads, webhook_url
        self._checkpoint_bytes = 0
        self._webhook: Webhook | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if self.webhook_url is not None and state.is_world_process_zero:
            self._webhook = Webhook(self.webhook_url)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        changes = self.watch.observe(
            logs,
            free_bytes=free_bytes(args.output_dir),
            checkpoint_bytes=self._checkpoint_bytes,
            waiting=self.uploads.waiting(),
        )
        for alert in changes:
            self._tell(alert, args, state)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self._checkpoint_bytes = folder_bytes(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_train_end(self, args, state, control, **kwargs):
        if self._webhook is not None:
            self._webhook.close()
            self._webhook = None

    def _tell(self, alert: Alert, args, state) -> None:
        step = state.global_step
        if alert.is_over:
            self.run_log.add_event("alert_over", step, name=alert.name, message=alert.message)
            return
        # A bar in the terminal makes room for the line.
        with ProgressBar.external_write_mode():
            logger.warning(f"Step {step}: {alert}")
        self.run_log.add_event("alert", step, **alert.to_dict())
        if self._webhook is not None:
            content = {"text": f"{args.run_name}, step {step}: {alert}", "run": args.run_name, "step": step}
            self._webhook.send(content | alert.to_dict())


def watch_run(trainer) -> None:
    """
    Adds what people see of a run: the terminal and the alerts.

    Args:
        trainer ([`DFlashTrainer`]): with its `run_log` and `uploads`.
    """
    args = trainer.args
    # A notebook has a table of its own.
    for printed in (ProgressCallback, PrinterCallback):
        if any(type(callback) is printed for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(printed)
            trainer.add_callback(TerminalCallback(bar=not args.disable_tqdm))
    limits = AlertLimits(
        grad_norm_factor=args.alert_grad_norm_factor,
        acceptance_drop=args.alert_acceptance_drop,
        wait_share=args.alert_wait_share,
        free_gib=args.alert_free_gib,
        upload_minutes=args.alert_upload_minutes,
    )
    trainer.add_callback(AlertCallback(limits, trainer.run_log, trainer.uploads, args.alert_webhook))


def describe_run_briefly(trainer, state) -> dict:
    """What the page says about a run: plain values, no secret, no path."""
    args, config = trainer.args, trainer.drafter_config
    target = trainer.target.model.name_or_path or ""
    return {
        "name": args.run_name,
        "max_steps": state.max_steps,
        "num_train_epochs": state.num_train_epochs,
        "steps_per_epoch": trainer.steps_per_epoch,
        "target": os.path.basename(target.rstrip("/")) if os.path.isabs(target) else target,
        "num_hidden_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "token_budget": args.token_budget,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "world_size": args.world_size,
        "learning_rate": args.learning_rate,
        "device": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type,
        "versions": f"hf_dflash {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    }


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder, 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def free_bytes(folder: str) -> int | None:
    """Free space where a folder is or will be, `None` if nobody can say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
