# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
The target writes the completions that its drafter learns from: prompts in, a folder of JSONL shards out.

Either a server that speaks the OpenAI protocol answers (vLLM, SGLang; any number of them), or transformers does on devices of
this machine. `completion_folder.py` describes the folder, `on_policy.py` what becomes of a conversation of several turns.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hf_dflash.object_store import is_object_uri

from ..command_line import CommandParser
from ..progress import ProgressBar
from .chat import THINKING_TAGS, ChatRenderer, opened_thinking
from .chat_client import ChatClient, RequestFailed, RetryPolicy
from .completion_folder import CompletionFolder, ReplyLimits
from .conversations import Conversation, RowSkipped
from .local_generation import LocalGenerator, LocalSampling, plan_generation_batches
from .on_policy import PromptConversation, Reply
from .sources import Source, cut_into_units, list_sources, parse_line, read_rows


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Prompts that are tokenized and sorted by length together. More gives fuller batches, and rows come back later.
_LOCAL_CHUNK_ROWS = 32_768


def generate_completions_locally(
    prompts: str | os.PathLike | list[str | os.PathLike],
    output_dir: str | os.PathLike,
    model: "str | os.PathLike | PreTrainedModel",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    devices: list[str] | None = None,
    dtype: str = "bfloat16",
    max_new_tokens: int = 1024,
    max_prompt_tokens: int = 4096,
    token_budget: int = 131_072,
    max_batch_rows: int = 1024,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    enable_thinking: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_rows: int | None = None,
    time_limit: float | None = None,
    shard_rows: int = 500,
    upload_to: str | None = None,
    endpoint_url: str | None = None,
    limits: ReplyLimits | None = ReplyLimits(),  # noqa: B008 (frozen)
    disable_tqdm: bool = False,
) -> dict:
    """
    Answers prompts with a transformers model, in batches (issue 8).

    A folder that holds a part of the same run goes on where it was.

    Args:
        prompts (`str` or `list[str]`):
            JSONL files (plain or .gz), folders, globs, `s3://bucket/prefix`, `hub://dataset`.
        output_dir (`str` or `os.PathLike`):
            The folder of completions.
        model (`str`, `os.PathLike` or `PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            By default that of `model`, which must then be a name or folder.
        devices (`list[str]`, *optional*):
            For example `["cuda:0", "cuda:1"]`; one process each. By default all CUDA devices, or the CPU.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            `"bfloat16"`, `"float16"`, `"float32"` or `"float64"`, for a model that is loaded.
        max_new_tokens (`int`, *optional*, defaults to 1024):
            Longer replies are cut, with `finish_reason` `"length"`.
        max_prompt_tokens (`int`, *optional*, defaults to 4096):
            Prompts that are longer fail.
        token_budget (`int`, *optional*, defaults to 131072):
            Cached tokens of a batch: rows x (longest prompt + `max_new_tokens`). A batch that does not fit nevertheless is
            halved.
        max_batch_rows (`int`, *optional*, defaults to 1024):
            Rows of a batch.
        temperature, top_p, top_k, seed:
            See [`~data.local_generation.LocalSampling`]. Greedy by default.
        enable_thinking (`bool`, *optional*):
            For the chat template; `None` leaves it to the template.
        chat_template_kwargs (`dict`, *optional*):
            Further variables for the chat template.
        max_rows (`int`, *optional*):
            Only the first prompts.
        time_limit (`float`, *optional*):
            Seconds after which no further batch is started. The next run goes on.
        shard_rows, upload_to, endpoint_url, limits:
            See [`~data.completion_folder.CompletionFolder`].
        disable_tqdm (`bool`, *optional*, defaults to `False`):
            If `True`, no progress is shown.

    Returns:
        `dict`: the manifest: `status` (`"finished"`, or `"running"` after `time_limit`), `options` and `counts`.

    Raises:
        [`~data.completion_folder.RepliesRefused`]: the replies are useless.
        `FileNotFoundError`: there are no such prompts.
        `ValueError`: an option is out of range, or the folder holds another run.
    """
    import torch

    sampling = LocalSampling(temperature, top_p, top_k, seed)
    bounds = (max_new_tokens, max_prompt_tokens, token_budget, max_batch_rows)
    if min(bounds) < 1:
        raise ValueError(
            "max_new_tokens, max_prompt_tokens, token_budget and max_batch_rows must be at least 1, "
            f"but are {', '.join(map(str, bounds))}."
        )
    deadline = None if time_limit is None else time.monotonic() + time_limit
    if isinstance(model, os.PathLike):
        model = str(model)
    name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
    if tokenizer is None:
        if not isinstance(model, str):
            raise ValueError("A model in memory needs its tokenizer: give tokenizer=.")
        tokenizer = _load_tokenizer(model)
    eos_token_ids = _end_of_sequence_ids(model, tokenizer)
    template_options = dict(chat_template_kwargs or {})
    if enable_thinking is not None:
        template_options["enable_thinking"] = enable_thinking
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    options = {
        "written_by": "transformers",
        "target": name,
        "dtype": dtype,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "chat_template_kwargs": template_options,
    }
    sources = list_sources(prompts, endpoint_url=endpoint_url)
    with (
        CompletionFolder(
            output_dir, options, shard_rows=shard_rows, upload_to=upload_to, endpoint_url=endpoint_url, limits=limits
        ) as folder,
        LocalGenerator(
            model,
            devices,
            getattr(torch, dtype),
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            sampling=sampling,
        ) as generator,
        LiveTable(folder, count_prompts(sources, max_rows), disable=disable_tqdm) as table,
    ):
        renderer = ChatRenderer(tokenizer, chat_template_kwargs=template_options, eos_token_ids=eos_token_ids)
        conversations = read_prompts(sources, folder, endpoint_url=endpoint_url, max_rows=max_rows)
        while waiting := list(itertools.islice(conversations, _LOCAL_CHUNK_ROWS)):
            while waiting:
                # Turn by turn: those that go on are asked again, together with others of their new length.
                asked = _render_prompts(waiting, renderer, folder, max_prompt_tokens)
                batches = plan_generation_batches(
                    [len(ids) for _, _, ids in asked], max_new_tokens, token_budget, max_batch_rows
                )
                # The longest batch comes first, to see whether it fits; the others mixed, so that the latest replies, which
                # the limits look at, are of all lengths.
                rest = batches[1:]
                random.Random(seed).shuffle(rest)
                batches = batches[:1] + rest
                waiting = []
                prompt_ids = ([asked[index][2] for index in batch] for batch in batches)
                for number, replies in generator.generate(_until(deadline, prompt_ids)):
                    for index, ids in zip(batches[number], replies, strict=True):
                        conversation, prompt, _ = asked[index]
                        conversation.add(_read_generated(ids, prompt, tokenizer, eos_token_ids))
                        if conversation.is_finished:
                            row = conversation.completion_row()
                            if template_options:
                                row["chat_template_kwargs"] = template_options
                            folder.add(row, conversation.replies)
                        else:
                            waiting.append(conversation)
                    table.update()
                if deadline is not None and time.monotonic() > deadline:
                    return folder.interrupt()
        return folder.finish()


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
    Has servers answer prompts that speak the OpenAI protocol (issue 8).

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


# ---- prompts


def read_prompts(
    sources: list[Source], folder: CompletionFolder, *, endpoint_url: str | None = None, max_rows: int | None = None
) -> Iterator[PromptConversation]:
    """
    Reads the prompts that `folder` has no answer to. Rows that are no prompts, and those with an id that an earlier row
    has, are listed as failed.

    Args:
        sources (`list[Source]`):
            What [`~data.sources.list_sources`] found.
        folder ([`~data.completion_folder.CompletionFolder`]):
            Where the answers go.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        max_rows (`int`, *optional*):
            Only the first rows.
    """
    seen: set[str] = set()
    lines = _read_lines(sources, endpoint_url)
    for where, content in itertools.islice(lines, max_rows):
        try:
            conversation = PromptConversation(parse_line(content))
        except RowSkipped as skipped:
            folder.fail(None, skipped.reason, str(skipped), where)
            continue
        if conversation.id in seen:
            folder.fail(conversation.id, "duplicate_id", "an earlier row has the same id", where)
            continue
        seen.add(conversation.id)
        if conversation.id not in folder.answered:
            yield conversation


def _read_lines(sources: list[Source], endpoint_url: str | None) -> Iterator[tuple[str, bytes | dict]]:
    """Where each row is, and the row; blank lines are none."""
    for parts in cut_into_units(sources):
        for part in parts:
            source = sources[part.source]
            for line, content in read_rows(source, part, endpoint_url=endpoint_url):
                if not isinstance(content, bytes) or content.strip():
                    yield f"{source.uri}:{line}", content


def count_prompts(sources: list[Source], max_rows: int | None = None) -> int | None:
    """The number of prompts, for the progress bar; `None` if they would have to be downloaded to be counted."""
    if any(is_object_uri(source.uri) for source in sources):
        return max_rows
    count = sum(1 for _ in _read_lines(sources, None))
    return count if max_rows is None else min(count, max_rows)


# ---- local generation


def _load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _end_of_sequence_ids(model: "str | PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """All ids that end a reply: targets list several in their generation config, and the tokenizer may add its own."""
    from transformers import GenerationConfig

    if isinstance(model, str):
        try:
            configured = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:
            configured = None  # no such file: the tokenizer's own is all there is
    else:
        configured = model.generation_config.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError("Neither the generation config nor the tokenizer of the target says which id ends a reply.")
    return sorted(ids)


def _render_prompts(
    conversations: list[PromptConversation], renderer: ChatRenderer, folder: CompletionFolder, max_prompt_tokens: int
) -> list[tuple[PromptConversation, str, list[int]]]:
    """Conversations with the text and the ids of their next prompt, exactly as `hf-dflash tokenize` will make them."""
    rendered = []
    for conversation in conversations:
        try:
            asked = Conversation(conversation.messages, conversation.tools)
            rendered.append((conversation, renderer.render(asked, asked.messages, add_generation_prompt=True)))
        except RowSkipped as skipped:
            folder.fail(conversation.id, skipped.reason, str(skipped))
    encoded = renderer.encode([prompt for _, prompt in rendered])
    result = []
    for (conversation, prompt), ids in zip(rendered, encoded, strict=True):
        if len(ids) > max_prompt_tokens:
            folder.fail(
                conversation.id, "prompt_too_long", f"{len(ids)} tokens, but max_prompt_tokens={max_prompt_tokens}"
            )
        else:
            result.append((conversation, prompt, ids))
    return result


def _read_generated(
    ids: list[int], prompt: str, tokenizer: "PreTrainedTokenizerBase", eos_token_ids: list[int]
) -> Reply:
    is_cut = ids[-1] not in eos_token_ids
    # Special tokens within a reply stay: they are what the target wrote.
    text = tokenizer.decode(ids if is_cut else ids[:-1], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    reasoning, content = split_reasoning(text, prompt)
    return Reply(
        content,
        reasoning_content=reasoning,
        finish_reason="length" if is_cut else "stop",
        completion_token_ids=ids,
        num_tokens=len(ids),
    )


def split_reasoning(text: str, prompt: str) -> tuple[str | None, str]:
    """
    Reasoning and answer of a generated text.

    Args:
        text (`str`):
            What was generated.
        prompt (`str`):
            What it was generated behind: some templates open the thinking there.

    Returns:
        `tuple[str | None, str]`: the reasoning without its tags, or `None` if there is no thinking, and the answer.
    """
    tags = opened_thinking(prompt)
    if tags is None:
        tags = next((tags for tags in THINKING_TAGS if text.lstrip().startswith(tags[0])), None)
        if tags is None:
            return None, text
        text = text.lstrip().removeprefix(tags[0])
    reasoning, _, content = text.partition(tags[1])
    return reasoning.strip("\n"), content.lstrip("\n")


def _until(deadline: float | None, items: Iterable) -> Iterator:
    """The items, as long as there is time."""
    return items if deadline is None else itertools.takewhile(lambda _: time.monotonic() < deadline, items)


# ---- what is seen while it runs


class LiveTable:
    """
    The progress bar: rows/s, and behind it tokens/s, the share of replies cut by the length limit, that of empty ones, and
    the prompts that failed. A context manager.

    Args:
        folder ([`~data.completion_folder.CompletionFolder`]):
            An open folder.
        total (`int`, *optional*):
            Prompts.
        disable (`bool`, *optional*, defaults to `False`):
            If `True`, nothing is shown.
    """

    def __init__(self, folder: CompletionFolder, total: int | None, *, disable: bool = False):
        self._counts = folder.watch.counts
        self._started = time.monotonic()
        self._answered_before = len(folder.answered)
        self._bar = ProgressBar(
            total=total,
            initial=self._answered_before,
            unit=" rows",
            desc="Completions",
            disable=disable,
            smoothing=0.05,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.update()
        self._bar.close()

    def update(self) -> None:
        """Shows the present counts."""
        counts = self._counts
        rows = counts["rows"]
        self._bar.set_postfix_str(
            f"{counts['completion_tokens'] / (time.monotonic() - self._started):,.0f} tokens/s, "
            f"cut {counts['cut'] / max(1, rows):.1%}, empty {counts['empty'] / max(1, rows):.1%}, "
            f"failed {counts['failed']}",
            refresh=False,
        )
        self._bar.update(self._answered_before + rows + counts["failed"] - self._bar.n)


# ---- command line


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash generate PROMPTS... OUT`."""
    arguments = vars(_parser().parse_args(argv))
    base_urls, target = arguments.pop("server"), arguments.pop("target")
    limits = ReplyLimits(
        **{name: arguments.pop(name) for name in ("max_empty_share", "max_identical_share", "max_failed_share")}
    )
    if arguments.pop("no_limits"):
        limits = None
    retry = RetryPolicy(arguments.pop("max_attempts"), arguments.pop("timeout"))
    api_key = os.environ.get(arguments.pop("api_key_variable"))
    given = {name: value for name, value in arguments.items() if value is not None}
    other = _LOCAL_OPTIONS if base_urls else _SERVER_OPTIONS
    if misplaced := sorted(given.keys() & other):
        raise ValueError(f"--{misplaced[0]} is for {'--target' if base_urls else '--server'}.")
    if base_urls:
        manifest = generate_completions_from_servers(
            base_urls=base_urls, output_dir=given.pop("output"), retry=retry, api_key=api_key, limits=limits, **given
        )
    else:
        manifest = generate_completions_locally(model=target, output_dir=given.pop("output"), limits=limits, **given)
    counts = manifest["counts"]
    print(
        f"{counts['rows']} rows in {arguments['output']}: {counts['cut']} cut by the length limit, {counts['empty']} empty; "
        f"{counts['failed']} prompts failed" + (" (failures.jsonl says why)." if counts["failed"] else ".")
    )
    if manifest["status"] != "finished":
        print("The time is over before the prompts are. Run the same command again to go on.")
    elif not counts["rows"]:
        raise ValueError(_why_nothing(arguments["prompts"], arguments["output"], counts["failed"]))
    return 0


def _why_nothing(prompts: list[str], folder: str, num_failed: int) -> str:
    if not num_failed:
        return f"There is no prompt in {', '.join(prompts)}."
    with open(os.path.join(folder, "failures.jsonl"), encoding="utf-8") as file:
        first = json.loads(file.readline())
    return f"Not one of {num_failed} prompts was answered. The first, {first['id'] or first.get('where')}: {first['detail']}"


_LOCAL_OPTIONS = {"devices", "dtype", "max_prompt_tokens", "token_budget", "max_batch_rows", "time_limit"}
_SERVER_OPTIONS = {"model", "concurrency", "request_options", "return_token_ids"}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash generate",
        description="The target writes the completions that its drafter learns from. The same command goes on with a run "
        "that was stopped.",
        epilog="Exit status: 0 if every prompt is answered or listed in failures.jsonl, 2 if the run was refused or stopped, or if "
        "not one prompt was answered.",
    )
    parser.add_argument("prompts", nargs="+", help="JSONL files, folders, globs, s3:// prefixes or hub:// datasets")
    parser.add_argument("output", help="folder of completions")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", nargs="+", metavar="URL", help="servers of the target, such as http://node1:8000/v1"
    )
    where.add_argument("--target", help="name or folder of the target, to answer on this machine")

    group = parser.add_argument_group("sampling (default: what the server chooses; greedy on this machine)")
    group.add_argument("--max_new_tokens", type=int, help="longer replies are cut")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top_p", type=float)
    group.add_argument("--top_k", type=int)
    group.add_argument("--seed", type=int)
    group.add_argument("--enable_thinking", action=argparse.BooleanOptionalAction, help="for the chat template")
    group.add_argument(
        "--chat_template_kwargs", type=json.loads, metavar="JSON", help="further variables for the template"
    )

    group = parser.add_argument_group("output")
    group.add_argument("--max_rows", type=int, help="only the first prompts")
    group.add_argument("--shard_rows", type=int, default=500, help="rows of a file (default: 500)")
    group.add_argument("--upload_to", metavar="URI", help="s3://bucket/prefix to copy each file to when it is full")
    group.add_argument("--endpoint_url", help="address of the object store, if not Amazon's")

    defaults = ReplyLimits()
    group = parser.add_argument_group("when to stop (shares of the latest replies)")
    for name in ("max_empty_share", "max_identical_share", "max_failed_share"):
        default = getattr(defaults, name)
        group.add_argument(f"--{name}", type=float, default=default, help=f"(default: {default})")
    group.add_argument("--no_limits", action="store_true", help="stop never")

    retry = RetryPolicy()
    group = parser.add_argument_group("with --server")
    group.add_argument("--model", help="its name at the servers (default: the only one)")
    group.add_argument("--concurrency", type=int, help="requests in flight at each server (default: 64)")
    group.add_argument("--timeout", type=float, default=retry.timeout, help="seconds for a reply (default: 1800)")
    group.add_argument(
        "--max_attempts", type=int, default=retry.max_attempts, help="tries for each reply (default: 8)"
    )
    group.add_argument("--request_options", type=json.loads, metavar="JSON", help="what else goes into each request")
    group.add_argument("--no_return_token_ids", dest="return_token_ids", action="store_const", const=False)
    group.add_argument("--api_key_variable", default="OPENAI_API_KEY", help="environment variable that holds the key")

    group = parser.add_argument_group("with --target")
    group.add_argument("--devices", nargs="+", help="such as cuda:0 cuda:1 (default: all)")
    group.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"], help="(default: bfloat16)")
    group.add_argument("--max_prompt_tokens", type=int, help="longer prompts fail (default: 4096)")
    group.add_argument("--token_budget", type=int, help="cached tokens of a batch (default: 131072)")
    group.add_argument("--max_batch_rows", type=int, help="rows of a batch (default: 1024)")
    group.add_argument("--time_limit", type=float, help="seconds after which no further batch is started")
    return parser
