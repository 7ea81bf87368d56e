# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""SIGTERM and SIGINT ask for a checkpoint and the end of training; a second one ends the process at once."""

import os
import signal
import threading
import time

from transformers import TrainerCallback


# A terminal sends SIGINT to launcher and workers, and the launcher sends it to the workers once more: one wish, heard twice.
_ECHO_SECONDS = 1.0


class StopSignals:
    """
    A context manager that turns the first SIGTERM or SIGINT into a wish, [`~StopSignals.requested`].

    What handled these signals before is put back at the end. Outside the main thread nothing is changed: Python delivers
    signals to the main thread only.
    """

    def __init__(self):
        self.received: int | None = None
        self._received_at = 0.0
        self._previous: dict = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        self.received = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            # Not logging: a handler may interrupt the very lock that logging takes.
            os.write(
                2, b"\nStopping: the running step is finished and saved. Another signal ends the process at once.\n"
            )
        elif time.monotonic() - self._received_at > _ECHO_SECONDS:
            os._exit(128 + number)

    def leave(self) -> None:
        """Ends the process the way that a signal does, exit status non-zero: 130 for SIGINT, else 143.

        Raises:
            `KeyboardInterrupt`, `SystemExit`: always.
        """
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


class StopCallback(TrainerCallback):
    """Lets a run that was asked to stop save, and do nothing else: no evaluation, no log of half a window."""

    def __init__(self):
        self.is_stopping = False

    def stop(self, control) -> None:
        """Ends training here, on all ranks."""
        self.is_stopping = True
        control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.is_stopping:
            control.should_save, control.should_evaluate, control.should_log = True, False, False


class CatchUpCallback(TrainerCallback):
    """Makes up for an evaluation that was due where the run stopped: after the save, or cut short by a signal.

    The checkpoint also brought the steps between logs, evaluations and saves of the run that saved it: this run's hold now.

    Args:
        trainer ([`DFlashTrainer`]): whose run goes on.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            return
        state.compute_steps(args, state.max_steps)
        interval = {"steps": state.eval_steps, "epoch": self.trainer.steps_per_epoch}.get(args.eval_strategy)
        is_due = interval and state.global_step % interval == 0
        is_done = any("eval_runtime" in entry and entry["step"] == state.global_step for entry in state.log_history)
        if is_due and not is_done:
            metrics = self.trainer.evaluate()
            self.trainer._determine_best_metric(metrics, trial=None)
