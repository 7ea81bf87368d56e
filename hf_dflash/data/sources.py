# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Where completions come from: JSONL files (plain or .gz), folders, globs, `s3://` prefixes, Hub datasets.

Sources are listed in a fixed order and put into units of work of a few megabytes. A part of a file knows the number of
its first line, and gives the same rows wherever and however often it is read.
"""

import functools
import glob
import gzip
import hashlib
import json
import math
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hf_dflash.object_store import ObjectStore, is_object_uri

from .conversations import RowSkipped


SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
HUB_PREFIX = "hub://"
# What `hf-dflash generate` leaves beside completions: prompts without one. It is no source unless it is named itself.
FAILURES = "failures.jsonl"

# A unit of work is this share of what is left: large ones first, and small ones at the end, when not all workers have one.
# Thousands of units whatever there is would be as many files; a unit of a few hundred rows would wait for the disk more
# than it computes. (How many workers there are must not matter, or the result would depend on it.)
UNIT_SHARE = 1 / 256
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 2 * 2**20, 16 * 2**20
# Plain local files are cut into parts of this size, so that one large file keeps all workers busy; small files and objects
# are put together up to this size, and this many.
UNIT_PARTS = 64
# What a row of a Hub dataset counts for.
HUB_ROW_BYTES = 2048
# A longer line is not read into memory: it cannot be a conversation.
MAX_LINE_BYTES = 64 * 2**20

_READ_BYTES = 2**20


@dataclass(frozen=True)
class Source:
    """
    One file, object or dataset split.

    Args:
        uri (`str`):
            The path, `s3://bucket/key`, or `hub://name/config/split`.
        size (`int`):
            Bytes (rows for a Hub dataset).
        version (`str`):
            Tells a changed source: a digest of the content, the ETag of an object, the fingerprint of a dataset.
        modified (`int`):
            Nanoseconds; with the same size and time a file is not read again to compare digests. 0 if there is no such time.
    """

    uri: str
    size: int
    version: str
    modified: int = 0


@dataclass(frozen=True)
class Part:
    """
    A part of source number `source`: the lines that start at bytes `start` .. `end - 1`, the first of which is line
    `first_line` (from 1). For a Hub dataset, rows `start` .. `end - 1`.
    """

    source: int
    start: int
    end: int
    first_line: int


def list_sources(
    sources: str | os.PathLike | list[str | os.PathLike],
    *,
    endpoint_url: str | None = None,
    split: str = "train",
    known: Iterable[Source] = (),
) -> list[Source]:
    """
    Finds the files, objects and datasets that `sources` names, in a fixed order.

    Args:
        sources (`str` or `list[str]`):
            JSONL files, folders (searched for `.jsonl`, `.ndjson` and their `.gz`), globs, `s3://bucket/prefix`, or
            `hub://name` (also `hub://name/config`, and `hub://name#split`) for a dataset on the Hub.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a Hub dataset that names none.
        known (`Iterable[Source]`, *optional*, defaults to `()`):
            What is known from an earlier run: a file of the same size and modification time is not read again.

    Raises:
        `FileNotFoundError`: a source does not exist, or a folder, glob or prefix holds no JSONL file.
        `ValueError`: the same file twice, or a file whose name is not that of a JSONL file.
    """
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    if not sources:
        raise ValueError("There are no sources: give JSONL files, folders, globs, s3:// prefixes or hub:// datasets.")
    paths: list[Path] = []
    result: list[Source] = []
    for source in map(str, sources):
        if is_object_uri(source):
            result += _list_objects(source, endpoint_url)
        elif source.startswith(HUB_PREFIX):
            result.append(_describe_hub_dataset(source, split))
        else:
            paths += _list_files(source)
    known_files = {source.uri: source for source in known}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        result += pool.map(lambda path: _describe_file(path, known_files.get(str(path))), paths)

    places = Counter(os.path.realpath(source.uri) if os.path.exists(source.uri) else source.uri for source in result)
    twice = [place for place, count in places.items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is named twice among the sources.")
    return sorted(result, key=lambda source: source.uri)


def cut_into_units(sources: list[Source]) -> list[list[Part]]:
    """
    Cuts large sources into parts and puts small ones together: units of work that get smaller towards the end. Large plain
    files are read once, to find where their lines start.
    """
    units: list[list[Part]] = []
    left = sum(size_of(Part(index, 0, source.size, 1), sources) for index, source in enumerate(sources))
    size, most = 0, 0
    for index, source in enumerate(sources):
        if source.uri.startswith(HUB_PREFIX):
            starts = _hub_unit_starts(source, left)
        elif is_object_uri(source.uri) or source.uri.endswith(".gz"):
            starts = [(0, 1)]
        else:
            starts = _find_unit_starts(source, left)
        ends = [start for start, _ in starts[1:]] + [source.size]
        for (start, first_line), end in zip(starts, ends, strict=True):
            part = Part(index, start, end, first_line)
            part_size = size_of(part, sources)
            if not units or size + part_size > most or len(units[-1]) == UNIT_PARTS:
                units.append([])
                size, most = 0, _unit_bytes(left)
            units[-1].append(part)
            size += part_size
            left -= part_size
    return units


def size_of(part: Part, sources: list[Source]) -> int:
    """Bytes of a part, or what its rows count for."""
    return (part.end - part.start) * (HUB_ROW_BYTES if sources[part.source].uri.startswith(HUB_PREFIX) else 1)


def _unit_bytes(left: int) -> int:
    """Size of a unit, with so many bytes left."""
    return min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, int(left * UNIT_SHARE)))


def _hub_unit_starts(source: Source, left: int) -> list[tuple[int, int]]:
    starts = [(0, 1)]
    while True:
        start = starts[-1][0] + max(1, _unit_bytes(left - starts[-1][0] * HUB_ROW_BYTES) // HUB_ROW_BYTES)
        if start >= source.size:
            return starts
        starts.append((start, start + 1))


def _find_unit_starts(source: Source, left: int) -> list[tuple[int, int]]:
    """(First byte, line number of the first line) of each part of a plain file; `left` is from its start."""
    starts = [(0, 1)]
    if source.size <= _unit_bytes(left):
        return starts
    position, lines = 0, 1
    with open(source.uri, "rb") as file:
        while block := file.read(_READ_BYTES):
            searched = 0
            while True:
                start = starts[-1][0]
                enough = max(searched, start + _unit_bytes(left - start) - position)
                newline = block.find(b"\n", enough)
                if newline < 0 or position + newline + 1 >= source.size:
                    break
                searched = newline + 1
                starts.append((position + searched, lines + block.count(b"\n", 0, searched)))
            lines += block.count(b"\n")
            position += len(block)
    return starts


def _is_source(name: str) -> bool:
    return name.endswith(SUFFIXES) and name != FAILURES


def _list_files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_source(file.name) and file.is_file())
        if not files:
            raise FileNotFoundError(f"The folder {source} holds no file that ends with {', '.join(SUFFIXES)}.")
        return files
    if path.is_file():
        if not path.name.endswith((*SUFFIXES, ".json", ".gz")):
            raise ValueError(f"{source} is not named like a JSONL file ({', '.join(SUFFIXES)}).")
        return [path]
    names = [name for name in glob.glob(source, recursive=True) if os.path.isfile(name)]
    files = sorted(Path(name) for name in names if os.path.basename(name) != FAILURES)
    if not files:
        raise FileNotFoundError(
            f"There is no file, folder or glob match {source}. A dataset on the Hub is written {HUB_PREFIX}NAME."
        )
    return files


def _describe_file(path: Path, known: Source | None) -> Source:
    status = path.stat()
    if known is not None and (known.size, known.modified) == (status.st_size, status.st_mtime_ns):
        return known
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return Source(str(path), status.st_size, digest.hexdigest(), status.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _store(endpoint_url: str | None) -> ObjectStore:
    return ObjectStore(endpoint_url=endpoint_url)


def _list_objects(uri: str, endpoint_url: str | None) -> list[Source]:
    listed = _store(endpoint_url).list_objects(uri)
    objects = [item for item in listed if item.uri == uri or _is_source(item.uri.rpartition("/")[2])]
    if not objects:
        raise FileNotFoundError(f"{uri} holds no object that ends with {', '.join(SUFFIXES)}.")
    return [Source(item.uri, item.size, item.etag) for item in objects]


def _describe_hub_dataset(uri: str, split: str) -> Source:
    uri = uri if "#" in uri else f"{uri}#{split}"
    dataset = load_hub_dataset(uri)
    return Source(uri, len(dataset), dataset._fingerprint)


@functools.lru_cache(maxsize=1)
def load_hub_dataset(uri: str):
    """Loads `hub://name[/config]#split`, from the Hub or its local cache (or a local folder of data files)."""
    try:
        import datasets
    except ImportError:
        raise ImportError("Hub datasets need the package datasets: pip install 'hf-dflash[data]'") from None
    name, split = uri.removeprefix(HUB_PREFIX).rsplit("#", 1)
    config = None
    if not os.path.isdir(name) and name.count("/") == 2:
        name, config = name.rsplit("/", 1)
    return datasets.load_dataset(name, config, split=split)


def read_rows(source: Source, part: Part, *, endpoint_url: str | None = None) -> Iterator[tuple[int, bytes | dict]]:
    """
    Reads the rows of a part of a source.

    Yields:
        `tuple[int, bytes | dict]`: line number (from 1), and the line without its line end: bytes, cut to
        `MAX_LINE_BYTES + 1` if it is longer. For a Hub dataset, row number (from 1) and row.
    """
    if source.uri.startswith(HUB_PREFIX):
        dataset = load_hub_dataset(source.uri)
        for row in range(part.start, part.end):
            columns = dataset[row].items()
            yield row + 1, {name: _without_fillers(value, dataset.features[name], True) for name, value in columns}
        return
    with open_jsonl(source.uri, endpoint_url=endpoint_url) as file:
        if part.start:
            file.seek(part.start)
        # An object or a compressed file is one part. Its size is not that of the text in it, so it is read to its end.
        end = math.inf if is_object_uri(source.uri) or source.uri.endswith(".gz") else part.end
        position, number = part.start, part.first_line
        while position < end:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            position += len(line)
            if len(line) > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (rest := file.readline(_READ_BYTES)):
                    position += len(rest)
                    if rest.endswith(b"\n"):
                        break
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield number, line.rstrip(b"\r\n")
            number += 1


def _without_fillers(value, feature, is_column: bool = False):
    """
    A column of structs has every key in every row, with `None` for those that a row lacks: a chat template would print them in
    tools and in the arguments of their calls. Those of messages stay, for `content` may be `None`.
    """
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _without_fillers(part, feature[key]) for key, part in value.items() if part is not None}
    item = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if not isinstance(value, list) or not isinstance(item, dict):
        return value
    if is_column and not item.keys().isdisjoint(("role", "from")):
        messages = ({} if message is None else message for message in value)
        return [{key: _without_fillers(part, item[key]) for key, part in message.items()} for message in messages]
    return [_without_fillers(part, item) for part in value]


def read_all_rows(sources: list[Source], *, endpoint_url: str | None = None) -> Iterator[tuple[str, bytes | dict]]:
    """
    Reads the rows of all sources in order, without the blank lines.

    Yields:
        `tuple[str, bytes | dict]`: where the row is, as `uri:line`, and the row as of [`read_rows`].
    """
    for parts in cut_into_units(sources):
        for part in parts:
            source = sources[part.source]
            for line, content in read_rows(source, part, endpoint_url=endpoint_url):
                if not isinstance(content, bytes) or content.strip():
                    yield f"{source.uri}:{line}", content


def open_jsonl(uri: str | os.PathLike, *, endpoint_url: str | None = None) -> IO[bytes]:
    """Opens a file or an object to read its lines; they are decompressed if its name ends with `.gz`."""
    is_compressed = str(uri).endswith(".gz")
    if not is_object_uri(uri):
        return _CompressedLines(uri, "rb") if is_compressed else open(uri, "rb")
    file = tempfile.TemporaryFile()
    _store(endpoint_url).download_to(uri, file)
    file.seek(0)
    return _CompressedLines(uri, "rb", fileobj=file) if is_compressed else file


class _CompressedLines(gzip.GzipFile):
    """Names a file that is damaged, or was copied while it was written."""

    def readline(self, size: int | None = -1) -> bytes:
        try:
            return super().readline(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{self.name} is damaged or not all there: {error}. Copy it or compress it again."
            ) from None


def digest_of(value) -> str:
    """A short digest of anything that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def parse_line(line: bytes | dict) -> dict:
    """
    The JSON of one line.

    Raises:
        [`~data.conversations.RowSkipped`]: the line is not JSON, or holds what no tokenizer can take.
    """
    if isinstance(line, dict):
        return line
    if len(line) > MAX_LINE_BYTES:
        raise RowSkipped("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    if b"\0" in line:
        raise RowSkipped("nul_byte")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowSkipped("bad_utf8", f"byte {error.start + 1} of the line") from None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowSkipped("bad_json", str(error)[:200]) from None
    # Half a surrogate pair can only come from an escape.
    if _SURROGATE_ESCAPE.search(line):
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise RowSkipped("lone_surrogate") from None
    return row


_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
