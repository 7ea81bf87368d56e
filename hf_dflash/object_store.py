# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
S3, and what speaks its protocol: list, download, upload whole folders, and a pointer to the latest one.

Credentials come from boto3's own chain (environment, shared files, instance role); they are neither taken as arguments nor
logged here. Failed requests are retried with back-off by botocore; transfers of large objects are multipart.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .atomic_files import replacing


MULTIPART_BYTES = 16 * 2**20

# An object's SHA-256 is stored with it, because an ETag is no digest of the content once an upload has several parts.
_DIGEST_KEY = "sha256"


def is_object_uri(uri: str | os.PathLike) -> bool:
    """Whether `uri` names an object or prefix (`s3://…`), not a path."""
    return str(uri).startswith("s3://")


def split_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/some/key` -> `("bucket", "some/key")`."""
    if not is_object_uri(uri):
        raise ValueError(f"{uri} is not of the form s3://bucket/key.")
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise ValueError(f"{uri} has no bucket: write s3://bucket/key.")
    return bucket, key


@dataclass(frozen=True)
class StoredObject:
    """
    An object as a listing shows it.

    Args:
        uri (`str`):
            `s3://bucket/key`.
        size (`int`):
            Bytes.
        etag (`str`):
            Changes with the content.
    """

    uri: str
    size: int
    etag: str


class ObjectStore:
    """
    One S3 endpoint.

    Args:
        endpoint_url (`str`, *optional*):
            Address of the service. By default boto3's own choice (`AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, Amazon).
        max_attempts (`int`, *optional*, defaults to 8):
            How often a request is tried, with exponential back-off between.
        timeout (`float`, *optional*, defaults to 60):
            Seconds to wait for a connection, and then for each answer.
        concurrency (`int`, *optional*, defaults to 8):
            Objects (and parts of a large object) that are transferred at the same time.
        dry_run (`bool`, *optional*, defaults to `False`):
            If `True`, nothing is written to the store; `report` is told what would be.
        report (`Callable[[str], None]`, *optional*, defaults to `print`):
            Takes the lines of a dry run.

    Raises:
        `ImportError`: boto3 is not installed.
    """

    def __init__(
        self,
        *,
        endpoint_url: str | None = None,
        max_attempts: int = 8,
        timeout: float = 60,
        concurrency: int = 8,
        dry_run: bool = False,
        report: Callable[[str], None] = print,
    ):
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
            from botocore.config import Config
        except ImportError:
            raise ImportError("s3:// needs the package boto3: pip install 'hf-dflash[s3]'") from None

        self.dry_run = dry_run
        self.report = report
        self.concurrency = concurrency
        # A session of its own: boto3's default one is shared, keeps the credentials it found first, and is not thread-safe.
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url,
            config=Config(
                retries={"mode": "standard", "total_max_attempts": max_attempts},
                connect_timeout=timeout,
                read_timeout=timeout,
                max_pool_connections=2 * concurrency,
            ),
        )
        self._transfer = TransferConfig(
            multipart_threshold=MULTIPART_BYTES, multipart_chunksize=MULTIPART_BYTES, max_concurrency=concurrency
        )

    # ---- read

    def list_objects(self, uri: str) -> list[StoredObject]:
        """All objects whose URI starts with `uri`, in the order of their keys."""
        bucket, prefix = split_uri(uri)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        with _named_errors(uri):
            return [
                StoredObject(f"s3://{bucket}/{item['Key']}", item["Size"], item["ETag"].strip('"'))
                for page in pages
                for item in page.get("Contents", [])
                if not item["Key"].endswith("/")
            ]

    def exists(self, uri: str) -> bool:
        """Whether there is an object of exactly this URI."""
        return self._head(uri) is not None

    def read(self, uri: str) -> bytes:
        """The content of a small object."""
        bucket, key = split_uri(uri)
        with _named_errors(uri):
            return self._client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def download_to(self, uri: str, file: IO[bytes]) -> None:
        """
        Writes the content of an object into an open file (`"w+b"`), and checks its size and SHA-256.

        Raises:
            `FileNotFoundError`: there is no such object.
            `OSError`: the content is not what was uploaded.
        """
        with _named_errors(uri):
            size, expected = self._get_into(*split_uri(uri), file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if file.tell() != size or expected not in (None, digest):
            raise OSError(f"{uri} was damaged on the way: its size or SHA-256 is not that of the object. Try again.")

    def _get_into(self, bucket: str, key: str, file: IO[bytes]) -> tuple[int, str | None]:
        """Gets an object, in one request if it is small; returns its size and its SHA-256 if that is stored with it."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        attempts = 5
        while True:
            response = self._client.get_object(Bucket=bucket, Key=key)
            size, digest = response["ContentLength"], response["Metadata"].get(_DIGEST_KEY)
            if size > MULTIPART_BYTES:
                response["Body"].close()
                self._client.download_fileobj(bucket, key, file, Config=self._transfer)
                return size, digest
            attempts -= 1
            try:
                file.write(response["Body"].read())
                return size, digest
            except (HTTPClientError, IncompleteReadError):
                # botocore repeats requests, but not the reading of their answers.
                if attempts == 0:
                    raise

    def download_file(self, uri: str, path: str | os.PathLike) -> None:
        """Downloads an object. The file appears when it is whole."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, "w+b") as file:
            self.download_to(uri, file)

    def download_folder(self, uri: str, folder: str | os.PathLike, *, last: tuple[str, ...] = ()) -> int:
        """
        Downloads all objects under `uri` into `folder`; a file that is there with the same content is left alone.

        Args:
            uri (`str`):
                `s3://bucket/prefix`.
            folder (`str` or `os.PathLike`):
                Where to.
            last (`tuple[str, ...]`, *optional*, defaults to `()`):
                Objects (relative to `uri`) to download when all others are there: their presence says that the rest is. Older
                ones in `folder` are taken away before anything is replaced.

        Returns:
            `int`: the number of objects that were downloaded.

        Raises:
            `FileNotFoundError`: there is nothing under `uri`.
            `ValueError`: an object's key would leave the folder.
        """
        prefix = uri.rstrip("/") + "/"
        objects = self.list_objects(prefix)
        if not objects:
            raise FileNotFoundError(f"There is nothing under {prefix}.")
        folder = Path(folder)
        names = [item.uri.removeprefix(prefix) for item in objects]
        for name in names:
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{prefix}{name} would be written outside {folder}.")

        def download(name: str) -> bool:
            path = folder / name
            if path.is_file() and self._is_stored(path, f"{prefix}{name}"):
                return False
            self.download_file(f"{prefix}{name}", path)
            return True

        for name in last:
            path = folder / name
            if name in names and path.is_file() and not self._is_stored(path, f"{prefix}{name}"):
                path.unlink(missing_ok=True)
        with ThreadPoolExecutor(self.concurrency) as pool:
            count = sum(pool.map(download, [name for name in names if name not in last]))
        return count + sum(download(name) for name in last if name in names)

    # ---- write

    def write(self, uri: str, content: bytes) -> None:
        """Writes a small object, at once: readers see the old content or the new one."""
        if self.dry_run:
            self.report(f"would write {uri} ({len(content)} bytes)")
            return
        bucket, key = split_uri(uri)
        metadata = {_DIGEST_KEY: hashlib.sha256(content).hexdigest()}
        with _named_errors(uri):
            self._client.put_object(Bucket=bucket, Key=key, Body=content, Metadata=metadata)

    def upload_file(self, path: str | os.PathLike, uri: str) -> bool:
        """
        Uploads a file, in parts if it is large, unless the object is there with the same content.

        Returns:
            `bool`: whether anything was (or, in a dry run, would be) uploaded.
        """
        path = Path(path)
        if self._is_stored(path, uri):
            return False
        size = path.stat().st_size
        if self.dry_run:
            self.report(f"would upload {path} to {uri} ({size} bytes)")
            return True
        bucket, key = split_uri(uri)
        extra = {"Metadata": {_DIGEST_KEY: _digest_of_file(path)}}
        with _named_errors(uri):
            self._client.upload_file(str(path), bucket, key, ExtraArgs=extra, Config=self._transfer)
        head = self._head(uri)
        if head is None or head["ContentLength"] != size:
            raise OSError(
                f"{uri} is not what {path} holds: the upload was cut short, or the file has changed meanwhile."
            )
        return True

    def upload_folder(
        self,
        folder: str | os.PathLike,
        uri: str,
        *,
        last: tuple[str, ...] = (),
        on_file: Callable[[str], None] | None = None,
    ) -> int:
        """
        Uploads all files under `folder` to below `uri`; objects that are there with the same content are left alone, so a
        stopped upload goes on where it was. Hidden files and unfinished ones (`.partial`) stay behind.

        Args:
            folder (`str` or `os.PathLike`):
                The folder.
            uri (`str`):
                `s3://bucket/prefix`.
            last (`tuple[str, ...]`, *optional*, defaults to `()`):
                Files (relative to `folder`) to upload when all others are there: their presence says that the rest is. Older
                objects of these names are emptied before anything is replaced; to delete them may not be allowed.
            on_file (`Callable[[str], None]`, *optional*):
                Called with the name of each file that is done.

        Returns:
            `int`: the number of files that were uploaded.

        Raises:
            `OSError`: with `last`, if another process has written there meanwhile; then the objects in `last` are empty.
        """
        folder, uri = Path(folder), uri.rstrip("/")
        names = sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file()
            and path.suffix != ".partial"
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if not names:
            raise FileNotFoundError(f"There is nothing to upload in {folder}.")

        def upload(name: str) -> bool:
            is_new = self.upload_file(folder / name, f"{uri}/{name}")
            if on_file is not None:
                on_file(name)
            return is_new

        for name in last:
            there = f"{uri}/{name}"
            if name in names and self.exists(there) and not self._is_stored(folder / name, there):
                self.write(there, b"")
        with ThreadPoolExecutor(self.concurrency) as pool:
            count = sum(pool.map(upload, [name for name in names if name not in last]))
            count += sum(upload(name) for name in last if name in names)
            if last and count and not self.dry_run:
                # Of two that upload here at once, the one that looks last sees files of both.
                # Not every service keeps digests.
                are_there = pool.map(lambda name: self._is_stored(folder / name, f"{uri}/{name}", True), names)
                if not all(are_there):
                    for name in last:
                        self.write(f"{uri}/{name}", b"")
                    raise OSError(
                        f"Another process uploads to {uri} at the same time: give each run a prefix of its own."
                    )
        return count

    def check_access(self, uri: str) -> None:
        """
        Asks whether objects whose URI starts with `uri` may be listed, read and written. Nothing is: an upload in parts is begun
        and given up.

        Raises:
            `FileNotFoundError`: if there is no such bucket.
            `PermissionError`: if there are no credentials, or they do not suffice.
            `OSError`: if there is no answer.
        """
        from botocore.exceptions import ClientError

        bucket, key = split_uri(uri)
        with _named_errors(uri):
            self._client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
            self._head(uri)
            upload = self._client.create_multipart_upload(Bucket=bucket, Key=key)
            # Without parts it holds nothing, and uploads do without the permission to give one up.
            with contextlib.suppress(ClientError):
                self._client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload["UploadId"])

    # ---- the latest of several folders

    def write_latest(self, uri: str, name: str) -> None:
        """
        Points `<uri>/latest.json` at the folder `<uri>/<name>`. One small object is written at once, so a reader finds the
        old folder or the new one. To be called when the folder is whole.
        """
        self.write(f"{uri.rstrip('/')}/latest.json", json.dumps({"latest": name}).encode())

    def read_latest(self, uri: str) -> str | None:
        """URI of the folder that `<uri>/latest.json` points at, or `None` if there is no pointer."""
        pointer = f"{uri.rstrip('/')}/latest.json"
        if not self.exists(pointer):
            return None
        return f"{uri.rstrip('/')}/{json.loads(self.read(pointer))['latest']}"

    # ---- parts

    def _head(self, uri: str) -> dict | None:
        from botocore.exceptions import ClientError

        bucket, key = split_uri(uri)
        with _named_errors(uri):
            try:
                return self._client.head_object(Bucket=bucket, Key=key)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                    return None
                raise

    def _is_stored(self, path: Path, uri: str, without_digest: bool = False) -> bool:
        """Whether the object has the content of the file. `without_digest` is the answer for one of its size that has none."""
        head = self._head(uri)
        if head is None or head["ContentLength"] != path.stat().st_size:
            return False
        digest = head["Metadata"].get(_DIGEST_KEY)
        return without_digest if digest is None else digest == _digest_of_file(path)


def _digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _named_errors(uri: str) -> Iterator[None]:
    """botocore's errors as errors that name the object and what to do; they hold no credentials."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise PermissionError(
            f"{uri}: boto3 finds no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        ) from None
    except ClientError as error:
        code, message = error.response["Error"].get("Code", "?"), error.response["Error"].get("Message", "")
        kind = {"NoSuchBucket": FileNotFoundError, "NoSuchKey": FileNotFoundError, "404": FileNotFoundError}
        kind |= {"ExpiredToken": PermissionError, "InvalidToken": PermissionError}
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 403:
            # Keys that nobody knows, signatures that do not fit, and the like have codes of their own.
            kind[code] = PermissionError
        raise kind.get(code, OSError)(f"{uri}: {code} {message}") from error
    except (BotoCoreError, Boto3Error) as error:
        raise OSError(f"{uri}: {error}") from error
