# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Alerts sent elsewhere, beside a training run that never waits for them."""

import json
import queue
import threading
import urllib.request

from transformers.utils import logging


logger = logging.get_logger(__name__)

# A service that is down for a week must not fill the memory.
_MOST_WAITING = 100


class Webhook:
    """
    POSTs JSON in a background thread. What fails is warned about once and dropped.

    Args:
        url (`str`): `http://` or `https://`. Often a secret: it is never logged.
        timeout (`float`, *optional*, defaults to 10): of a request, in seconds.
    """

    def __init__(self, url: str, timeout: float = 10.0):
        self._url, self._timeout = url, timeout
        self._waiting: queue.Queue[dict | None] = queue.Queue(maxsize=_MOST_WAITING)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def send(self, content: dict) -> None:
        """
        Args:
            content (`dict`): the body. Chat services show its `text`.
        """
        try:
            self._waiting.put_nowait(content)
        except queue.Full:
            pass

    def close(self) -> None:
        """Waits for what is under way, for as long as one request may take."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._timeout)

    def _run(self) -> None:
        while (content := self._waiting.get()) is not None:
            try:
                self._post(content)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the webhook, the run has nothing to do with it
                if not self._has_failed:
                    # Of the error only its kind: its text may hold the address.
                    logger.warning(
                        f"The alert webhook does not take alerts ({type(error).__name__}); training goes on."
                    )
                self._has_failed = True

    def _post(self, content: dict) -> None:
        request = urllib.request.Request(
            self._url, json.dumps(content).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=self._timeout):
            pass
