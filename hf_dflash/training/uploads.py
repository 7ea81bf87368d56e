# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which checkpoints are on their way to S3 and to the Hub, and since when."""

import threading
import time

from ..monitor.alerts import Waiting


class Uploads:
    """
    What is on its way elsewhere. Any thread may report.

    Args:
        on_change (`Callable`, *optional*): called with an event's name and its fields.
    """

    def __init__(self, on_change=None):
        self._on_change = on_change
        self._lock = threading.Lock()
        self._began: dict[tuple[str, str], float] = {}

    def begin(self, name: str, place: str) -> None:
        """
        Args:
            name (`str`): of the checkpoint.
            place (`str`): `"S3"` or `"the Hub"`.
        """
        with self._lock:
            self._began[name, place] = time.monotonic()
        self._tell("upload", name=name, place=place)

    def end(self, name: str, place: str, error: str | None = None) -> None:
        """
        Args:
            name (`str`), place (`str`): as in [`~Uploads.begin`].
            error (`str`, *optional*): why it failed.
        """
        with self._lock:
            began = self._began.pop((name, place), time.monotonic())
        seconds = round(time.monotonic() - began, 1)
        if error is None:
            self._tell("uploaded", name=name, place=place, seconds=seconds)
        else:
            self._tell("upload_failed", name=name, place=place, seconds=seconds, error=error)

    def waiting(self) -> list[Waiting]:
        """What has not arrived."""
        now = time.monotonic()
        with self._lock:
            return [Waiting(name, place, now - began) for (name, place), began in self._began.items()]

    def _tell(self, event: str, **fields) -> None:
        if self._on_change is not None:
            self._on_change(event, **fields)
