# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Asks servers that speak the OpenAI chat protocol (vLLM, SGLang) until each prompt is answered or has failed for good.

A request goes to the server with the fewest in flight. What may pass is tried again, at another server if there is one: a lost
connection, a time-out, 408, 425, 429, 5xx, a body that is cut or no chat completion. A server whose connection fails rests
for a while. What will not pass, such as a prompt that is too long, fails at once.
"""

import asyncio
import json
import random
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .chat import THINKING_TAGS
from .on_policy import Reply


if TYPE_CHECKING:
    import aiohttp


_PASSING_STATUSES = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
# A server may ask for more patience than this; then it is simply asked again.
_LONGEST_WAIT = 60.0


class RequestFailed(Exception):
    """
    A request that got no answer.

    Args:
        reason (`str`):
            One word, to count: `"http_503"`, `"timeout"`, `"connection"`, `"bad_response"`.
        detail (`str`):
            What exactly happened.
        may_pass (`bool`):
            Whether the same request may be answered later.
        wait (`float`, *optional*):
            Seconds that the server asks to wait.
    """

    def __init__(self, reason: str, detail: str, *, may_pass: bool, wait: float | None = None):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.may_pass = may_pass
        self.wait = wait


@dataclass(frozen=True)
class RetryPolicy:
    """
    How often and how long.

    Args:
        max_attempts (`int`, *optional*, defaults to 8):
            Tries for each request.
        timeout (`float`, *optional*, defaults to 1800.0):
            Seconds that one try may take: a long reply of a busy server takes minutes.
        connect_timeout (`float`, *optional*, defaults to 10.0):
            Seconds until a server accepts a connection.
        first_wait (`float`, *optional*, defaults to 1.0):
            Seconds before the second try. It doubles from try to try, up to a minute; half of it is random, so that
            clients do not come back all at once.
    """

    max_attempts: int = 8
    timeout: float = 1800.0
    connect_timeout: float = 10.0
    first_wait: float = 1.0

    def __post_init__(self):
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}.")
        if min(self.timeout, self.connect_timeout) <= 0 or self.first_wait < 0:
            raise ValueError("timeout and connect_timeout must be positive, and first_wait must not be negative.")

    def wait_after(self, attempt: int) -> float:
        """Seconds to wait after try number `attempt` (from 1)."""
        return min(_LONGEST_WAIT, self.first_wait * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)


@dataclass
class _Server:
    url: str
    in_flight: int = 0
    failures_in_a_row: int = 0
    rests_until: float = 0.0
    answered: int = 0


@dataclass
class ChatClient:
    """
    A client of one or several servers of the same target. An asynchronous context manager.

    Args:
        base_urls (`list[str]`):
            For example `["http://node1:8000/v1", "http://node2:8000/v1"]`.
        request_options (`dict`):
            Goes into each request: `max_tokens`, `temperature`, `chat_template_kwargs`, ...
        model (`str`, *optional*):
            Name of the model, by default the only one that the servers offer.
        retry ([`RetryPolicy`], *optional*):
            How often and how long.
        api_key (`str`, *optional*):
            Sent as a bearer token, and never logged.
        return_token_ids (`bool`, *optional*, defaults to `True`):
            Asks for the ids of the reply. vLLM and SGLang give them; others ignore the field, or refuse it, and then it is
            left out.

    Raises:
        `ConnectionError`: (on entering) a server does not answer.
        `ValueError`: (on entering) a server does not offer the model.
        `ImportError`: aiohttp is not installed.
    """

    base_urls: list[str]
    request_options: dict[str, Any]
    model: str | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    api_key: str | None = field(default=None, repr=False)
    return_token_ids: bool = True

    async def __aenter__(self):
        try:
            import aiohttp
        except ImportError:
            raise ImportError("Asking a server needs the package aiohttp: pip install 'hf-dflash[data]'") from None

        self._servers = [_Server(url.rstrip("/")) for url in self.base_urls]
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self.retry.timeout, sock_connect=self.retry.connect_timeout),
            # The number of requests is bounded by those who ask.
            connector=aiohttp.TCPConnector(limit=0),
        )
        try:
            for server in self._servers:
                self._check_model(server, await self._get_models(server))
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_):
        await self._session.close()

    async def complete(self, messages: list[dict], tools: list[dict] | None = None) -> Reply:
        """
        Has the target answer.

        Args:
            messages (`list[dict]`):
                The conversation so far.
            tools (`list[dict]`, *optional*):
                The tools that are offered.

        Raises:
            [`RequestFailed`]: no server answered, or the request is refused.
        """
        request = {"model": self.model, "messages": messages, **self.request_options}
        if tools:
            request["tools"] = tools
        asked_for_ids = self.return_token_ids
        try:
            return await self._complete({**request, "return_token_ids": True} if asked_for_ids else request)
        except RequestFailed as failure:
            if failure.may_pass or not asked_for_ids or "return_token_ids" not in failure.detail:
                raise
        if self.return_token_ids:
            warnings.warn(
                "The server refuses return_token_ids, so the replies are kept as text and tokenized later. vLLM and SGLang "
                "give the exact ids; --no_return_token_ids says that they are not wanted.",
                stacklevel=2,
            )
            self.return_token_ids = False
        return await self._complete(request)

    async def _complete(self, request: dict) -> Reply:
        body = json.dumps(request).encode()
        for attempt in range(1, self.retry.max_attempts + 1):
            server = self._choose_server()
            server.in_flight += 1
            try:
                reply = read_chat_completion(await self._post(server, body))
            except RequestFailed as failure:
                if not failure.may_pass or attempt == self.retry.max_attempts:
                    failure.detail += f" (server {server.url}, try {attempt})"
                    raise
                wait = self.retry.wait_after(attempt)
                if failure.reason == "connection":
                    server.failures_in_a_row += 1
                    server.rests_until = time.monotonic() + self.retry.wait_after(server.failures_in_a_row)
                if failure.wait is not None:
                    wait = max(wait, min(failure.wait, _LONGEST_WAIT))
            else:
                server.failures_in_a_row = 0
                server.answered += 1
                return reply
            finally:
                server.in_flight -= 1
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    def _choose_server(self) -> _Server:
        if len(self._servers) == 1:
            return self._servers[0]
        now = time.monotonic()
        return min(self._servers, key=lambda server: (max(0.0, server.rests_until - now), server.in_flight))

    async def _post(self, server: _Server, body: bytes) -> bytes:
        import aiohttp

        try:
            async with self._session.post(
                f"{server.url}/chat/completions", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                content = await response.read()
                if response.status == 200:
                    return content
                raise RequestFailed(
                    f"http_{response.status}",
                    _error_message(content),
                    may_pass=response.status in _PASSING_STATUSES,
                    wait=_retry_after(response),
                )
        except TimeoutError:
            raise RequestFailed("timeout", f"no answer within {self.retry.timeout:g} s", may_pass=True) from None
        except aiohttp.ClientPayloadError as error:
            raise RequestFailed("bad_response", f"the body is cut: {error}", may_pass=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("connection", f"{type(error).__name__}: {error}", may_pass=True) from None

    async def _get_models(self, server: _Server) -> list[str]:
        import aiohttp

        try:
            async with self._session.get(
                f"{server.url}/models", timeout=aiohttp.ClientTimeout(total=self.retry.connect_timeout)
            ) as response:
                content = await response.read()
                if response.status != 200:
                    raise ConnectionError(
                        f"{server.url}/models gives HTTP {response.status}: {_error_message(content)}. The address of a "
                        "server usually ends with /v1."
                    )
                return [model["id"] for model in json.loads(content)["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(
                f"{server.url} does not answer ({type(error).__name__}: {error}): start it, or leave it out."
            ) from None
        except (ValueError, LookupError, TypeError) as error:
            raise ConnectionError(f"{server.url}/models does not list models ({error}).") from None

    def _check_model(self, server: _Server, names: list[str]) -> None:
        if self.model is None:
            if len(names) != 1:
                raise ValueError(f"{server.url} offers {', '.join(names) or 'no model'}: choose one with --model.")
            self.model = names[0]
        elif self.model not in names:
            raise ValueError(f"{server.url} does not offer {self.model}, but {', '.join(names[:5])}.")


def read_chat_completion(content: bytes) -> Reply:
    """
    Reads the answer of a server.

    Args:
        content (`bytes`):
            The JSON of a `chat.completion`. Reasoning is read from `reasoning_content` or `reasoning`, and from the content if
            the server leaves it there; token ids from `token_ids` of the choice.

    Raises:
        [`RequestFailed`]: it is none.
    """
    try:
        completion = json.loads(content)
        choice = completion["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            reasoning = message.get("reasoning")
        token_ids = choice.get("token_ids")
        num_tokens = (completion.get("usage") or {}).get("completion_tokens")
        tool_calls = message.get("tool_calls") or None
        finish_reason = choice.get("finish_reason")
        # What makes no sense further on is no answer.
        for value, kind in (
            (text, str),
            (reasoning, str),
            (token_ids, list),
            (tool_calls, list),
            (finish_reason, str),
        ):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{str(value)[:50]!r} is not a {kind.__name__}")
        for call in tool_calls or ():
            call["function"]["name"], call["function"]["arguments"]
        json.dumps([text, reasoning], ensure_ascii=False).encode()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestFailed(
            "bad_response", f"{type(error).__name__}: {error}; it starts {content[:100]!r}", may_pass=True
        ) from None
    if finish_reason is None or finish_reason in ("abort", "error"):
        raise RequestFailed("bad_response", f"finish_reason is {finish_reason}", may_pass=True)
    if reasoning is None:
        reasoning, text = _split_inline_reasoning(text)
    if num_tokens is None:
        num_tokens = len(token_ids or ())
    return Reply(text, reasoning, tool_calls, finish_reason, token_ids or None, num_tokens)


def _split_inline_reasoning(text: str) -> tuple[str | None, str]:
    """Of a server without a reasoning parser. The opening tag is missing where the template has it in the prompt."""
    for opening, closing in THINKING_TAGS:
        if closing in text:
            reasoning, content = text.split(closing, 1)
            return reasoning.strip().removeprefix(opening).strip("\n"), content.lstrip("\n")
    return None, text


def _error_message(content: bytes) -> str:
    try:
        error = json.loads(content)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
    except (ValueError, AttributeError):
        return content[:300].decode(errors="replace")


def _retry_after(response: "aiohttp.ClientResponse") -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (LookupError, ValueError):
        return None
