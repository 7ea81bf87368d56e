# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
from s3_server import running_s3

from hf_dflash.data.completion_folder import CompletionFolder, RepliesRefused, ReplyLimits, ReplyWatch
from hf_dflash.data.on_policy import Reply
from hf_dflash.object_store import ObjectStore


def test_a_run_that_writes_nothing_is_stopped():
    watch = ReplyWatch(ReplyLimits(max_empty_share=0.05, min_rows=100))
    with pytest.raises(RepliesRefused, match=r"87\.0% of the latest 100 replies are empty"):
        for number in range(1000):
            watch.replied(Reply("" if number % 100 < 87 else f"reply {number}"))


def test_a_run_that_repeats_itself_is_stopped_even_when_it_starts_late():
    watch = ReplyWatch(ReplyLimits(max_identical_share=0.2, window=500, min_rows=100))
    for number in range(5000):
        watch.replied(Reply(f"reply {number}"))
    with pytest.raises(RepliesRefused, match="I am sorry"):
        for _ in range(102):
            watch.replied(Reply("I am sorry."))


def test_a_run_whose_prompts_fail_is_stopped():
    watch = ReplyWatch(ReplyLimits(max_failed_share=0.5, min_rows=100))
    with pytest.raises(RepliesRefused, match="100.0% .* failed .* connection refused"):
        for _ in range(100):
            watch.failed("connection refused")


def test_good_replies_pass_the_limits_and_the_window_forgets():
    watch = ReplyWatch(ReplyLimits(window=300, min_rows=100))
    for number in range(3000):
        watch.replied(Reply("" if number % 50 == 0 else "yes" if number % 10 == 0 else f"reply {number}"))
    assert len(watch._window) == 300
    assert sum(watch._kinds.values()) == 300
    assert watch.counts["empty"] == 60


def fill(folder, numbers):
    for number in numbers:
        reply = Reply(f"reply {number}")
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply.content}]
        folder.add({"id": str(number), "messages": messages, "finish_reason": "stop"}, [reply])


def test_a_line_that_a_kill_cut_is_written_again(tmp_path):
    with CompletionFolder(tmp_path, {}, shard_rows=4) as folder:
        fill(folder, range(6))
    open_shard = tmp_path / "completions-00001.jsonl.partial"
    open_shard.write_bytes(open_shard.read_bytes()[:-9])
    with CompletionFolder(tmp_path, {}, shard_rows=4) as folder:
        assert folder.answered == {"0", "1", "2", "3", "4"}
        fill(folder, range(5, 9))
        manifest = folder.finish()
    shards = sorted(tmp_path.glob("completions*"))
    assert [shard.name for shard in shards] == [f"completions-0000{number}.jsonl" for number in range(3)]
    rows = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(9)]
    assert manifest["counts"]["rows"] == 9


def test_a_fetch_from_s3_that_fails_half_way_is_made_up_for_by_the_next_start(tmp_path, monkeypatch):
    with running_s3() as url:
        options = {"shard_rows": 2, "upload_to": "s3://bucket/completions", "endpoint_url": url}
        with CompletionFolder(tmp_path / "here", {}, **options) as folder:
            fill(folder, range(6))
            folder.finish()

        def fail_at_a_shard(self, uri, path):
            if uri.endswith("completions-00001.jsonl"):
                raise OSError("connection reset")
            download(self, uri, path)

        download = ObjectStore.download_file
        monkeypatch.setattr(ObjectStore, "download_file", fail_at_a_shard)
        with pytest.raises(OSError, match="connection reset"):
            CompletionFolder(tmp_path / "there", {}, **options).__enter__()
        monkeypatch.undo()
        with CompletionFolder(tmp_path / "there", {}, **options) as folder:
            assert folder.answered == {"0", "1", "2", "3", "4", "5"}


def test_a_folder_of_another_run_is_refused(tmp_path):
    with CompletionFolder(tmp_path, {"temperature": 0}) as folder:
        fill(folder, range(2))
    with pytest.raises(ValueError, match="temperature: 0, now 1"):
        CompletionFolder(tmp_path, {"temperature": 1}).__enter__()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds something else"):
        CompletionFolder(tmp_path, {"temperature": 0}).__enter__()


def test_two_processes_cannot_write_the_same_folder(tmp_path):
    with (
        CompletionFolder(tmp_path, {}),
        pytest.raises(ValueError, match="Another process"),
        CompletionFolder(tmp_path, {}),
    ):
        pass


def test_a_closed_shard_that_is_damaged_is_named(tmp_path):
    with CompletionFolder(tmp_path, {}, shard_rows=2) as folder:
        fill(folder, range(2))
    shard = tmp_path / "completions-00000.jsonl"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"completions-00000\.jsonl, line 2 is not a completion"):
        CompletionFolder(tmp_path, {}).__enter__()
