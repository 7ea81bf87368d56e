# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import boto3
import pytest
from s3_server import ENVIRONMENT, credentials_that_may, running_s3

from hf_dflash import object_store
from hf_dflash.object_store import ObjectStore, split_uri


@pytest.fixture(scope="module")
def s3():
    with running_s3() as url:
        yield url


@pytest.fixture
def store(s3):
    return ObjectStore()


def test_uris_are_taken_apart_and_others_are_refused():
    assert split_uri("s3://bucket/some/key") == ("bucket", "some/key")
    assert split_uri("s3://bucket") == ("bucket", "")
    for uri in ("/some/path", "s3:///key"):
        with pytest.raises(ValueError, match=r"s3://bucket/key"):
            split_uri(uri)


def test_a_folder_goes_up_and_comes_back_the_same_without_hidden_and_unfinished_files(store, tmp_path):
    folder = tmp_path / "here"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(os.urandom(1000))
    (folder / "deep" / "b c.txt").write_text("né")
    (folder / "empty").write_bytes(b"")
    (folder / ".lock").write_text("hidden")
    (folder / "c.partial").write_text("unfinished")
    assert store.upload_folder(folder, "s3://bucket/folder") == 3
    assert [item.uri for item in store.list_objects("s3://bucket/folder/")] == [
        "s3://bucket/folder/a.bin",
        "s3://bucket/folder/deep/b c.txt",
        "s3://bucket/folder/empty",
    ]
    assert store.download_folder("s3://bucket/folder", tmp_path / "there") == 3
    for name in ("a.bin", "deep/b c.txt", "empty"):
        assert (tmp_path / "there" / name).read_bytes() == (folder / name).read_bytes()
    # Nothing goes over the wire twice; what has changed does.
    assert store.upload_folder(folder, "s3://bucket/folder") == 0
    assert store.download_folder("s3://bucket/folder", tmp_path / "there") == 0
    (folder / "a.bin").write_bytes(os.urandom(1000))
    assert store.upload_folder(folder, "s3://bucket/folder") == 1
    assert store.download_folder("s3://bucket/folder", tmp_path / "there") == 1
    assert (tmp_path / "there" / "a.bin").read_bytes() == (folder / "a.bin").read_bytes()


def test_the_last_file_is_uploaded_when_all_others_are_there(store, tmp_path):
    for name in ("a", "manifest.json", "z"):
        (tmp_path / name).write_text(name)
    order = []
    store.upload_folder(tmp_path, "s3://bucket/last", last=("manifest.json",), on_file=order.append)
    assert sorted(order) == ["a", "manifest.json", "z"]
    assert order[-1] == "manifest.json"


def test_what_two_processes_have_mixed_does_not_look_whole_and_the_next_upload_mends_it(store, tmp_path):
    for writer in ("ours", "theirs"):
        (tmp_path / writer).mkdir()
        for name in ("a.bin", "b.bin", "marker.json"):
            (tmp_path / writer / name).write_text(f"{name} {writer}")
    uri, last = "s3://bucket/shared", ("marker.json",)
    began = []

    def let_them_in(name):
        if not began:
            began.append(name)
            ObjectStore().upload_folder(tmp_path / "theirs", uri, last=last)

    store.concurrency = 1
    with pytest.raises(OSError, match="Another process uploads to s3://bucket/shared"):
        store.upload_folder(tmp_path / "ours", uri, last=last, on_file=let_them_in)
    assert store.read(f"{uri}/marker.json") == b""
    assert store.upload_folder(tmp_path / "ours", uri, last=last) > 0
    assert all(store.read(f"{uri}/{name}") == f"{name} ours".encode() for name in ("a.bin", "b.bin", "marker.json"))


def test_a_service_that_keeps_no_digests_is_not_taken_for_another_process(store, tmp_path, monkeypatch):
    for name in ("a.bin", "marker.json"):
        (tmp_path / name).write_text(name)
    head = store._client.head_object
    monkeypatch.setattr(store._client, "head_object", lambda **request: {**head(**request), "Metadata": {}})
    assert store.upload_folder(tmp_path, "s3://bucket/no_digests", last=("marker.json",)) == 2
    assert store.read("s3://bucket/no_digests/marker.json") == b"marker.json"


def test_a_large_file_goes_in_parts_and_is_checked(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "MULTIPART_BYTES", 5 * 2**20)
    store = ObjectStore()
    content = os.urandom(12 * 2**20)
    (tmp_path / "large").write_bytes(content)
    assert store.upload_file(tmp_path / "large", "s3://bucket/large")
    (item,) = store.list_objects("s3://bucket/large")
    assert item.etag.endswith("-3")  # three parts
    store.download_file("s3://bucket/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


def test_content_that_is_not_what_was_uploaded_is_an_error_and_leaves_no_file(store, tmp_path):
    (tmp_path / "file").write_bytes(b"right")
    store.upload_file(tmp_path / "file", "s3://bucket/damaged")
    metadata = boto3.client("s3").head_object(Bucket="bucket", Key="damaged")["Metadata"]
    boto3.client("s3").put_object(Bucket="bucket", Key="damaged", Body=b"wrong", Metadata=metadata)
    with pytest.raises(OSError, match="s3://bucket/damaged was damaged"):
        store.download_file("s3://bucket/damaged", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_processes_may_download_into_one_folder_at_the_same_time(store, tmp_path, monkeypatch):
    store.write("s3://bucket/shared", b"content")
    download_to = ObjectStore.download_to

    def meet_another_process(self, uri, file):
        monkeypatch.undo()
        with mock.patch("os.getpid", return_value=1):
            store.download_file("s3://bucket/shared", tmp_path / "file")
        download_to(self, uri, file)

    monkeypatch.setattr(ObjectStore, "download_to", meet_another_process)
    store.download_file("s3://bucket/shared", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"content" and len(list(tmp_path.iterdir())) == 1


def test_the_latest_pointer_moves_at_once(store):
    assert store.read_latest("s3://bucket/run") is None
    store.write_latest("s3://bucket/run", "checkpoint-1")
    assert store.read_latest("s3://bucket/run") == "s3://bucket/run/checkpoint-1"
    # Readers beside a writer see one of the two names, never a part or nothing.
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(
            lambda: [store.write_latest("s3://bucket/run", f"checkpoint-{i % 2}") for i in range(50)]
        )
        seen = {store.read_latest("s3://bucket/run") for _ in range(50)}
        writing.result()
    assert seen <= {"s3://bucket/run/checkpoint-0", "s3://bucket/run/checkpoint-1"}


def test_a_dry_run_writes_nothing_and_says_what_it_would(s3, tmp_path):
    (tmp_path / "file").write_text("content")
    lines = []
    store = ObjectStore(dry_run=True, report=lines.append)
    assert store.upload_folder(tmp_path, "s3://bucket/dry") == 1
    store.write_latest("s3://bucket/dry", "x")
    assert store.list_objects("s3://bucket/dry") == []
    assert lines == [
        f"would upload {tmp_path / 'file'} to s3://bucket/dry/file (7 bytes)",
        "would write s3://bucket/dry/latest.json (15 bytes)",
    ]


def test_errors_name_the_object_and_what_to_do(store, tmp_path, s3):
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing: NoSuchKey"):
        store.download_file("s3://bucket/nothing", tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/x: NoSuchBucket"):
        store.list_objects("s3://no-such-bucket/x")
    with pytest.raises(FileNotFoundError, match="nothing under s3://bucket/nothing/"):
        store.download_folder("s3://bucket/nothing", tmp_path / "x")
    boto3.client("s3").put_object(Bucket="bucket", Key="evil/../../escape", Body=b"x")
    with pytest.raises(ValueError, match="outside"):
        store.download_folder("s3://bucket/evil", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_failed_requests_are_retried_and_then_an_error_names_the_object(s3):
    # Nobody listens there.
    store = ObjectStore(endpoint_url="http://127.0.0.1:9", max_attempts=2)
    attempts = []
    store._client.meta.events.register("before-send.s3", lambda **_: attempts.append(1))
    with pytest.raises(OSError, match=r"s3://bucket/x: .*127\.0\.0\.1:9"):
        store.read("s3://bucket/x")
    assert len(attempts) == 2


def test_credentials_come_from_boto3_and_are_in_no_message_and_no_log(s3, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    store = ObjectStore()
    store.write("s3://bucket/logged", b"x")
    with pytest.raises(FileNotFoundError) as error:
        store.read("s3://bucket/missing")
    text = caplog.text + str(error.value) + repr(store.__dict__)
    assert not any(ENVIRONMENT[name] in text for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    missing = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no"), "AWS_CONFIG_FILE": str(tmp_path / "no")}
    with mock.patch.dict(os.environ, {**missing, "AWS_EC2_METADATA_DISABLED": "true"}):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            os.environ.pop(name, None)
        with pytest.raises(PermissionError, match="boto3 finds no credentials"):
            ObjectStore(endpoint_url=s3).read("s3://bucket/logged")


def test_access_that_lacks_anything_an_upload_needs_is_refused_and_nothing_is_written_to_find_out(s3):
    bucket, needed = {"Bucket": "bucket"}, ("s3:ListBucket", "s3:GetObject", "s3:PutObject")
    uri = "s3://bucket/access/checkpoint-"
    before = ObjectStore().list_objects("s3://bucket/")
    ObjectStore().check_access(uri)
    assert ObjectStore().list_objects("s3://bucket/") == before
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(**bucket)
    for missing in needed:
        with (
            credentials_that_may(*(action for action in needed if action != missing)),
            pytest.raises(PermissionError, match=uri),
        ):
            ObjectStore().check_access(uri)
    with credentials_that_may(*needed):
        ObjectStore().check_access(uri)
        with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "nobody's"}), pytest.raises(PermissionError):
            ObjectStore().check_access(uri)
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket/x: NoSuchBucket"):
        ObjectStore().check_access("s3://no-such-bucket/x")


def test_a_store_that_says_nothing_is_waited_for_no_longer_than_was_asked_for():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with mock.patch.dict(os.environ, ENVIRONMENT), pytest.raises(OSError, match="s3://bucket/x: Read timeout"):
            ObjectStore(endpoint_url=url, max_attempts=1, timeout=0.2).check_access("s3://bucket/x")
