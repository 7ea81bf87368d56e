# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One run at a time in an `output_dir`: two would mix their logs, and each would delete the other's checkpoints.

The lock is the system's (flock) and goes with the process, however that ends: nothing stale is left to be cleared away.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers.utils import logging

from ..atomic_files import lock_file, missing_folders, remove_empty
from .host_group import HostGroup


logger = logging.get_logger(__name__)

# Hidden, so nothing uploads it, and gone when the run has ended. A killed one leaves the file, but not the lock.
LOCK_FILE = ".run.lock"

# What this process holds. It may come in twice: `hf-dflash train` holds the folder for longer than `train` does.
_held: dict[Path, IO] = {}

# A forked process holds nothing: its copies of the files are closed.
os.register_at_fork(after_in_child=_held.clear)


@contextmanager
def only_run_in(folder: str | os.PathLike, group: HostGroup) -> Iterator[None]:
    """
    Keeps the runs of other processes out of a folder. Folders that were made for the lock and into which nothing was put are
    taken away again.

    Args:
        folder (`str` or `os.PathLike`): the run's `output_dir`.
        group ([`HostGroup`]): the run's processes. All of them come here; the first one takes the lock.

    Raises:
        `ValueError`: on all of them, if another run has the folder.
    """
    folder = Path(folder).resolve()
    is_ours_already = folder in _held
    made = missing_folders(folder)
    try:
        group.on_first_rank(lambda: _take(folder))
        yield
    finally:
        if not is_ours_already and folder in _held:
            _give_back(folder, made)


def _take(folder: Path) -> None:
    if folder in _held:
        return
    try:
        lock = lock_file(folder / LOCK_FILE, lambda holder: _refuse(folder, holder))
    except OSError as error:
        # Not every file system has locks. Where nothing can be written at all, whoever has to write says so.
        logger.warning_once(f"{folder} cannot be locked, so nothing keeps a second run out of it. {error}")
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    _held[folder] = lock


def _refuse(folder: Path, holder: str) -> str:
    return (
        f"{folder} belongs to a run that has not ended: {holder or 'a process that has just begun'}. Wait for it, or stop it with "
        "`kill`, upon which it saves a checkpoint, or give this run another `--output_dir`."
    )


def _give_back(folder: Path, made: list[Path]) -> None:
    with _held.pop(folder):
        (folder / LOCK_FILE).unlink(missing_ok=True)
    remove_empty(made)
