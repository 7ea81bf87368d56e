# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which checkpoints are whole, which is the last one, and which may go.

`dflash_checkpoint.json` is written into a checkpoint after everything else has reached the disk. It lists the files, and
holds the contract (resume_contract.py) under which the run may go on, and names the checkpoints of later steps that the run
left behind by going back to an earlier one. A folder without it, with an empty one, or with a file missing or shorter than
listed, was being written or copied when its machine died.
"""

import json
import os
import re
import shutil
import uuid
from fnmatch import fnmatch
from pathlib import Path

from ..atomic_files import write_json


CHECKPOINT_FILE = "dflash_checkpoint.json"

# Rewritten in place (atomically) when an evaluation behind the save adds to it, so its size is not held against it.
TRAINER_STATE = "trainer_state.json"

_NAME = re.compile(r"checkpoint-(\d+)")


def mark_whole(folder: str | os.PathLike, contract: dict) -> None:
    """Declares a checkpoint whole, once all of it is on the disk.

    Args:
        folder (`str` or `os.PathLike`): the checkpoint, to which nobody writes any more.
        contract (`dict`): of [`describe_run`].
    """
    folder = Path(folder)
    sizes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKPOINT_FILE:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(folder).as_posix()
            sizes[name] = None if name == TRAINER_STATE else path.stat().st_size
    # The same step may be saved twice, by a run that went on from before it: copies tell both saves apart by their number.
    content = {"contract": contract, "files": sizes, "save": uuid.uuid4().hex}
    later = [path for path in list_checkpoints(folder.parent) if _step(path) > _step(folder)]
    if later:
        content["left_behind"] = [_identity(path) for path in later]
    write_json(folder / CHECKPOINT_FILE, content)


def _read(folder: Path) -> dict:
    """What a checkpoint says of itself; nothing if it is not whole yet."""
    try:
        return json.loads((folder / CHECKPOINT_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


def _identity(folder: Path) -> str:
    """Of this save of a checkpoint; those of earlier releases have no number, only their name."""
    return _read(folder).get("save", folder.name)


def is_whole(folder: str | os.PathLike) -> bool:
    """Whether everything that was saved is there, at its full size."""
    folder = Path(folder)
    files = _read(folder).get("files")
    return files is not None and all(
        (folder / name).is_file() and size in (None, (folder / name).stat().st_size) for name, size in files.items()
    )


def check_whole(folder: str | os.PathLike) -> None:
    """Refuses to go on from half a checkpoint.

    Raises:
        `FileNotFoundError`: if there is no such folder.
        `ValueError`: if the checkpoint is not whole.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"There is no checkpoint {folder}.")
    if not is_whole(folder):
        raise ValueError(
            f"{folder} is no whole checkpoint: {CHECKPOINT_FILE} or a file that it lists is missing, so it was being written "
            "or copied when that stopped. Go on from an earlier one."
        )


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint of some step."""
    return _NAME.fullmatch(name) is not None


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """All folders `checkpoint-<step>`, whole or not, by step."""
    if not os.path.isdir(output_dir):
        return []
    found = [path for path in Path(output_dir).iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


def find_last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The whole checkpoint of the highest step, `None` if there is none. Those that a run left behind when it went back to
    an earlier one do not count once it has saved again."""
    whole = [path for path in list_checkpoints(output_dir) if is_whole(path)]
    left_behind = {identity for path in whole for identity in _read(path).get("left_behind", ())}
    return next((str(path) for path in reversed(whole) if _identity(path) not in left_behind), None)


def rotate_checkpoints(saved: str | os.PathLike, limit: int | None, best: str | None) -> None:
    """Deletes what is not needed: the oldest whole checkpoints beyond `limit`, and half ones of earlier runs.

    Args:
        saved (`str` or `os.PathLike`): the checkpoint that was just saved, among the others. Those of later steps are of a run
            that went back behind them: they go first.
        limit (`int`, *optional*): how many to keep; all by default. The one just saved and the best always stay.
        best (`str`, *optional*): the best checkpoint.
    """
    if limit is None or limit <= 0:
        return
    saved = Path(saved)
    checkpoints = list_checkpoints(saved.parent)
    # Sorted by step; the one just saved is the newest.
    now = checkpoints.index(saved) + 1
    checkpoints = checkpoints[now:] + checkpoints[:now]
    whole = [path for path in checkpoints if is_whole(path)]
    for path in checkpoints:
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)
    protected = {saved}
    if best is not None:
        protected |= {path for path in whole if path.name == Path(best).name}
    surplus = len(whole) - max(limit, len(protected))
    for path in [path for path in whole if path not in protected][: max(0, surplus)]:
        # First what makes it whole: a crash in the middle must not leave something that looks whole.
        (path / CHECKPOINT_FILE).unlink()
        shutil.rmtree(path, ignore_errors=True)


def link_folder(folder: str | os.PathLike, destination: Path, patterns: tuple[str, ...] = ("*",)) -> None:
    """Gives files a second name, which rotation cannot take away. Files of a checkpoint are replaced, never rewritten.

    Args:
        folder (`str` or `os.PathLike`): a checkpoint.
        destination (`Path`): where the links go; copies where the file system has no hard links.
        patterns (`tuple[str]`, *optional*): of the files, by their path in the folder; all by default.
    """
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or not any(fnmatch(name.as_posix(), pattern) for pattern in patterns):
            continue
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, destination / name)
        except OSError:
            shutil.copy2(path, destination / name)
