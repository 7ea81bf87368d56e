# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Files that are whole or not there, and folders that one process at a time writes."""

import fcntl
import json
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """
    Opens a file that takes the place of `path` at the end of the block: readers find the old content or the new one, also
    after a power cut. An exception leaves the old one.

    The process is in the name of the unfinished file (`NAME.PID.partial`), so that one left by a killed run is in nobody's way.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON at once, as [`replacing`] does."""
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def locked_folder(folder: Path, doing: str) -> Iterator[None]:
    """
    Makes a folder and keeps other processes out of it. The lock goes with the process, however that ends. Folders that were made
    here and into which nothing was put are taken away again.

    Args:
        folder (`Path`): holds a file `.lock` for now, and from now on if anything else is put into it.
        doing (`str`): what the folder is locked for, such as `"tokenizing into"`.

    Raises:
        `ValueError`: if another process has it.
    """
    made = missing_folders(folder)
    path = folder / ".lock"
    with lock_file(path, lambda _: f"Another process is {doing} {folder}."):
        try:
            yield
        finally:
            if folder.is_dir() and [item.name for item in folder.iterdir()] == [path.name]:
                path.unlink()
                remove_empty(made)


# What this process has locked. A lock lives until the last copy of its descriptor is closed, and a forked process may outlive this one.
_locked: weakref.WeakSet[IO] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_locked):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_file(path: Path, refuse: Callable[[str], str]) -> IO:
    """
    Opens a file, made with its folders if need be, and keeps other processes from doing the same until it is closed or this process
    has ended. Whoever takes it away does so before closing it.

    Args:
        path (`Path`): of the file.
        refuse (`Callable`): the message for whoever comes second, from what the holder has written into the file.

    Raises:
        `ValueError`: if another process has it.
        `OSError`: if it cannot be written, or the file system has no locks.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(path, "a+", encoding="utf-8")
        except FileNotFoundError:
            continue  # its holder has just taken the empty folder away
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                message = refuse(lock.read())
            raise ValueError(message) from None
        except OSError:
            lock.close()
            raise
        if _is_at(path, lock):
            _locked.add(lock)
            return lock
        lock.close()  # its holder has taken it away after it was opened here


def _is_at(path: Path, lock: IO) -> bool:
    # Not by the number of its links: some network file systems count none.
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def missing_folders(folder: Path) -> list[Path]:
    """A folder and those above it, as far as they are not there, the lowest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: list[Path]) -> None:
    """Takes folders away, the lowest first, up to one into which somebody has put something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            break
