# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Files that are whole or not there, and folders that one process at a time writes."""

import fcntl
import json
import os
from collections.abc import Iterator
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
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / ".lock"
    with _lock(path, doing):
        try:
            yield
        finally:
            if folder.is_dir() and [item.name for item in folder.iterdir()] == [path.name]:
                path.unlink()
                for empty in made:
                    try:
                        empty.rmdir()
                    except OSError:
                        break  # somebody has put something into it meanwhile


def _lock(path: Path, doing: str) -> IO:
    """The lock file, open and locked."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(path, "w")
        except FileNotFoundError:
            continue  # its holder has just taken the empty folder away
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"Another process is {doing} {path.parent}.") from None
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()  # its holder has taken it away after it was opened here
