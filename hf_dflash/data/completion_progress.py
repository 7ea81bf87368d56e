# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What is seen while completions are written."""

import time

from ..progress import ProgressBar
from .completion_folder import CompletionFolder


class LiveTable:
    """
    The progress bar: rows/s, and behind it tokens/s, the share of replies cut by the length limit, that of empty ones, and
    the prompts that failed. A context manager.

    Args:
        folder ([`~data.completion_folder.CompletionFolder`]):
            An open folder.
        total (`int`, *optional*):
            Prompts.
        disable (`bool`, *optional*, defaults to `False`):
            If `True`, nothing is shown.
    """

    def __init__(self, folder: CompletionFolder, total: int | None, *, disable: bool = False):
        self._counts = folder.watch.counts
        self._started = time.monotonic()
        self._answered_before = len(folder.answered)
        self._bar = ProgressBar(
            total=total,
            initial=self._answered_before,
            unit=" rows",
            desc="Completions",
            disable=disable,
            smoothing=0.05,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.update()
        self._bar.close()

    def update(self) -> None:
        """Shows the present counts."""
        counts = self._counts
        rows = counts["rows"]
        self._bar.set_postfix_str(
            f"{counts['completion_tokens'] / (time.monotonic() - self._started):,.0f} tokens/s, "
            f"cut {counts['cut'] / max(1, rows):.1%}, empty {counts['empty'] / max(1, rows):.1%}, "
            f"failed {counts['failed']}",
            refresh=False,
        )
        self._bar.update(self._answered_before + rows + counts["failed"] - self._bar.n)
