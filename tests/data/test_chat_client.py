# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import asyncio
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

from hf_dflash.data.chat_client import ChatClient, RequestFailed, RetryPolicy, read_chat_completion
from hf_dflash.data.completion_folder import RepliesRefused, ReplyLimits
from hf_dflash.data.completions import generate_completions_from_servers


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


def ask(url, messages, tools=None, **options):
    async def run():
        async with ChatClient([url] if isinstance(url, str) else url, options) as client:
            return await client.complete(messages, tools)

    return asyncio.run(run())


USER = {"role": "user", "content": "hello"}


def test_a_reply_has_its_reasoning_apart_and_its_exact_ids(server):
    reply = ask(server, [USER], chat_template_kwargs={"enable_thinking": True})
    assert (reply.content, reply.reasoning_content) == ("echo of hello", "thoughts about hello")
    assert reply.completion_token_ids == [*b"echo of hello", EOS]
    assert reply.finish_reason == "stop" and reply.num_tokens == 14


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "yes"}, (None, "yes")),
        ({"content": "yes", "reasoning": "hm"}, ("hm", "yes")),
        ({"content": "<think>\nhm\n</think>\n\nyes"}, ("hm", "yes")),
        ({"content": "hm\n</think>\n\nyes"}, ("hm", "yes")),
        ({"content": None, "reasoning_content": "hm"}, ("hm", "")),
    ],
)
def test_reasoning_is_found_where_a_server_puts_it(message, expected):
    completion = {"choices": [{"message": message, "finish_reason": "stop"}]}
    reply = read_chat_completion(json.dumps(completion).encode())
    assert (reply.reasoning_content, reply.content) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{"message": null, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": null}]}',
        b'{"choices": [{"message": {"content": "x"}, "finish_reason": "abort"}]}',
        b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"tool_calls": [{"id": "1"}]}, "finish_reason": "stop"}]}',
        b'\xff{"choices": 1}',
    ],
)
def test_what_is_no_completion_is_asked_again(body):
    with pytest.raises(RequestFailed) as failure:
        read_chat_completion(body)
    assert failure.value.reason == "bad_response" and failure.value.may_pass


def test_a_request_that_is_refused_fails_at_once_with_the_reason_of_the_server(server):
    with pytest.raises(RequestFailed, match="prompt is longer than the context") as failure:
        ask(server, [{"role": "user", "content": "too long"}])
    assert failure.value.reason == "http_400" and not failure.value.may_pass


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
                USER,
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


def test_another_server_takes_over_from_one_that_dies():
    class DyingClient(ChatClient):
        async def complete(self, messages, tools=None):
            if sum(server.answered for server in self._servers) >= 20:
                self._servers[0].url = "http://127.0.0.1:9/v1"
            return await super().complete(messages, tools)

    async def run(urls):
        async with DyingClient(urls, {}, retry=QUICK["retry"]) as client:
            messages = [[{"role": "user", "content": f"question {n}"}] for n in range(60)]
            replies = []
            for start in range(0, 60, 6):
                replies += await asyncio.gather(*map(client.complete, messages[start : start + 6]))
            return replies, [server.answered for server in client._servers]

    with fake_chat_server() as first, fake_chat_server() as second:
        replies, answered = asyncio.run(run([first, second]))
    assert [reply.content for reply in replies] == [f"echo of question {n}" for n in range(60)]
    assert sum(answered) == 60 and 0 < answered[0] < answered[1]


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
    from hf_dflash.data.completions import generate_completions_locally

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


def test_a_server_that_refuses_to_give_ids_is_asked_without(monkeypatch):
    asked = []

    async def post(self, server, body):
        asked.append(json.loads(body))
        if "return_token_ids" in asked[-1]:
            raise RequestFailed("http_422", "Unexpected fields: {'return_token_ids'}", may_pass=False)
        return json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}).encode()

    monkeypatch.setattr(ChatClient, "_post", post)
    monkeypatch.setattr(ChatClient, "_get_models", lambda self, server: asyncio.sleep(0, ["m"]))
    with pytest.warns(UserWarning, match="refuses return_token_ids"):
        assert ask("http://127.0.0.1:9/v1", [USER]).content == "yes"
    assert ["return_token_ids" in request for request in asked] == [True, False]


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
    from hf_dflash.data.completion_folder import CompletionFolder

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
