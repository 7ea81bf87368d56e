# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
The folder that completions are written to: no row is lost or written twice, whenever the process is killed.

    manifest.json                      options and counts
    completions-00000.jsonl            a closed shard: it appears whole, and is then uploaded
    completions-00001.jsonl.partial    the open shard: a line for each row as it is answered
    failures.jsonl                     prompts without an answer in the latest run: id, reason, detail

After a kill the open shard goes on behind its last whole line. Prompts that failed are tried again by the next run.
"""

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hf_dflash.atomic_files import locked_folder, write_json
from hf_dflash.object_store import ObjectStore

from .on_policy import Reply
from .sources import FAILURES


FORMAT_VERSION = 1


class RepliesRefused(ValueError):
    """What the target writes is useless: the run was stopped before it makes more of it."""


@dataclass(frozen=True)
class ReplyLimits:
    """
    When to stop. A share is that among the latest `window` prompts, and is looked at from `min_rows` on.

    Args:
        max_empty_share (`float`, *optional*, defaults to 0.05):
            Replies with neither content nor reasoning nor a tool call.
        max_identical_share (`float`, *optional*, defaults to 0.2):
            Replies that are the same text as the most frequent one. Empty ones are counted apart.
        max_failed_share (`float`, *optional*, defaults to 0.5):
            Prompts that failed.
        window (`int`, *optional*, defaults to 2000):
            Prompts.
        min_rows (`int`, *optional*, defaults to 200):
            Prompts.
    """

    max_empty_share: float = 0.05
    max_identical_share: float = 0.2
    max_failed_share: float = 0.5
    window: int = 2000
    min_rows: int = 200

    def __post_init__(self):
        for name in ("max_empty_share", "max_identical_share", "max_failed_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], but is {getattr(self, name)}.")
        if not 1 <= self.min_rows <= self.window:
            raise ValueError(f"min_rows must be in [1, window={self.window}], but is {self.min_rows}.")


class ReplyWatch:
    """
    Looks at what comes back, and stops a run whose replies are useless.

    Args:
        limits ([`ReplyLimits`], *optional*):
            `None` stops never.
    """

    def __init__(self, limits: ReplyLimits | None):
        self.limits = limits
        self.counts = Counter(rows=0, failed=0, cut=0, empty=0, completion_tokens=0)
        self._window: deque[bytes] = deque()
        self._kinds: Counter[bytes] = Counter()

    def replied(self, reply: Reply) -> None:
        """
        Counts a reply.

        Raises:
            [`RepliesRefused`]: a limit is passed.
        """
        self.counts["cut"] += reply.is_cut
        self.counts["empty"] += reply.is_empty
        self.counts["completion_tokens"] += reply.num_tokens
        text = f"{reply.reasoning_content}\0{reply.content}\0{json.dumps(reply.tool_calls)}"
        self._see(
            b"empty" if reply.is_empty else hashlib.blake2b(text.encode(errors="replace"), digest_size=12).digest()
        )
        self._check(reply)

    def failed(self, reason: str) -> None:
        """
        Counts a prompt that got no answer.

        Raises:
            [`RepliesRefused`]: a limit is passed.
        """
        self.counts["failed"] += 1
        self._see(b"failed")
        limits = self.limits
        if limits and len(self._window) >= limits.min_rows:
            share = self._kinds[b"failed"] / len(self._window)
            if share > limits.max_failed_share:
                raise RepliesRefused(
                    f"{share:.1%} of the latest {len(self._window)} prompts failed (limit {limits.max_failed_share:.1%}),"
                    f" the last one because of: {reason}. failures.jsonl lists them; the next run tries them again."
                )

    def _see(self, kind: bytes) -> None:
        self._window.append(kind)
        self._kinds[kind] += 1
        if self.limits and len(self._window) > self.limits.window or not self.limits and len(self._window) > 1:
            oldest = self._window.popleft()
            self._kinds[oldest] -= 1
            if not self._kinds[oldest]:
                del self._kinds[oldest]

    def _check(self, reply: Reply) -> None:
        limits = self.limits
        if not limits or len(self._window) < limits.min_rows:
            return
        replies = len(self._window) - self._kinds[b"failed"]
        share = self._kinds[b"empty"] / replies
        if share > limits.max_empty_share:
            raise RepliesRefused(
                f"{share:.1%} of the latest {replies} replies are empty (limit {limits.max_empty_share:.1%}). Look at the "
                "chat template, the end-of-sequence ids and the length limit that the target is served with."
            )
        # Only the latest reply can have become too frequent.
        share = self._kinds[self._window[-1]] / replies
        if reply.is_empty or share <= limits.max_identical_share:
            return
        raise RepliesRefused(
            f"{share:.1%} of the latest {replies} replies are the same (limit {limits.max_identical_share:.1%}): "
            f"{(reply.content or reply.reasoning_content or json.dumps(reply.tool_calls))[:200]!r}."
        )


class CompletionFolder:
    """
    Completions on disk, and copied to S3 shard by shard. A context manager; only one process can have the folder open.

    Args:
        path (`str` or `os.PathLike`):
            The folder. It is created, or goes on if it holds a run with the same `options`.
        options (`dict`):
            What shaped the completions. JSON can write it.
        shard_rows (`int`, *optional*, defaults to 500):
            Rows of a shard.
        upload_to (`str`, *optional*):
            `s3://bucket/prefix`. If `path` is empty and a run is stored there, that run goes on.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        limits ([`ReplyLimits`], *optional*):
            When to stop. `None` stops never.
        on_shard (`Callable[[str], None]`, *optional*):
            Called with the name of each shard that was uploaded.

    Attributes:
        watch ([`ReplyWatch`]):
            The counts of this run.
        answered (`set[str]`):
            Ids of the rows that are in the folder.

    Raises:
        `ValueError`: the folder holds a run with other options, or something else, or is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        options: dict,
        *,
        shard_rows: int = 500,
        upload_to: str | None = None,
        endpoint_url: str | None = None,
        limits: ReplyLimits | None = ReplyLimits(),  # noqa: B008 (frozen)
        on_shard: Callable[[str], None] | None = None,
    ):
        if shard_rows < 1:
            raise ValueError(f"shard_rows must be at least 1, not {shard_rows}.")
        self.path = Path(path)
        self.options = json.loads(json.dumps(options))
        self.shard_rows = shard_rows
        self.upload_to = upload_to.rstrip("/") if upload_to else None
        self.watch = ReplyWatch(limits)
        self.answered: set[str] = set()
        self.totals = Counter(rows=0, cut=0, empty=0)
        self._store = ObjectStore(endpoint_url=endpoint_url) if upload_to else None
        self._on_shard = on_shard
        self._uploads: list[tuple[str, Future]] = []

    def __enter__(self):
        with ExitStack() as stack:
            stack.enter_context(locked_folder(self.path, "writing completions into"))
            self._uploader = ThreadPoolExecutor(1) if self._store else None
            self._start_or_resume()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, error_type, *_):
        self._open_shard.close()
        if self._rows_in_open_shard == 0:
            self._open_path.unlink()
        self._failures.close()
        if self._uploader is not None:
            # What is not uploaded when a run is stopped is uploaded by the next one.
            self._uploader.shutdown(wait=True, cancel_futures=error_type is not None)
        self._lock.close()

    # ---- write

    def add(self, row: dict, replies: list[Reply]) -> None:
        """
        Writes a row that is answered, and closes the shard if it is full.

        Raises:
            [`RepliesRefused`]: the replies pass a limit. The row is written nevertheless.
        """
        self._open_shard.write(_json_line(row))
        self._open_shard.flush()
        self.answered.add(row["id"])
        self._count(row)
        self.watch.counts["rows"] += 1
        self._rows_in_open_shard += 1
        if self._rows_in_open_shard >= self.shard_rows:
            self._close_shard()
        for reply in replies:
            self.watch.replied(reply)

    def fail(self, row_id: str | None, reason: str, detail: str, where: str | None = None) -> None:
        """
        Lists a prompt that got no answer.

        Args:
            row_id (`str`, *optional*):
                `None` if the row cannot be read so far.
            reason (`str`):
                One word, to count.
            detail (`str`):
                What exactly happened.
            where (`str`, *optional*):
                File and line.

        Raises:
            [`RepliesRefused`]: too many prompts fail.
        """
        entry = {"id": row_id, "reason": reason, "detail": detail[:2000]} | ({"where": where} if where else {})
        self._failures.write(_json_line(entry))
        self._failures.flush()
        self.watch.failed(f"{reason}: {detail[:200]}")

    def finish(self) -> dict:
        """
        Closes the last shard, waits for the uploads, and writes the counts into the manifest.

        Returns:
            `dict`: the manifest.

        Raises:
            `OSError`: a shard could not be uploaded. It is on disk, and the next run uploads it.
        """
        if self._rows_in_open_shard:
            self._close_shard()
        manifest = self._manifest("finished")
        if self._store:
            for name, upload in self._uploads:
                if (error := upload.exception()) is not None:
                    raise OSError(f"{name} is not uploaded: {error}. Run the same command again.") from error
            self._store.upload_file(self._failures_path, f"{self.upload_to}/{FAILURES}")
            self._store.upload_file(self._write_manifest(manifest), f"{self.upload_to}/manifest.json")
        else:
            self._write_manifest(manifest)
        return manifest

    def interrupt(self) -> dict:
        """Writes the counts of a run that is not over into the manifest, and returns it. The next run goes on."""
        manifest = self._manifest("running")
        self._write_manifest(manifest)
        return manifest

    def _count(self, row: dict) -> None:
        self.totals["rows"] += 1
        self.totals["cut"] += row.get("finish_reason") == "length"
        last = row["messages"][-1]
        self.totals["empty"] += Reply(
            last.get("content") or "", last.get("reasoning_content"), last.get("tool_calls")
        ).is_empty

    def _close_shard(self) -> None:
        os.fsync(self._open_shard.fileno())
        self._open_shard.close()
        shard = self._open_path.with_suffix("")
        os.replace(self._open_path, shard)
        self._upload(shard)
        self._open(self._number + 1)

    def _open(self, number: int) -> None:
        self._number = number
        self._open_path = self.path / f"completions-{number:05d}.jsonl.partial"
        self._open_shard: IO[bytes] = open(self._open_path, "ab")
        self._rows_in_open_shard = 0

    def _upload(self, shard: Path) -> None:
        if self._store is None:
            return

        def upload():
            self._store.upload_file(shard, f"{self.upload_to}/{shard.name}")
            if self._on_shard is not None:
                self._on_shard(shard.name)

        self._uploads.append((shard.name, self._uploader.submit(upload)))

    # ---- resume

    def _start_or_resume(self) -> None:
        manifest_path = self.path / "manifest.json"
        if self._store and not manifest_path.exists() and self._store.exists(f"{self.upload_to}/manifest.json"):
            # The manifest last: without it a fetch that was cut short is done again, or its rows would be answered twice.
            self._store.download_folder(self.upload_to, self.path, last=("manifest.json",))
        if manifest_path.exists():
            self._refuse_other_options(json.loads(manifest_path.read_text()))
        else:
            names = {item.name for item in self.path.iterdir() if not item.match("manifest.json.*.partial")} - {
                ".lock"
            }
            if names:
                raise ValueError(
                    f"{self.path} holds something else ({', '.join(sorted(names)[:3])}): choose an empty folder."
                )
            self._write_manifest(self._manifest("running"))

        shards = sorted(self.path.glob("completions-*.jsonl"))
        for shard in shards:
            self._take_rows(shard)
        self._open(int(shards[-1].stem.removeprefix("completions-")) + 1 if shards else 0)
        rows_before = self.totals["rows"]
        self._open_shard.truncate(self._take_rows(self._open_path, is_open=True))
        self._rows_in_open_shard = self.totals["rows"] - rows_before
        self._failures_path = self.path / FAILURES
        self._failures = open(self._failures_path, "wb")
        self._write_manifest(self._manifest("running"))
        if self._store:
            self._store.upload_file(manifest_path, f"{self.upload_to}/manifest.json")
            stored = {item.uri: item.size for item in self._store.list_objects(f"{self.upload_to}/completions-")}
            for shard in shards:
                if stored.get(f"{self.upload_to}/{shard.name}") != shard.stat().st_size:
                    self._upload(shard)
        if self._rows_in_open_shard >= self.shard_rows:
            self._close_shard()

    def _take_rows(self, path: Path, is_open: bool = False) -> int:
        """Notes the rows of a shard as answered. Returns the bytes of its whole lines: a kill may have cut the last one."""
        size = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if is_open and not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    self.answered.add(row["id"])
                    self._count(row)
                except (ValueError, LookupError, TypeError) as error:
                    raise ValueError(
                        f"{path}, line {number} is not a completion ({error}). Delete the file."
                    ) from None
                size += len(line)
        return size

    def _manifest(self, status: str) -> dict:
        return {
            "format_version": FORMAT_VERSION,
            "status": status,
            "options": self.options,
            "counts": {**self.totals, "failed": self.watch.counts["failed"]},
            "this_run": dict(self.watch.counts),
        }

    def _write_manifest(self, manifest: dict) -> Path:
        path = self.path / "manifest.json"
        write_json(path, manifest)
        return path

    def _refuse_other_options(self, earlier: dict) -> None:
        before, now = earlier.get("options", {}), self.options
        differences = [
            f"{name}: {before.get(name)!r}, now {now.get(name)!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if differences:
            raise ValueError(
                f"{self.path} holds completions that were made in another way:\n  "
                + "\n  ".join(differences)
                + "\nChoose another folder, delete this one, or go back to its options."
            )


def _json_line(value: dict) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        # Half a surrogate pair has no UTF-8; its escape is valid JSON.
        return json.dumps(value).encode() + b"\n"
