# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
A server on loopback that speaks the OpenAI chat protocol, and misbehaves as servers under load do.

What it answers is a function of the conversation: `echo of <the last message>`, with the bytes of that as token ids.
"""

import asyncio
import json
import multiprocessing
import random
from collections import Counter
from contextlib import contextmanager


MODEL = "fake-target"
EOS = 2
# Longer than the clients of the tests wait.
HANG_SECONDS = 5.0


def reply_to(messages):
    return f"echo of {messages[-1]['content']}"


def make_completion(request):
    text = reply_to(request["messages"])
    ids = [*text.encode(), EOS]
    message = {"role": "assistant", "content": text}
    finish_reason = "stop"
    if (request.get("chat_template_kwargs") or {}).get("enable_thinking"):
        message["reasoning_content"] = f"thoughts about {request['messages'][-1]['content']}"
    if request.get("tools") and request["messages"][-1]["role"] == "user":
        function = {"name": request["tools"][0]["function"]["name"], "arguments": '{"city": "Rome"}'}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        finish_reason = "tool_calls"
    if len(ids) > request.get("max_tokens", 10**6):
        ids, finish_reason = ids[: request["max_tokens"]], "length"
        message["content"] = bytes(ids).decode()
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    if request.get("return_token_ids"):
        choice["token_ids"] = ids
    usage = {"prompt_tokens": 10, "completion_tokens": len(ids), "total_tokens": 10 + len(ids)}
    return {"id": "chat-1", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


FAULTS = ("429", "500", "502", "hang", "drop", "cut_body", "cut_json", "no_choices", "aborted")


class FakeChatServer:
    """With probability `fault_share` a request meets one of `FAULTS`; one whose text has `too long` always gets a 400."""

    def __init__(self, fault_share=0.0, seed=0):
        self.fault_share = fault_share
        self.random = random.Random(seed)
        self.counts = Counter()

    async def models(self, request):
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def chat_completions(self, request):
        from aiohttp import web

        body = await request.json()
        self.counts["requests"] += 1
        if "too long" in str(body["messages"]):
            return web.json_response(
                {"error": {"message": "prompt is longer than the context", "code": 400}}, status=400
            )
        completion = make_completion(body)
        fault = self.random.choice(FAULTS) if self.random.random() < self.fault_share else None
        self.counts[fault or "answered"] += 1
        if fault == "429":
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "0.01"})
        if fault in ("500", "502"):
            return web.Response(text="<html>bad gateway</html>", status=int(fault))
        if fault == "hang":
            await asyncio.sleep(HANG_SECONDS)
        if fault == "drop":
            request.transport.abort()
            return web.Response()
        content = json.dumps(completion).encode()
        if fault == "cut_body":
            response = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            request.transport.close()
            return response
        if fault == "cut_json":
            content = content[: len(content) // 2]
        if fault == "no_choices":
            content = json.dumps({**completion, "choices": []}).encode()
        if fault == "aborted":
            completion["choices"][0]["finish_reason"] = "abort"
            content = json.dumps(completion).encode()
        return web.Response(body=content, content_type="application/json")

    async def report(self, request):
        from aiohttp import web

        return web.json_response(self.counts)


def _serve(connection, fault_share, seed):
    from aiohttp import web

    async def run():
        server = FakeChatServer(fault_share, seed)
        application = web.Application(client_max_size=2**24)
        application.router.add_get("/v1/models", server.models)
        application.router.add_post("/v1/chat/completions", server.chat_completions)
        application.router.add_get("/report", server.report)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        connection.send(site._server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def fake_chat_server(fault_share=0.0, seed=0):
    """Runs the server in a process of its own; gives its base URL."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, fault_share, seed), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.kill()
        process.join()
