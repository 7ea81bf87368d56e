# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from fake_chat_server import EOS, FAULTS, MODEL, fake_chat_server
from tiny_models import make_target
from tiny_tokenizers import CHATML_TEMPLATE, make_tokenizer

from hf_dflash.data.chat_client import RetryPolicy
from hf_dflash.data.completion_folder import CompletionFolder, RepliesRefused, ReplyLimits
from hf_dflash.data.server_completions import generate_completions_from_servers


QUICK = {"retry": RetryPolicy(max_attempts=30, timeout=1.5, first_wait=0.01), "disable_tqdm": True, "limits": None}


def write_prompts(path, texts):
    rows = [{"id": f"row-{n}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(*files):
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def count_lines(folder):
    while True:
        try:
            return sum(file.read_bytes().count(b"\n") for file in [*folder.glob("completions-*")])
        except FileNotFoundError:
            continue  # a shard has just been given its final name


@pytest.fixture(scope="module")
def server():
    with fake_chat_server() as url:
        yield url


def test_a_server_that_is_not_there_or_offers_another_model_is_named(server, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["a"])
    with pytest.raises(ConnectionError, match="http://127.0.0.1:9/v1 does not answer"):
        generate_completions_from_servers(prompts, tmp_path / "out", [server, "http://127.0.0.1:9/v1"])
    with pytest.raises(ValueError, match=f"does not offer other, but {MODEL}"):
        generate_completions_from_servers(prompts, tmp_path / "out", [server], model="other")
    with pytest.raises(ConnectionError, match="usually ends with /v1"):
        generate_completions_from_servers(prompts, tmp_path / "out", [server.removesuffix("/v1")])


def test_every_turn_is_asked_for_and_tools_are_offered(server, tmp_path):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"id": "old", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rom"}}}
    rows = [
        {
            "id": "turns",
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "?"},
                {"from": "human", "value": "two"},
            ],
        },
        {
            "id": "tools",
            "tools": tools,
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "31 degrees", "tool_call_id": "old"},
            ],
        },
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate_completions_from_servers(prompts, tmp_path / "out", [server], enable_thinking=True, **QUICK)
    written = {row["id"]: row for row in read_lines(*(tmp_path / "out").glob("completions-*"))}
    turns = written["turns"]["messages"]
    assert [message["content"] for message in turns] == ["one", "echo of one", "two", "echo of two"]
    assert turns[1]["completion_token_ids"] == [*b"echo of one", EOS]
    assert written["turns"]["completion_token_ids"] == [*b"echo of two", EOS]
    assert written["turns"]["chat_template_kwargs"] == {"enable_thinking": True}
    turns = written["tools"]["messages"]
    assert [message["role"] for message in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[1]["tool_calls"][0]["id"] == turns[2]["tool_call_id"] == "call-1"
    assert written["tools"]["tools"] == tools


def test_a_dead_server_stops_the_run_instead_of_failing_every_prompt(tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["too long"] * 2000)
    limits = ReplyLimits(max_failed_share=0.5, min_rows=100)
    with fake_chat_server() as url, pytest.raises(RepliesRefused, match="http_400"):
        generate_completions_from_servers(prompts, tmp_path / "out", [url], **{**QUICK, "limits": limits})
    assert len(read_lines(tmp_path / "out" / "failures.jsonl")) < 300


def test_500_prompts_survive_a_bad_network_and_three_kills(tmp_path):
    texts = [f"question {n}" + " that is too long" * (n % 50 == 7) for n in range(500)]
    prompts = write_prompts(tmp_path / "prompts.jsonl", texts)
    out = tmp_path / "out"
    context = multiprocessing.get_context("fork")
    with fake_chat_server(0.35, seed=1) as first, fake_chat_server(0.35, seed=2) as second:

        def start():
            options = {"concurrency": 8, "shard_rows": 64, **QUICK}
            process = context.Process(
                target=generate_completions_from_servers, args=(prompts, out, [first, second]), kwargs=options
            )
            process.start()
            return process

        for goal in (90, 200, 330):
            process = start()
            deadline = time.monotonic() + 100
            while not out.exists() or count_lines(out) < goal + random.randrange(20):
                assert process.is_alive() and time.monotonic() < deadline
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert count_lines(out) < 480
        process = start()
        process.join(100)
        assert process.exitcode == 0
        reports = [
            json.loads(urllib.request.urlopen(url.removesuffix("v1") + "report").read()) for url in (first, second)
        ]
    assert all(report.get(fault, 0) > 0 for report in reports for fault in FAULTS)

    answered = read_lines(*sorted(out.glob("completions-*.jsonl")))
    failed = read_lines(out / "failures.jsonl")
    ids = [row["id"] for row in [*answered, *failed]]
    assert sorted(ids) == sorted(f"row-{n}" for n in range(500))
    assert {row["reason"] for row in failed} == {"http_400"}
    assert sorted(row["id"] for row in failed) == sorted(f"row-{n}" for n in range(500) if n % 50 == 7)
    for row in answered:
        text = f"echo of {texts[int(row['id'].removeprefix('row-'))]}"
        assert row["messages"][-1]["content"] == text
        assert row["completion_token_ids"] == [*text.encode(), EOS]
    assert [count_lines(out), len(list(out.glob("completions-*")))] == [490, 8]
    assert json.loads((out / "manifest.json").read_text())["counts"]["rows"] == 490


@pytest.mark.slow
def test_a_real_server_writes_what_transformers_writes_here(tmp_path):
    """`transformers serve` on a tiny target. It refuses fields that it does not know, such as return_token_ids."""
    from hf_dflash.data.local_completions import generate_completions_locally

    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    target = make_target("qwen3", vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    target.lm_head.weight[tokenizer.eos_token_id] *= 1.5  # so that some replies end by themselves
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"What is {n} + {n}?" for n in range(12)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(Path(sys.executable).with_name("transformers"), "serve", tmp_path / "target"),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        deadline = time.monotonic() + 200
        while True:
            assert server.poll() is None and time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).read()
                break
            except OSError:
                time.sleep(0.5)
        with pytest.warns(UserWarning, match="refuses return_token_ids"):
            generate_completions_from_servers(
                prompts,
                tmp_path / "served",
                [url],
                concurrency=3,
                max_new_tokens=16,
                temperature=0.0,
                limits=None,
                disable_tqdm=True,
            )
    finally:
        server.kill()
        server.wait()
    generate_completions_locally(
        prompts,
        tmp_path / "local",
        tmp_path / "target",
        dtype="float32",
        max_new_tokens=16,
        limits=None,
        disable_tqdm=True,
    )

    def by_id(folder):
        return {row["id"]: row for row in read_lines(*folder.glob("completions-*"))}

    served, local = by_id(tmp_path / "served"), by_id(tmp_path / "local")
    assert served.keys() == local.keys() and len(served) == 12
    assert {row["finish_reason"] for row in local.values()} == {"stop", "length"}
    for row_id, row in served.items():
        # The server calls a reply cut that ends exactly at the limit.
        if len(local[row_id]["completion_token_ids"]) < 16:
            assert row["finish_reason"] == local[row_id]["finish_reason"]
        # The server drops the bytes of a last character that is not whole.
        text, whole = row["messages"][-1]["content"], local[row_id]["messages"][-1]["content"]
        assert whole.startswith(text.rstrip("\ufffd")) and len(whole) - len(text) < 4


def test_shards_are_in_the_store_as_they_close_and_a_lost_disk_loses_nothing(tmp_path, server):
    from s3_server import running_s3

    from hf_dflash.object_store import ObjectStore

    prompts = write_prompts(tmp_path / "prompts.jsonl", [f"question {n}" for n in range(50)])
    options = {"shard_rows": 8, "upload_to": "s3://bucket/completions", "concurrency": 4, **QUICK}
    with running_s3() as s3_url:
        options["endpoint_url"] = s3_url
        first = tmp_path / "first"
        # Three shards are closed and one is open.
        with fake_chat_server() as url, pytest.raises(RuntimeError, match="stopped"):
            stop_after(30, prompts, first, [url], options)
        store = ObjectStore(endpoint_url=s3_url)
        stored = [item.uri for item in store.list_objects("s3://bucket/completions/completions-")]
        # Requests in flight may have filled one more.
        assert (
            stored[:3] == [f"s3://bucket/completions/completions-0000{n}.jsonl" for n in range(3)] and len(stored) < 5
        )

        second = tmp_path / "second"
        generate_completions_from_servers(prompts, second, [server], **options)
        assert (second / "completions-00000.jsonl").read_bytes() == (first / "completions-00000.jsonl").read_bytes()
        store.download_folder("s3://bucket/completions", tmp_path / "stored")
    rows = read_lines(*(tmp_path / "stored").glob("completions-*.jsonl"))
    assert sorted(row["id"] for row in rows) == sorted(f"row-{n}" for n in range(50))
    assert json.loads((tmp_path / "stored" / "manifest.json").read_text())["status"] == "finished"


def stop_after(num_rows, prompts, out, urls, options):
    """Runs until so many rows are written and the uploads under way are over."""
    add = CompletionFolder.add

    def add_and_stop(folder, row, replies):
        add(folder, row, replies)
        if folder.totals["rows"] == num_rows:
            for _, upload in folder._uploads:
                upload.result()
            raise RuntimeError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompletionFolder, "add", add_and_stop)
        generate_completions_from_servers(prompts, out, urls, **options)
