# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Progress in a terminal, and plain lines in a file."""

import sys

from tqdm.auto import tqdm


# Of plain lines, at most one in so many seconds, and one at the end.
_SECONDS_BETWEEN_LINES = 30.0


class ProgressBar(tqdm):
    """
    A tqdm bar. Where it is not shown in a terminal (a log file, a pipe, a job of a scheduler) it writes whole lines instead, now
    and then.

    Args:
        args, kwargs: of tqdm.
    """

    def __init__(self, *args, **kwargs):
        file = kwargs.get("file") or sys.stderr
        self.is_plain = not getattr(file, "isatty", bool)()
        if self.is_plain:
            kwargs.setdefault(
                "bar_format",
                "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
            )
            if kwargs.get("total") is None and not hasattr(next(iter(args), kwargs.get("iterable")), "__len__"):
                kwargs["bar_format"] = "{desc}: {n_fmt} [{elapsed}, {rate_fmt}{postfix}]"
            kwargs.setdefault("mininterval", _SECONDS_BETWEEN_LINES)
            kwargs["maxinterval"] = kwargs["mininterval"]
            # A notebook's bar is no text.
            kwargs.setdefault("gui", False)
        self._last_line = None
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None, **kwargs) -> bool:
        if not self.is_plain:
            return super().display(msg, pos, **kwargs)
        line = str(self) if msg is None else msg
        # Nothing has happened yet: nothing to say.
        if line and line != self._last_line and self.n > self.initial:
            self.fp.write(line.rstrip() + "\n")
            self._last_line = line
        return True

    def close(self) -> None:
        if not self.is_plain:
            super().close()
            return
        if self.disable:
            return
        self.disable = True
        if self.leave:
            # The rate of all of it, as a bar shows it at its end.
            self._ema_dt = lambda: None
            self.display()
        self._decr_instances(self)
