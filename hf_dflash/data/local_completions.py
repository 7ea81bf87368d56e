# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Transformers writes the completions, on devices of this machine.

`completion_folder.py` describes the folder, `on_policy.py` what becomes of a conversation of several turns,
`local_generation.py` how a batch is answered.
"""

import itertools
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .chat import THINKING_TAGS, ChatRenderer, opened_thinking, require_chat_template
from .completion_folder import CompletionFolder, ReplyLimits
from .completion_progress import LiveTable
from .conversations import Conversation, RowSkipped
from .local_generation import LocalGenerator, LocalSampling, plan_generation_batches
from .on_policy import PromptConversation, Reply
from .prompts import count_prompts, read_prompts
from .sources import digest_of, list_sources


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


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
    chat_template: str | None = None,
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
    Answers prompts with a transformers model, in batches.

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
            Prompts that are longer fail, as do those that leave no room for `max_new_tokens` in the target's context.
        token_budget (`int`, *optional*, defaults to 131072):
            Cached tokens of a batch: rows x (longest prompt + `max_new_tokens`). A batch that does not fit nevertheless is
            halved.
        max_batch_rows (`int`, *optional*, defaults to 1024):
            Rows of a batch.
        temperature, top_p, top_k, seed:
            See [`~data.local_generation.LocalSampling`]. Greedy by default. A `repetition_penalty` in the target's generation
            config is applied, as servers apply it; of whatever else it says about which tokens are written a warning tells.
        enable_thinking (`bool`, *optional*):
            For the chat template; `None` leaves it to the template.
        chat_template (`str`, *optional*):
            The template as text, if the target is served with another than its own. Tokenizing takes the same one.
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
        `ValueError`: an option is out of range, there is no chat template, or the folder holds another run.
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
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    require_chat_template(tokenizer)
    generation_config = _generation_config(model)
    eos_token_ids = _end_of_sequence_ids(generation_config, tokenizer)
    sampling = _add_repetition_penalty(sampling, generation_config)
    template_options = dict(chat_template_kwargs or {})
    if enable_thinking is not None:
        template_options["enable_thinking"] = enable_thinking
    if devices is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    room = _context_length(model) - max_new_tokens
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
    if chat_template is not None:
        options["chat_template_digest"] = digest_of(chat_template)
    if sampling.repetition_penalty != 1:
        options["repetition_penalty"] = sampling.repetition_penalty
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
                asked = _render_prompts(waiting, renderer, folder, max_prompt_tokens, room)
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


def _load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _generation_config(model: "str | PreTrainedModel") -> "GenerationConfig":
    from transformers import GenerationConfig

    if not isinstance(model, str):
        return model.generation_config
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return GenerationConfig()  # no such file


def _context_length(model: "str | PreTrainedModel") -> float:
    """Tokens that the target was made to read. Behind them it writes on without a word, but nothing that it would be served for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or float("inf")


def _add_repetition_penalty(sampling: LocalSampling, config: "GenerationConfig") -> LocalSampling:
    """The sampling with the penalty of the generation config. What else there is in it goes unheeded, but not unsaid."""
    from ..decoding.generation_settings import settings_that_decide

    unheeded = settings_that_decide(config, do_sample=sampling.temperature > 0)
    penalty = unheeded.pop("repetition_penalty", 1.0)
    unheeded.pop("temperature", None)
    for name in ("top_p", "top_k"):
        if getattr(sampling, name) != getattr(LocalSampling, name):
            unheeded.pop(name, None)
    if unheeded:
        settings = ", ".join(f"{name} {value}" for name, value in unheeded.items())
        options = " ".join(f"--{name} {unheeded[name]}" for name in ("top_p", "top_k") if name in unheeded)
        logger.warning(
            f"Replies are written without what the target's generation config says beside: {settings}."
            + (f" To write them with it, give {options}." if options else "")
        )
    return replace(sampling, repetition_penalty=penalty)


def _end_of_sequence_ids(config: "GenerationConfig", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """All ids that end a reply: targets list several in their generation config, and the tokenizer may add its own."""
    configured = config.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError("Neither the generation config nor the tokenizer of the target says which id ends a reply.")
    return sorted(ids)


def _render_prompts(
    conversations: list[PromptConversation],
    renderer: ChatRenderer,
    folder: CompletionFolder,
    max_prompt_tokens: int,
    room: float,
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
        elif len(ids) > room:
            detail = f"{len(ids)} tokens, but max_new_tokens leaves room for {room} in the target's context"
            folder.fail(conversation.id, "prompt_too_long", detail)
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
