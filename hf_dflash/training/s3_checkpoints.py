# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Checkpoints on S3: copied in the background while training goes on, fetched when a run goes on elsewhere."""

import os
import queue
import shutil
import threading
import time
from itertools import chain, count
from pathlib import Path

from transformers import TrainerCallback
from transformers.utils import logging

from ..atomic_files import replacing
from ..monitor.run_log import RUN_LOG
from ..object_store import ObjectStore
from .checkpoint import CHECKPOINT_FILE, check_whole, is_checkpoint_name, is_whole, link_folder
from .uploads import Uploads


logger = logging.get_logger(__name__)

# Links to checkpoints that wait for their upload. Hidden: nothing else looks for checkpoints there.
_STAGING = ".s3_uploads"


class S3Callback(TrainerCallback):
    """
    Copies each checkpoint, with the run log up to it, to `<uri>/checkpoint-<step>`, then points `<uri>/latest.json` at it.

    Training does not wait: a thread uploads hard links, which rotation cannot take away. A failed upload is tried again, and
    at last reported; it never stops training. What a killed run left waiting is uploaded when it goes on.

    Args:
        uri (`str`): `s3://bucket/prefix`.
        store ([`ObjectStore`], *optional*): the service; boto3's own choice by default.
        attempts (`int`, *optional*, defaults to 3): of a whole checkpoint; each request is retried within.
        seconds_between (`float`, *optional*, defaults to 30): before the second attempt, twice as long before each further.
        uploads ([`Uploads`], *optional*): is told what is under way.
    """

    def __init__(
        self,
        uri: str,
        *,
        store: ObjectStore | None = None,
        attempts: int = 3,
        seconds_between: float = 30,
        uploads: Uploads | None = None,
    ):
        self.uri, self.attempts, self.seconds_between = uri.rstrip("/"), attempts, seconds_between
        self.store = store if store is not None else ObjectStore()
        self.uploads = uploads if uploads is not None else Uploads()
        self.failed: dict[str, str] = {}
        self._waiting: queue.Queue[tuple[Path, bool] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self._thread = threading.Thread(
            target=self._upload_all, args=(state.global_step == 0,), name="checkpoints to S3", daemon=True
        )
        self._thread.start()
        for staged in sorted(Path(args.output_dir, _STAGING).glob("*/checkpoint-*")):
            if is_whole(staged):
                self._hand_over(staged, is_left_over=True)
            else:
                shutil.rmtree(staged.parent)

    def on_save(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        name = f"checkpoint-{state.global_step}"
        # A folder for each save, in their order: the same step is saved again when an evaluation adds to it.
        staged = Path(args.output_dir, _STAGING, f"{time.time_ns():020}", name)
        if args.run_log:
            _copy_run_log(args.output_dir, staged)
        # Last: what is left of a save that was cut short must not look whole.
        link_folder(Path(args.output_dir, name), staged)
        self._hand_over(staged, is_left_over=False)

    def on_train_end(self, args, state, control, **kwargs):
        """Waits for what is under way, and says what has not arrived."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join()
        self._thread = None
        for name, error in self.failed.items():
            logger.error(f"{name} is not on {self.uri}: {error} It is still in {args.output_dir}.")

    def _hand_over(self, staged: Path, is_left_over: bool) -> None:
        self.uploads.begin(staged.name, "S3")
        self._waiting.put((staged, is_left_over))

    def _upload_all(self, is_new: bool) -> None:
        self._look_ahead(is_new)
        while (waiting := self._waiting.get()) is not None:
            staged, is_left_over = waiting
            error = self._upload(staged, is_left_over)
            self.uploads.end(staged.name, "S3", error)
            if error is None:
                shutil.rmtree(staged.parent, ignore_errors=True)
                self.failed.pop(staged.name, None)
            else:
                self.failed[staged.name] = error
                logger.warning(f"{staged.name} could not be copied to {self.uri}; training goes on. {error}")

    def _look_ahead(self, is_new: bool) -> None:
        """Says at once, not hours later at the first checkpoint, that there is no answer, or that another run is there."""
        try:
            others = self.store.list_objects(f"{self.uri}/checkpoint-")
        except Exception as error:  # noqa: BLE001 - neither does this end training
            logger.warning(f"{self.uri} cannot be read, so checkpoints may not arrive there. {error}")
            return
        if is_new and others:
            logger.warning(
                f"{self.uri} has checkpoints already, and this run begins anew: it will replace those of the same steps. Give each "
                "run a `--checkpoint_uri` of its own, or go on from there with `--resume_from_checkpoint`."
            )

    def _upload(self, staged: Path, is_left_over: bool) -> str | None:
        """Uploads one checkpoint; what went wrong in the last attempt, if it failed.

        One that an earlier run left over may be older than what is there: then the pointer stays.
        """
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.seconds_between * 2 ** (attempt - 1))
            try:
                self.store.upload_folder(staged, f"{self.uri}/{staged.name}", last=(CHECKPOINT_FILE,))
                latest = self.store.read_latest(self.uri) if is_left_over else None
                if latest is None or _step(latest) < _step(staged.name):
                    self.store.write_latest(self.uri, staged.name)
                return None
            except Exception as error:  # noqa: BLE001 - a copy that fails, for whatever reason, must not end training
                problem = f"{type(error).__name__}: {error}"
        return problem


def _step(checkpoint: str) -> int:
    return int(checkpoint.rpartition("-")[2])


def _copy_run_log(output_dir: str, staged: Path) -> None:
    """A copy, for the log goes on growing where a link would show it; without the line that is being written."""
    try:
        staged.mkdir(parents=True)
        with open(Path(output_dir, RUN_LOG), "rb") as log, open(staged / RUN_LOG, "wb") as copied:
            copied.writelines(line for line in log if line.endswith(b"\n"))
    except OSError as error:
        (staged / RUN_LOG).unlink(missing_ok=True)
        logger.warning_once(f"{staged.name} goes to S3 without the run log. {error}")


def check_can_upload(uri: str) -> None:
    """
    Refuses a place to which no checkpoint could ever be copied: a run would go on for days without one. A store that gives no
    answer is none of these, for it may be reached later; [`S3Callback`] says that, and tries for longer.

    Args:
        uri (`str`): `--checkpoint_uri`.

    Raises:
        `FileNotFoundError`: if there is no such bucket.
        `PermissionError`: if there are no credentials, or they may not list, read and write there.
    """
    # The run waits for this.
    store = ObjectStore(max_attempts=2, timeout=10)
    try:
        store.check_access(f"{uri.rstrip('/')}/checkpoint-")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`--checkpoint_uri {uri}`: create the bucket, or name another one. {error}"
        ) from error
    except PermissionError as error:
        raise PermissionError(
            f"`--checkpoint_uri {uri}`: give credentials that may list, read and write there (s3:ListBucket, s3:GetObject, "
            f"s3:PutObject). {error}"
        ) from error
    except OSError:
        pass


def locate_checkpoint(uri: str, store: ObjectStore | None = None) -> str:
    """The URI of a checkpoint, of the latest one if `uri` is what checkpoints are below.

    Raises:
        `FileNotFoundError`: if there is no such checkpoint.
    """
    store = store if store is not None else ObjectStore()
    uri = uri.rstrip("/")
    if not is_checkpoint_name(uri.rpartition("/")[2]):
        latest = store.read_latest(uri)
        if latest is None:
            raise FileNotFoundError(f"There is no checkpoint below {uri}: it has no latest.json.")
        uri = latest
    marker = f"{uri}/{CHECKPOINT_FILE}"
    if not store.exists(marker) or not store.read(marker):
        raise FileNotFoundError(
            f"There is no whole checkpoint {uri}: its {CHECKPOINT_FILE} is missing or empty, so its upload did not end."
        )
    return uri


def fetch_checkpoint(uri: str, output_dir: str | os.PathLike, store: ObjectStore | None = None) -> str:
    """Downloads a checkpoint to go on from; what is already there with the same content is not fetched again.

    The run log that came with it becomes the folder's, unless that has it already. Another log there is renamed.

    Args:
        uri (`str`): `s3://bucket/prefix/checkpoint-<step>`, or `s3://bucket/prefix` for the latest one below it.
        output_dir (`str` or `os.PathLike`): the run's folder.
        store ([`ObjectStore`], *optional*): the service.

    Returns:
        `str`: the folder `output_dir/checkpoint-<step>`.

    Raises:
        `FileNotFoundError`: if there is no such checkpoint.
    """
    store = store if store is not None else ObjectStore()
    uri = locate_checkpoint(uri, store)
    folder = os.path.join(output_dir, uri.rpartition("/")[2])
    store.download_folder(uri, folder, last=(CHECKPOINT_FILE,))
    check_whole(folder)
    _take_over_run_log(Path(folder), Path(output_dir))
    return folder


def _take_over_run_log(checkpoint: Path, output_dir: Path) -> None:
    fetched, log = checkpoint / RUN_LOG, output_dir / RUN_LOG
    if not fetched.is_file():
        return
    if log.is_file():
        if _is_beginning(fetched, log):
            return
        if not _is_beginning(log, fetched):
            other = _unused(log.with_name(f"run_log.before_{checkpoint.name}.jsonl"))
            os.replace(log, other)
            logger.warning(f"{log} was not of the run that goes on from {checkpoint.name}: it is {other.name} now.")
    # Not a link: what is appended would change the checkpoint's.
    with open(fetched, "rb") as source, replacing(log, "wb") as file:
        shutil.copyfileobj(source, file)


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(2))
    return next(name for name in chain([path], numbered) if not name.exists())


def _is_beginning(path: Path, of: Path) -> bool:
    """Whether one file begins with all that another holds."""
    with open(path, "rb") as short, open(of, "rb") as long:
        while block := short.read(1 << 20):
            if long.read(len(block)) != block:
                return False
    return True
