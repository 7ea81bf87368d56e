# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Servers write the completions: any number of them, of the same target, that speak the OpenAI protocol (vLLM, SGLang).

`completion_folder.py` describes the folder, `on_policy.py` what becomes of a conversation of several turns.
"""

import asyncio
import os
from typing import Any

from .chat_client import ChatClient, RequestFailed, RetryPolicy
from .completion_folder import CompletionFolder, ReplyLimits
from .completion_progress import LiveTable
from .prompts import count_prompts, read_prompts
from .sources import Source, list_sources


def generate_completions_from_servers(
    prompts: str | os.PathLike | list[str | os.PathLike],
    output_dir: str | os.PathLike,
    base_urls: list[str],
    *,
    model: str | None = None,
    api_key: str | None = None,
    concurrency: int = 64,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008 (frozen)
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    enable_thinking: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    request_options: dict[str, Any] | None = None,
    return_token_ids: bool = True,
    max_rows: int | None = None,
    shard_rows: int = 500,
    upload_to: str | None = None,
    endpoint_url: str | None = None,
    limits: ReplyLimits | None = ReplyLimits(),  # noqa: B008 (frozen)
    disable_tqdm: bool = False,
) -> dict:
    """
    Has servers answer prompts that speak the OpenAI protocol.

    A folder that holds a part of the same run goes on where it was.

    Args:
        prompts (`str` or `list[str]`):
            JSONL files (plain or .gz), folders, globs, `s3://bucket/prefix`, `hub://dataset`.
        output_dir (`str` or `os.PathLike`):
            The folder of completions.
        base_urls (`list[str]`):
            Servers of the same target, for example `["http://node1:8000/v1"]`.
        model (`str`, *optional*):
            Its name there, by default the only one.
        api_key (`str`, *optional*):
            Sent as a bearer token; not stored.
        concurrency (`int`, *optional*, defaults to 64):
            Requests in flight at each server.
        retry ([`~data.chat_client.RetryPolicy`], *optional*):
            How often and how long.
        max_new_tokens, temperature, top_p, top_k, seed (*optional*):
            As in the protocol. What is not given is the server's choice: vLLM and SGLang take it from the target's generation
            config.
        enable_thinking (`bool`, *optional*):
            For the chat template; `None` leaves it to the template.
        chat_template_kwargs (`dict`, *optional*):
            Further variables for the chat template.
        request_options (`dict`, *optional*):
            Anything else that goes into a request, for example `{"min_p": 0.05}`.
        return_token_ids (`bool`, *optional*, defaults to `True`):
            Asks for the exact ids of the replies. A server that does not know the field ignores it, or refuses it, and then
            it is left out.
        max_rows (`int`, *optional*):
            Only the first prompts.
        shard_rows, upload_to, endpoint_url, limits:
            See [`~data.completion_folder.CompletionFolder`].
        disable_tqdm (`bool`, *optional*, defaults to `False`):
            If `True`, no progress is shown.

    Returns:
        `dict`: the manifest: `status`, `options` and `counts`.

    Raises:
        [`~data.completion_folder.RepliesRefused`]: the replies are useless, or too many requests fail.
        `ConnectionError`: a server does not answer at the start.
        `FileNotFoundError`: there are no such prompts.
        `ValueError`: an option is out of range, or the folder holds another run.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}.")
    if not base_urls:
        raise ValueError("There is no server: give at least one address.")
    template_options = dict(chat_template_kwargs or {})
    if enable_thinking is not None:
        template_options["enable_thinking"] = enable_thinking
    named = {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked = {name: value for name, value in named.items() if value is not None} | dict(request_options or {})
    if template_options:
        asked["chat_template_kwargs"] = template_options
    sources = list_sources(prompts, endpoint_url=endpoint_url)
    client = ChatClient(base_urls, asked, model, retry, api_key, return_token_ids)
    return asyncio.run(
        _ask_servers(
            client,
            sources,
            concurrency * len(base_urls),
            max_rows,
            endpoint_url,
            disable_tqdm,
            folder_options={
                "path": output_dir,
                "shard_rows": shard_rows,
                "upload_to": upload_to,
                "endpoint_url": endpoint_url,
                "limits": limits,
            },
        )
    )


async def _ask_servers(
    client: ChatClient,
    sources: list[Source],
    num_askers: int,
    max_rows: int | None,
    endpoint_url: str | None,
    disable_tqdm: bool,
    folder_options: dict[str, Any],
) -> dict:
    async with client:
        options = {"written_by": "server", "target": client.model, "request": client.request_options}
        template_options = client.request_options.get("chat_template_kwargs")
        with (
            CompletionFolder(options=options, **folder_options) as folder,
            LiveTable(folder, count_prompts(sources, max_rows), disable=disable_tqdm) as table,
        ):
            conversations = read_prompts(sources, folder, endpoint_url=endpoint_url, max_rows=max_rows)

            async def ask():
                for conversation in conversations:
                    try:
                        while not conversation.is_finished:
                            conversation.add(await client.complete(conversation.messages, conversation.tools))
                    except RequestFailed as failure:
                        folder.fail(conversation.id, failure.reason, failure.detail)
                    else:
                        row = conversation.completion_row()
                        if template_options:
                            row["chat_template_kwargs"] = template_options
                        folder.add(row, conversation.replies)
                    table.update()

            # One iterator for all: each prompt is taken by one of them.
            askers = [asyncio.create_task(ask()) for _ in range(num_askers)]
            try:
                await asyncio.gather(*askers)
            finally:
                for asker in askers:
                    asker.cancel()
                await asyncio.gather(*askers, return_exceptions=True)
            manifest = folder.finish()
        return manifest
