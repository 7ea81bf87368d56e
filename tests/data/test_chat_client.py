# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import asyncio
import json

import pytest
from fake_chat_server import EOS, fake_chat_server

from hf_dflash.data.chat_client import ChatClient, RequestFailed, RetryPolicy, read_chat_completion


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


def test_another_server_takes_over_from_one_that_dies():
    class DyingClient(ChatClient):
        async def complete(self, messages, tools=None):
            if sum(server.answered for server in self._servers) >= 20:
                self._servers[0].url = "http://127.0.0.1:9/v1"
            return await super().complete(messages, tools)

    async def run(urls):
        async with DyingClient(urls, {}, retry=RetryPolicy(max_attempts=30, timeout=1.5, first_wait=0.01)) as client:
            messages = [[{"role": "user", "content": f"question {n}"}] for n in range(60)]
            replies = []
            for start in range(0, 60, 6):
                replies += await asyncio.gather(*map(client.complete, messages[start : start + 6]))
            return replies, [server.answered for server in client._servers]

    with fake_chat_server() as first, fake_chat_server() as second:
        replies, answered = asyncio.run(run([first, second]))
    assert [reply.content for reply in replies] == [f"echo of question {n}" for n in range(60)]
    assert sum(answered) == 60 and 0 < answered[0] < answered[1]


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
