# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The log that a run leaves in its folder, and that the monitor reads.

`OUTPUT_DIR/run_log.jsonl` is only ever appended to, one JSON object a line, of two kinds:

    {"step": 120, "time": 1770000000.5, "loss": 2.31, "time/step": 0.84, ...}       figures, maybe none: the run is alive
    {"event": "checkpoint", "step": 120, "time": 1770000003.1, ...}                 something happened

A run that goes on from a checkpoint writes the event `begin` with the checkpoint's step: what stands above it about later
steps is void.
"""

import json
import math
import os
import threading
import time
from pathlib import Path


RUN_LOG = "run_log.jsonl"


class RunLog:
    """
    Appends to the run log of a folder. Any thread may write; a full disk is warned about once and never ends training.

    Args:
        folder (`str` or `os.PathLike`): the run's output folder; made if need be.
    """

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / RUN_LOG
        self._file = None
        self._lock = threading.Lock()
        self._has_failed = False

    def add_figures(self, step: int, figures: dict) -> None:
        """
        Args:
            step (`int`): optimizer steps done.
            figures (`dict`): name -> number. One that is not finite is written as `null`; what is no number is left out.
        """
        numbers = {name: _to_plain(value) for name, value in figures.items() if _is_number(value)}
        self._append({"step": step, "time": round(time.time(), 2), **numbers})

    def add_event(self, event: str, step: int, **fields) -> None:
        """
        Args:
            event (`str`): `begin`, `end`, `checkpoint`, `upload`, `uploaded`, `upload_failed`, `alert`, `alert_over` or `decoded`.
            step (`int`): optimizer steps done.
            fields: what else is known, plain values.
        """
        self._append({"event": event, "step": step, "time": round(time.time(), 2), **fields})

    def close(self) -> None:
        """Closes the file; the next write opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append(self, row: dict) -> None:
        line = json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            with self._lock:
                if self._file is None:
                    self._file = self._open()
                self._file.write(line)
        except OSError as error:
            if not self._has_failed:
                # Here, because the monitor reads this module for a name, and starts without transformers.
                from transformers.utils import logging

                logger = logging.get_logger(__name__)
                logger.warning(f"{self.path} cannot be written, so the monitor sees no more of this run. {error}")
            self._has_failed = True

    def _open(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line is in the file, whatever happens to the process afterwards.
        file = open(self.path, "ab+", buffering=0)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                # A killed run has left half a line.
                file.write(b"\n")
        return file


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_plain(value: int | float) -> int | float | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
