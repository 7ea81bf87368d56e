# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import logging
import re
import threading

import pytest
from tiny_training import assert_same, heard_by_pytest, make_trainer, training_state
from transformers import TrainerCallback


pytest.importorskip("boto3")
pytest.importorskip("moto")

from s3_server import credentials_that_may, running_s3  # noqa: E402

from hf_dflash.monitor.history import RunHistory  # noqa: E402
from hf_dflash.monitor.run_log import RUN_LOG  # noqa: E402
from hf_dflash.object_store import ObjectStore  # noqa: E402
from hf_dflash.training.checkpoint import CHECKPOINT_FILE, is_whole  # noqa: E402
from hf_dflash.training.s3_checkpoints import S3Callback, check_can_upload, fetch_checkpoint  # noqa: E402


def checkpoints(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


URI = "s3://bucket/runs/one"
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9, "save_total_limit": 1, "logging_steps": 2}


@pytest.fixture(scope="module")
def s3():
    with running_s3() as url:
        yield url


def keys(uri):
    return {item.uri.removeprefix(uri + "/") for item in ObjectStore().list_objects(uri)}


def test_every_checkpoint_is_copied_and_a_run_goes_on_from_s3_alone(s3, tmp_path):
    uri = f"{URI}/copied"
    whole = make_trainer(tmp_path / "here", checkpoint_uri=uri, **SAVING)
    whole.train()
    # Rotation has taken the older ones away here, not there.
    assert checkpoints(tmp_path / "here") == [9]
    assert {name.split("/")[0] for name in keys(uri)} == {
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-9",
        "latest.json",
    }
    assert ObjectStore().read_latest(uri) == f"{uri}/checkpoint-9"
    assert not list((tmp_path / "here" / ".s3_uploads").glob("*"))

    elsewhere = make_trainer(tmp_path / "elsewhere", **SAVING)
    elsewhere.train(resume_from_checkpoint=f"{uri}/checkpoint-6")
    assert_same(training_state(elsewhere), training_state(whole))
    assert fetch_checkpoint(uri, tmp_path / "third").endswith("checkpoint-9")


def test_training_does_not_wait_for_a_slow_upload_and_the_pointer_moves_when_all_is_there(s3, tmp_path):
    uri = f"{URI}/slow"
    may_upload = threading.Event()
    trained, order = threading.Event(), []

    class Slow(ObjectStore):
        def upload_folder(self, *args, **kwargs):
            assert may_upload.wait(60)
            order.append("upload")
            return super().upload_folder(*args, **kwargs)

        def write_latest(self, *args):
            order.append("latest")
            super().write_latest(*args)

    trainer = make_trainer(tmp_path, **SAVING)

    class Order(S3Callback):
        def on_train_end(self, args, state, control, **kwargs):
            # All steps are done and no upload has ended.
            assert state.global_step == 9 and not order
            trained.set()
            may_upload.set()
            super().on_train_end(args, state, control, **kwargs)

    trainer.add_callback(Order(uri, store=Slow()))
    trainer.train()
    assert trained.is_set() and order == ["upload", "latest"] * 3


def test_a_failed_upload_is_tried_again_then_reported_and_never_stops_training(s3, tmp_path, caplog):
    uri = f"{URI}/failing"
    tries = []

    class Failing(ObjectStore):
        def upload_folder(self, folder, target, **kwargs):
            tries.append(target.rpartition("/")[2])
            # The first checkpoint never, the second at the second attempt.
            if (
                tries.count("checkpoint-3")
                and tries[-1] == "checkpoint-3"
                or tries == ["checkpoint-3"] * 2 + ["checkpoint-6"]
            ):
                raise OSError("the network is down")
            return super().upload_folder(folder, target, **kwargs)

    callback = S3Callback(uri, store=Failing(), attempts=2, seconds_between=0)
    trainer = make_trainer(tmp_path, callbacks=[callback], **SAVING)
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        trainer.train()
    assert trainer.state.global_step == 9
    assert tries == ["checkpoint-3", "checkpoint-3", "checkpoint-6", "checkpoint-6", "checkpoint-9"]
    assert list(callback.failed) == ["checkpoint-3"]
    assert "checkpoint-3 is not on" in caplog.text and "the network is down" in caplog.text

    # It waits, and goes up when the run goes on.
    again = make_trainer(tmp_path, checkpoint_uri=uri, **SAVING)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-3/model.safetensors" in keys(uri)
    assert ObjectStore().read_latest(uri) == f"{uri}/checkpoint-9"


def test_a_checkpoint_that_is_not_all_there_is_not_gone_on_from(s3, tmp_path):
    uri = f"{URI}/half"
    trainer = make_trainer(tmp_path / "here", checkpoint_uri=uri, **{**SAVING, "max_steps": 3})
    trainer.train()
    store = ObjectStore()
    store._client.delete_object(Bucket="bucket", Key="runs/one/half/checkpoint-3/optimizer.pt")
    with pytest.raises(ValueError, match="no whole checkpoint"):
        fetch_checkpoint(uri, tmp_path / "there")
    with pytest.raises(FileNotFoundError, match="no latest.json"):
        fetch_checkpoint("s3://bucket/nothing/here", tmp_path / "there")


def test_a_checkpoint_of_another_run_is_refused_before_it_touches_the_folder(s3, tmp_path):
    uri = f"{URI}/refused"
    options = {**SAVING, "logging_steps": 1}
    make_trainer(tmp_path / "other", checkpoint_uri=uri, seed=1, **options).train()
    trainer = make_trainer(tmp_path / "mine", **options)
    trainer.train()
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="seed is .*A_COPY_OF_IT"):
        trainer.train(resume_from_checkpoint=f"{uri}/checkpoint-9")
    assert {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_copy_over_that_of_another_run_is_no_whole_checkpoint_until_it_is_complete(
    direction, s3, tmp_path, monkeypatch
):
    """The same files of the same sizes: half of each would be gone on from without a word."""
    uri = f"{URI}/replaced_{direction}"
    options = {**SAVING, "save_steps": 3, "max_steps": 3}
    make_trainer(tmp_path / "old", checkpoint_uri=uri, **options).train()
    make_trainer(tmp_path / "new", learning_rate=0.5, **options).train()
    old, new = (tmp_path / name / "checkpoint-3" for name in ("old", "new"))
    store, name = ObjectStore(), "upload_file" if direction == "up" else "download_file"
    transfer, there = getattr(store, name), f"{uri}/checkpoint-3"

    def dies_behind_the_weights(source, destination):
        if "optimizer" in str(source):
            raise KeyboardInterrupt
        return transfer(source, destination)

    if direction == "down":
        store.upload_folder(new, there, last=(CHECKPOINT_FILE,))
    monkeypatch.setattr(store, name, dies_behind_the_weights)
    with pytest.raises(KeyboardInterrupt):
        if direction == "up":
            store.upload_folder(new, there, last=(CHECKPOINT_FILE,))
        else:
            fetch_checkpoint(there, tmp_path / "old", store)
    if direction == "up":
        with pytest.raises(FileNotFoundError, match="no whole checkpoint .*missing or empty"):
            fetch_checkpoint(there, tmp_path / "third")
        ObjectStore().upload_folder(new, there, last=(CHECKPOINT_FILE,))
    else:
        assert not is_whole(old)
    folder = fetch_checkpoint(there, tmp_path / "old")
    for file in ("model.safetensors", "optimizer.pt", CHECKPOINT_FILE):
        assert (tmp_path / "old" / "checkpoint-3" / file).read_bytes() == (new / file).read_bytes()
    assert is_whole(folder)


def test_a_prefix_may_be_named_like_a_checkpoint(s3, tmp_path):
    uri = f"{URI}/checkpoint-lr1e-4 (ä)"
    make_trainer(tmp_path / "here", checkpoint_uri=f"{uri}/", **{**SAVING, "max_steps": 3}).train()
    assert is_whole(fetch_checkpoint(f"{uri}/", tmp_path / "there"))


def test_a_place_to_which_nothing_can_be_copied_is_refused_before_the_run_writes_anything(s3, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="`--checkpoint_uri s3://no-such-bucket/run`: create the bucket.*NoSuch"
    ):
        make_trainer(tmp_path, checkpoint_uri="s3://no-such-bucket/run", **SAVING).train()
    with (
        credentials_that_may("s3:ListBucket", "s3:GetObject"),
        pytest.raises(
            PermissionError, match=f"`--checkpoint_uri {URI}`: give credentials.*s3:PutObject.*AccessDenied"
        ),
    ):
        make_trainer(tmp_path, checkpoint_uri=URI, **SAVING).train()
    assert not list(tmp_path.iterdir())


def test_a_store_that_gives_no_answer_is_warned_of_and_another_runs_checkpoints_too(s3, tmp_path, caplog, monkeypatch):
    ObjectStore().write(f"{URI}/taken/checkpoint-7/{CHECKPOINT_FILE}", b"{}")
    # Nobody listens there.
    nowhere = ObjectStore(endpoint_url="http://127.0.0.1:9", max_attempts=1)
    callbacks = [S3Callback(URI, store=nowhere), S3Callback(f"{URI}/taken")]
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        make_trainer(tmp_path, callbacks=callbacks, **{**SAVING, "save_strategy": "no", "max_steps": 1}).train()
    assert re.search(r"cannot be read, .*127\.0\.0\.1:9", caplog.text)
    assert "taken has checkpoints already" in caplog.text
    # It may answer when the first checkpoint is there.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    check_can_upload(URI)


# ---- The run log ----


def shown(folder):
    history = RunHistory(folder)
    history.update()
    return history.snapshot()


def begins(folder):
    rows = [json.loads(line) for line in (folder / RUN_LOG).read_text().splitlines()]
    return [row["step"] for row in rows if row.get("event") == "begin"]


def test_a_run_that_goes_on_from_s3_elsewhere_goes_on_with_its_log(s3, tmp_path):
    uri = f"{URI}/logged"
    options = {**SAVING, "logging_steps": 1, "checkpoint_uri": uri}
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    make_trainer(here, **options).train()
    copied = ObjectStore().read(f"{uri}/checkpoint-6/{RUN_LOG}")
    # Up to that step, and the save itself.
    assert [json.loads(line)["step"] for line in copied.splitlines()][-1] == 6
    assert json.loads(copied.splitlines()[-1])["event"] == "checkpoint"
    assert (here / RUN_LOG).read_bytes().startswith(copied)

    make_trainer(elsewhere, **options).train(resume_from_checkpoint=f"{uri}/checkpoint-6")
    assert (elsewhere / RUN_LOG).read_bytes().startswith(copied)
    assert begins(elsewhere) == [0, 6]
    page = shown(elsewhere)
    assert page["series"]["loss"]["x"].tolist() == list(range(1, 10))
    assert page["series"]["loss"]["y"].tolist() == shown(here)["series"]["loss"]["y"].tolist()
    # And the next copy has the whole past.
    assert ObjectStore().read(f"{uri}/checkpoint-9/{RUN_LOG}").startswith(copied)


def test_the_folders_own_log_stays_where_it_holds_the_fetched_one_and_a_stranger_is_renamed(s3, tmp_path):
    uri = f"{URI}/logs"
    options = {**SAVING, "logging_steps": 1, "checkpoint_uri": uri}
    here = tmp_path / "here"
    make_trainer(here, **options).train()
    fetched = ObjectStore().read(f"{uri}/checkpoint-6/{RUN_LOG}")
    for name, log, expected in (
        ("longer", (here / RUN_LOG).read_bytes(), (here / RUN_LOG).read_bytes()),
        ("shorter", fetched[:100], fetched),
        ("stranger", b'{"step":1,"time":1.0,"loss":9.0}\n', fetched),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / RUN_LOG).write_bytes(log)
        for _ in range(2):
            fetch_checkpoint(f"{uri}/checkpoint-6", folder)
            assert (folder / RUN_LOG).read_bytes() == expected
        renamed = folder / "run_log.before_checkpoint-6.jsonl"
        assert (renamed.read_bytes() == log) if name == "stranger" else not renamed.exists()

    # A second stranger takes nothing of the first one away.
    (tmp_path / "stranger" / RUN_LOG).write_bytes(b"another\n")
    fetch_checkpoint(f"{uri}/checkpoint-6", tmp_path / "stranger")
    assert (tmp_path / "stranger" / "run_log.before_checkpoint-6.2.jsonl").read_bytes() == b"another\n"
    assert b"9.0" in (tmp_path / "stranger" / "run_log.before_checkpoint-6.jsonl").read_bytes()


def test_a_line_that_is_being_written_is_not_copied_and_a_run_that_writes_no_log_copies_none(s3, tmp_path):
    class HalfALine(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            with open(tmp_path / "written" / RUN_LOG, "a") as log:
                log.write('{"step":')

    uri = f"{URI}/half_a_line"
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / RUN_LOG).write_text('{"event":"begin","step":0,"run":{"name":"an earlier one"}}\n')
    for name, callbacks in (("written", [HalfALine()]), ("off", [])):
        trainer = make_trainer(tmp_path / name, run_log=name != "off", **{**SAVING, "max_steps": 3})
        for callback in (*callbacks, S3Callback(f"{uri}/{name}")):
            trainer.add_callback(callback)
        trainer.train()
    copied = ObjectStore().read(f"{uri}/written/checkpoint-3/{RUN_LOG}")
    assert copied.endswith(b"}\n") and all(json.loads(line) for line in copied.splitlines())
    assert not any(RUN_LOG in key for key in keys(f"{uri}/off"))
