# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a page needs of a run log of any length: read once, from where the last look ended, and kept in a fixed size.

Each figure is kept in a fixed number of buckets along the steps, with mean, lowest, highest: a spike of one step in 200,000
stays to be seen. When the steps outgrow them, two buckets become one.

The run itself leaves such a history beside its log now and then, `run_log.overview`: whoever opens a log of 100 MB reads that,
and of the log only what was written since. It is a shortcut and nothing else: without it, or if it does not fit the log, the log
is read from its begin.
"""

import hashlib
import json
import os
import stat
import threading
from collections import deque
from itertools import groupby
from pathlib import Path

import numpy as np

from ..atomic_files import replacing
from ..training.checkpoint import TRAINER_STATE, list_checkpoints
from .remaining_time import RemainingTime
from .run_log import RUN_LOG


try:
    from orjson import loads
except ImportError:
    # A page of 200,000 lines then takes three times as long to open.
    from json import loads

_BLOCK_BYTES = 1 << 20
OVERVIEW = "run_log.overview"
# Of the log before the place where an overview ends, so much must be what it was.
_CHECKED_BYTES = 4096
_ARRAYS = {"_sums": 0, "_counts": 0, "_lows": np.inf, "_highs": -np.inf, "_lasts": -1, "_latest": np.nan}

# A longer line is none of ours.
_LINE_BYTES = 1 << 18
_MAX_NAMES, _MAX_NAME_LENGTH = 512, 128
_MAX_STEP = 2**53
_MAX_OVERVIEW_BYTES = 64 << 20
_MAX_EVENTS, _MAX_DECODED, _MAX_MOMENTS = 200, 8, 600


class RunHistory:
    """
    A run, from its run log, or from the `trainer_state.json` of its last checkpoint where there is no log.

    Args:
        folder (`str` or `os.PathLike`): the run's output folder. Links in it are not followed.
        num_buckets (`int`, *optional*, defaults to 1024): of each figure; a power of two.
    """

    def __init__(self, folder: str | os.PathLike, num_buckets: int = 1024):
        self.folder, self.num_buckets = Path(folder), num_buckets
        self.bytes_read = 0
        self.generation = 0
        self._lock = threading.Lock()
        self._source = None
        self._clear()

    def _clear(self) -> None:
        self.offset = self.size = 0
        self._skips_line = False
        self.time = 0.0
        self.run: dict = {}
        self.ended: str | None = None
        self.events: deque[dict] = deque(maxlen=_MAX_EVENTS)
        self.decoded: deque[dict] = deque(maxlen=_MAX_DECODED)
        self.alerts: dict[str, dict] = {}
        self.events_version = 0
        self.remaining_time = RemainingTime()
        self._clear_figures()

    def _clear_figures(self) -> None:
        self.generation += 1
        self.width, self.step = 1, 0
        self._columns: dict[str, int] = {}
        self._sums = np.zeros((self.num_buckets, 0))
        self._counts = np.zeros((self.num_buckets, 0), dtype=np.int64)
        self._lows = np.full((self.num_buckets, 0), np.inf)
        self._highs = np.full((self.num_buckets, 0), -np.inf)
        self._lasts = np.full((self.num_buckets, 0), -1.0)
        self._latest = np.full((self.num_buckets, 0), np.nan)

    # ---- Reading ----

    def update(self, max_bytes: int | None = None) -> bool:
        """
        Reads what was added since the last call, and nothing else.

        Args:
            max_bytes (`int`, *optional*): leave the rest to the next call.

        Returns:
            `bool`: whether everything was read.

        Raises:
            `FileNotFoundError`: if there is neither a log nor a checkpoint.
        """
        with self._lock:
            if self._read_log(max_bytes):
                return self.offset == self.size
            if not self._read_trainer_state():
                raise FileNotFoundError(
                    f"{self.folder} holds neither {RUN_LOG} nor a checkpoint with {TRAINER_STATE}: give the --output_dir of a "
                    "training run."
                )
            return True

    def _read_log(self, max_bytes: int | None) -> bool:
        try:
            file = _open_plain_file(self.folder / RUN_LOG)
        except FileNotFoundError:
            return False
        with file:
            status = os.fstat(file.fileno())
            if self._source != ("log", status.st_ino) or status.st_size < self.offset:
                self._clear()
                self._source = ("log", status.st_ino)
                self._read_overview(file, status.st_size)
            self.size = status.st_size
            end = self.size if max_bytes is None else min(self.size, self.offset + max_bytes)
            while self.offset < end:
                file.seek(self.offset)
                block = file.read(min(_BLOCK_BYTES, self.size - self.offset))
                self.bytes_read += len(block)
                whole = block.rfind(b"\n") + 1
                if whole:
                    self._read_lines(block[:whole])
                    self.offset += whole
                elif len(block) == _BLOCK_BYTES:
                    self._skips_line = True
                    self.offset += len(block)
                else:
                    # Half a line: the rest is being written.
                    self.size = self.offset
                    break
        return True

    def _read_lines(self, block: bytes) -> None:
        lines = block.split(b"\n")
        if self._skips_line:
            lines, self._skips_line = lines[1:], False
        rows = []
        for line in lines:
            try:
                row = loads(line)
            except (ValueError, RecursionError):
                continue
            if type(row) is dict and len(line) <= _LINE_BYTES:
                rows.append(row)
        # The same names again and again: whole blocks become arrays.
        for names, group in groupby(rows, key=tuple):
            if "event" in names:
                for row in group:
                    self._add_event(row)
            else:
                self._add_figures(names, [[*row.values()] for row in group])

    def _read_trainer_state(self) -> bool:
        folders = [self.folder, *reversed(list_checkpoints(self.folder))]
        for path in (folder / TRAINER_STATE for folder in folders):
            try:
                if path.parent.is_symlink():
                    continue
                with _open_plain_file(path) as file:
                    status = os.fstat(file.fileno())
                    source = ("state", str(path), status.st_mtime_ns, status.st_size)
                    if self._source == source:
                        return True
                    state = json.load(file)
                    self.bytes_read += status.st_size
            except (FileNotFoundError, ValueError):
                continue
            self._clear()
            self._source = source
            self._add_trainer_state(state, status.st_mtime)
            return True
        return False

    def _add_trainer_state(self, state: dict, time: float) -> None:
        history = [row for row in state.get("log_history", []) if type(row) is dict]
        for names, group in groupby(history, key=tuple):
            self._add_figures(names, [[*row.values()] for row in group])
        self.step, self.time = max(self.step, int(state.get("global_step", 0))), time
        self.run = {"max_steps": state.get("max_steps"), "num_train_epochs": state.get("num_train_epochs")}
        self.ended = "finished" if self.step >= (self.run["max_steps"] or 0) else "as of the last checkpoint"

    # ---- Keeping ----

    def _add_figures(self, names: tuple[str, ...], rows: list[list]) -> None:
        if "step" not in names:
            return
        try:
            values = np.array(rows, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.array([[_to_float(value) for value in row] for row in rows])
        steps = values[:, names.index("step")]
        usable = (steps >= 0) & (steps < _MAX_STEP)
        values, steps = values[usable], steps[usable]
        if not len(steps):
            return
        if (np.diff(steps) < 0).any():
            order = steps.argsort(kind="stable")
            values, steps = values[order], steps[order]
        self.step = max(self.step, int(steps[-1]))
        if "time" in names:
            times = np.nan_to_num(values[:, names.index("time")])
            for step, time in zip(steps[-_MAX_MOMENTS:].tolist(), times[-_MAX_MOMENTS:].tolist(), strict=True):
                if time:
                    self.remaining_time.add(int(step), time)
            # The latest line counts, not the latest time: a clock may be set back, or the run go on where it shows less.
            self.time = next((time for time in times[::-1].tolist() if time), self.time)
        while self.step // self.width >= self.num_buckets:
            self._halve()

        places = [i for i, name in enumerate(names) if name not in ("step", "time") and self._knows(name)]
        if not places:
            return
        columns = [self._columns[names[i]] for i in places]
        values = values[:, places]
        finite = np.isfinite(values)
        buckets = (steps // self.width).astype(np.int64)
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        cells = np.ix_(buckets[starts], columns)
        self._sums[cells] += np.add.reduceat(np.where(finite, values, 0), starts)
        self._counts[cells] += np.add.reduceat(finite.astype(np.int64), starts)
        self._lows[cells] = np.minimum(
            self._lows[cells], np.minimum.reduceat(np.where(finite, values, np.inf), starts)
        )
        self._highs[cells] = np.maximum(
            self._highs[cells], np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
        )
        lasts = np.maximum.reduceat(np.where(finite, steps[:, None], -1), starts)
        self._lasts[cells] = np.maximum(self._lasts[cells], lasts)
        # The value at that step: its row is the last one of the bucket that is finite.
        row = np.maximum.reduceat(np.where(finite, np.arange(len(steps))[:, None], -1), starts)
        latest = values[row, np.arange(len(places))]
        self._latest[cells] = np.where(row >= 0, latest, self._latest[cells])

    def _knows(self, name: str) -> bool:
        if name in self._columns:
            return True
        if len(self._columns) == _MAX_NAMES or len(name) > _MAX_NAME_LENGTH:
            return False
        self._columns[name] = len(self._columns)
        for array, empty in _ARRAYS.items():
            setattr(self, array, np.pad(getattr(self, array), ((0, 0), (0, 1)), constant_values=empty))
        return True

    def _halve(self) -> None:
        """Two buckets become one."""
        half = self.num_buckets // 2

        def fold(array, join, empty):
            pairs = array.reshape(half, 2, -1)
            return np.concatenate([join(pairs[:, 0], pairs[:, 1]), np.full_like(array[:half], empty)])

        self._sums = fold(self._sums, np.add, 0)
        self._counts = fold(self._counts, np.add, 0)
        self._lows = fold(self._lows, np.minimum, np.inf)
        self._highs = fold(self._highs, np.maximum, -np.inf)
        self._lasts = fold(self._lasts, np.maximum, -1)
        self._latest = fold(self._latest, lambda first, second: np.where(np.isnan(second), first, second), np.nan)
        self.width *= 2
        self.generation += 1

    def _forget_after(self, step: int) -> None:
        """A figure of which the step's own bucket holds later steps is forgotten there: its mean cannot be told apart from them."""
        if step == 0:
            self._clear_figures()
            return
        first = step // self.width + 1
        mixed = self._lasts[first - 1] > step
        for name, empty in _ARRAYS.items():
            array = getattr(self, name)
            array[first - 1, mixed] = array[first:] = empty
        self.step = step
        self.generation += 1

    def _add_event(self, row: dict) -> None:
        if not _is_event(row):
            return
        event, step, time = row["event"], row["step"], row.get("time")
        if type(time) in (int, float):
            self.time = float(time)
        self.events_version += 1
        if event == "decoded":
            self._add_decoded(row)
            return
        if event == "begin":
            if step < self.step:
                self._forget_after(step)
                self.decoded = deque((row for row in self.decoded if 0 < row["step"] <= step), maxlen=_MAX_DECODED)
            self.remaining_time.clear()
            self.alerts.clear()
            self.ended = None
            self.run = row["run"] if type(row.get("run")) is dict else {}
        elif event == "end":
            self.ended = str(row.get("how", "finished"))
        elif event == "alert":
            self.alerts[str(row.get("name"))] = row
        elif event == "alert_over":
            self.alerts.pop(str(row.get("name")), None)
        self.events.append(row)

    def _add_decoded(self, row: dict) -> None:
        self.decoded.append(row)
        shares = row.get("acceptance_by_slot")
        if type(shares) is list:
            names = tuple(f"decoded_slot_{slot}" for slot in range(1, len(shares) + 1))
            self._add_figures(("step", *names), [[row["step"], *shares]])

    # ---- The overview ----

    def write_overview(self) -> None:
        """Leaves what is known beside the log, for whoever opens it next."""
        with self._lock:
            with _open_plain_file(self.folder / RUN_LOG) as file:
                digest = _digest_before(file, self.offset)
            described = {
                "digest": digest,
                "num_buckets": self.num_buckets,
                "names": list(self._columns),
                "offset": self.offset,
                "width": self.width,
                "step": self.step,
                "time": self.time,
                "run": self.run,
                "ended": self.ended,
                "events_version": self.events_version,
                "events": list(self.events),
                "decoded": list(self.decoded),
                "alerts": self.alerts,
                "moments": self.remaining_time.moments(),
            }
            arrays = np.stack([getattr(self, name).astype(np.float64) for name in _ARRAYS])
        with replacing(self.folder / OVERVIEW, "wb") as file:
            file.write(json.dumps(described).encode() + b"\n" + arrays.tobytes())

    def _read_overview(self, log, log_size: int) -> None:
        try:
            with _open_plain_file(self.folder / OVERVIEW) as file:
                head, _, body = file.read(_MAX_OVERVIEW_BYTES).partition(b"\n")
            described = json.loads(head)
            names, offset = described["names"], described["offset"]
            shape = (len(_ARRAYS), self.num_buckets, len(names))
            is_ours = (
                described["num_buckets"] == self.num_buckets
                and len(names) <= _MAX_NAMES
                and 0 <= offset <= log_size
                and described["step"] // described["width"] < self.num_buckets
                and described["digest"] == _digest_before(log, offset)
            )
            if not is_ours:
                return
            arrays = np.frombuffer(body, dtype=np.float64).reshape(shape)
            for name, array in zip(_ARRAYS, arrays, strict=True):
                setattr(self, name, array.astype(np.int64 if name == "_counts" else np.float64))
            self._columns = {str(name): column for column, name in enumerate(names)}
            self.offset, self.width = int(offset), int(described["width"])
            self.step, self.time = int(described["step"]), float(described["time"])
            self.events_version = int(described["events_version"])
            self.run, self.ended = dict(described["run"]), described["ended"]
            self.alerts = {name: row for name, row in described["alerts"].items() if _is_event(row)}
            self.events.extend(row for row in described["events"] if _is_event(row))
            self.decoded.extend(row for row in described["decoded"] if _is_event(row))
            for step, time in described["moments"]:
                self.remaining_time.add(int(step), float(time))
            self.bytes_read += len(head) + len(body)
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
            self._clear()
            self._source = ("log", os.fstat(log.fileno()).st_ino)

    # ---- Showing ----

    def snapshot(self, generation: int = -1, first_bucket: int = 0, events_version: int = -1) -> dict:
        """
        What has changed for a page.

        Args:
            generation (`int`, *optional*), first_bucket (`int`, *optional*): what the page has: of this generation, all buckets
                before this one.
            events_version (`int`, *optional*): of the events that the page has.

        Returns:
            `dict`: `series` holds, for each name, float arrays `x` (the last step of a bucket), `y` (mean), and `low`, `high`
            where a bucket is wider than a step; of buckets from `first_bucket` on.
        """
        with self._lock:
            if generation != self.generation:
                first_bucket = 0
            first_bucket = min(max(0, first_bucket), self.num_buckets)
            series, latest = {}, {}
            for name, column in self._columns.items():
                (filled,) = self._counts[:, column].nonzero()
                if not len(filled):
                    continue
                latest[name] = self._latest[filled[-1], column]
                here = filled[filled >= first_bucket]
                if len(here):
                    series[name] = {
                        "x": self._lasts[here, column].astype(np.int64),
                        "y": (self._sums[here, column] / self._counts[here, column]).astype(np.float32),
                    }
                    if self.width > 1:
                        series[name]["low"] = self._lows[here, column].astype(np.float32)
                        series[name]["high"] = self._highs[here, column].astype(np.float32)
            max_steps = self.run.get("max_steps")
            remaining = None
            if type(max_steps) is int and max_steps > self.step and self.ended is None:
                remaining = self.remaining_time.estimate(max_steps - self.step)
            shown = {
                "name": str(self.run.get("name") or self.folder.absolute().name),
                "run": self.run,
                "step": self.step,
                "max_steps": max_steps if type(max_steps) is int else None,
                "time": self.time,
                "ended": self.ended,
                "remaining": None if remaining is None else [remaining.seconds, remaining.low, remaining.high],
                "read": [self.offset, self.size],
                "generation": self.generation,
                "first_bucket": first_bucket,
                "width": self.width,
                "next_bucket": self.step // self.width,
                "series": series,
                "latest": latest,
                "alerts": list(self.alerts.values()),
                "events_version": self.events_version,
            }
            if events_version != self.events_version:
                shown |= {"events": list(self.events), "decoded": list(self.decoded)}
            return shown


def _is_event(row) -> bool:
    if type(row) is not dict or type(row.get("event")) is not str:
        return False
    return type(row.get("step")) is int and 0 <= row["step"] < _MAX_STEP


def _digest_before(file, offset: int) -> str:
    """Of the bytes that come before a place in a file."""
    first = max(0, offset - _CHECKED_BYTES)
    file.seek(first)
    return hashlib.sha256(file.read(offset - first)).hexdigest()


def _to_float(value) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else float("nan")


def _open_plain_file(path: Path):
    """A file and no link: a folder that was copied from elsewhere must not show others.

    Raises:
        `FileNotFoundError`: if there is no such file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise FileNotFoundError(f"{path}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return open(descriptor, "rb", buffering=0)
