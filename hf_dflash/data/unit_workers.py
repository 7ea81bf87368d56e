# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Units of tokenizing, spread over processes.

This process is one of the workers: it tokenizes from the first moment, while the others import what they need (seconds),
and does not wait for them if it is done before. Who is free takes the next unit, whatever the others do; a worker that
ends, or whose run is killed, leaves nothing behind that another one waits for.
"""

import fcntl
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path

from .sources import digest_of
from .unit_tokenization import UnitTokenizer


# While only the others have work left: how often this process looks whether one of them still starts, in seconds.
_LOOK_EVERY = 0.2


def process_units(todo: list[int], arguments: tuple, num_workers: int) -> Iterator[tuple[int, int]]:
    """
    Does units of work in this process and `num_workers - 1` others.

    Args:
        todo (`list[int]`):
            Numbers of the units, in the order in which they are begun.
        arguments (`tuple`):
            Those of [`~data.unit_tokenization.UnitTokenizer`].
        num_workers (`int`):
            Processes, this one included.

    Yields:
        `tuple[int, int]`: a unit that is done and its number of samples, in the order in which units end.

    Raises:
        `RuntimeError`: another process ended with its work undone. What a unit raises is raised here too.
        `ValueError`: the tokenizer cannot be pickled.
    """
    # Of this dataset's runs: its folder is locked, so what one that was killed has left is nobody's.
    prefix = f"hf-dflash-{digest_of(os.path.realpath(arguments[0]))[:12]}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    if num_workers == 1:
        unit_tokenizer = UnitTokenizer(*arguments)
        for index in todo:
            yield index, unit_tokenizer.process(index)["samples"]
        return
    try:
        job = pickle.dumps((todo, arguments))
    except Exception as error:
        raise ValueError(
            f"This tokenizer cannot be handed to other processes ({error}): take one worker (`num_workers=1`)."
        ) from error
    threads_of_tokenizer = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            Path(folder, "job.pickle").write_bytes(job)
            del job
            Path(folder, "taken").touch()
            yield from _process_units_together(todo, arguments, num_workers - 1, folder)
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if threads_of_tokenizer is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = threads_of_tokenizer


def _process_units_together(todo, arguments, num_helpers, folder) -> Iterator[tuple[int, int]]:
    helpers = _Helpers(num_helpers, folder, type(arguments[2]).__module__)
    missing = set(todo)
    try:
        unit_tokenizer = UnitTokenizer(*arguments)
        for index in _take(folder, todo):
            samples = unit_tokenizer.process(index)["samples"]
            for done in [(index, samples), *helpers.reports(timeout=0)]:
                missing.discard(done[0])
                yield done
        while missing:
            for done in helpers.reports(timeout=_LOOK_EVERY):
                missing.discard(done[0])
                yield done
            if missing and helpers.have_ended():
                raise RuntimeError(f"Worker processes ended without a word; {len(missing)} units are not done.")
    finally:
        helpers.stop()


def _take(folder: str, todo: list[int]) -> Iterator[int]:
    """Units that no other process has taken, one by one. The file `taken` has a byte for each that is."""
    while True:
        try:
            taken = open(Path(folder, "taken"), "r+b")
        except FileNotFoundError:
            return  # the run is over
        with taken:
            fcntl.lockf(taken, fcntl.LOCK_EX)  # until the file is closed
            number = taken.seek(0, os.SEEK_END)
            if number == len(todo):
                return
            taken.write(b".")
        yield todo[number]


class _Helpers:
    """The other processes, as this one sees them: they start on their own and report each unit that they have done."""

    def __init__(self, number: int, folder: str, tokenizer_module: str):
        # A fork of this process could inherit locks of its threads (the tokenizer's, torch's, CUDA's). The fork server is
        # a fresh process that imports what workers need once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "datasets", tokenizer_module])
        self._processes: dict[Connection, multiprocessing.Process] = {}
        self._problem: BaseException | None = None
        self._is_over = threading.Event()
        # Starting a process waits for the fork server's imports, and nothing here waits for this thread.
        self._starter = threading.Thread(target=self._start, args=(number, folder), daemon=True)
        self._starter.start()

    def _start(self, number: int, folder: str) -> None:
        try:
            for _ in range(number):
                if self._is_over.is_set():
                    return
                reports, sender = self._context.Pipe(duplex=False)
                process = self._context.Process(target=_help, args=(folder, sender), daemon=True)
                process.start()
                sender.close()
                self._processes[reports] = process
        except Exception as error:
            self._problem = error

    def have_ended(self) -> bool:
        # In this order: the starter's last process is there before the starter ends.
        return not self._starter.is_alive() and not self._processes

    def reports(self, timeout: float) -> Iterator[tuple[int, int]]:
        """What the others have done since the last call; waits up to `timeout` seconds if that is nothing."""
        if self._problem is not None:
            raise self._problem
        while ready := wait(list(self._processes), timeout):
            timeout = 0
            for reports in ready:
                try:
                    report = reports.recv()
                except EOFError:
                    process = self._processes.pop(reports)
                    process.join()
                    if process.exitcode:
                        raise RuntimeError(
                            f"A worker process ended with status {process.exitcode}. {_advice(process.exitcode)}"
                        ) from None
                    continue
                if isinstance(report, Exception):
                    raise report
                yield report

    def stop(self) -> None:
        """Ends those that still work. One that is yet to start finds nothing to do."""
        self._is_over.set()
        processes = list(self._processes.values())
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _advice(status: int) -> str:
    if status < 0:
        memory = "The machine's memory may be too small for so many workers. " if status == -signal.SIGKILL else ""
        return f"{memory}Start again to go on with what is not done."
    # What a worker's own code raises is reported. This is from before it, when Python imports the script again.
    return 'What it printed says why; a script must tokenize under `if __name__ == "__main__":`, or with one worker.'


def _help(folder: str, reports: Connection) -> None:
    """What another process does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one gets it too, and ends this one
    try:
        job = Path(folder, "job.pickle").read_bytes()
    except FileNotFoundError:
        return  # the others were faster
    try:
        # A tokenizer that is unpickled leaves millions of small holes in the heap, over which later allocations scatter: its
        # own tokenizing then takes a fifth more time. In glibc a thread has a heap of its own, and takes the holes along.
        with ThreadPoolExecutor(1) as thread:
            todo, arguments = thread.submit(pickle.loads, job).result()
        del job
        unit_tokenizer = UnitTokenizer(*arguments)
        for index in _take(folder, todo):
            if not _send(reports, (index, unit_tokenizer.process(index)["samples"])):
                return
    except Exception as error:
        _send(reports, _portable(error))


def _send(reports: Connection, report) -> bool:
    """Whether somebody still listens: a run that was killed does not."""
    try:
        reports.send(report)
    except BrokenPipeError:
        return False
    return True


def _portable(error: Exception) -> Exception:
    """The exception as another process can have it, with where it was raised."""
    where = f"In a worker process:\n{traceback.format_exc()}"
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(where)
    return error
