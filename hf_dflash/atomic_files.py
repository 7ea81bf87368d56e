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
    Makes a folder and keeps other processes out of it. The lock goes with the process, however that ends.

    Args:
        folder (`Path`): holds a file `.lock` from now on.
        doing (`str`): what the folder is locked for, such as `"tokenizing into"`.

    Raises:
        `ValueError`: if another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Another process is {doing} {folder}.") from None
        yield
