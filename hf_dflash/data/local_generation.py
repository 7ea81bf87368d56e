# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Batched generation with a transformers model: left-padded rows of similar length, finished rows leave the batch.

The replies of a batch are those that `generate` gives one by one, up to the rounding of other matrix shapes. There is no
server and no kernel of its own here: it is for targets that one device holds with room to spare.
"""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_sentinels
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# How often finished rows are looked for: each time the host waits for the device.
_STEPS_BETWEEN_CHECKS = 8
# Rows leave the batch when at least this share of it is finished: each time the whole cache is copied.
_FINISHED_SHARE = 0.1


@dataclass(frozen=True)
class LocalSampling:
    """
    How the next token is chosen.

    Args:
        temperature (`float`, *optional*, defaults to 0.0):
            0 is greedy.
        top_p (`float`, *optional*, defaults to 1.0):
            Smallest set of tokens with this probability; 1 is all.
        top_k (`int`, *optional*, defaults to 0):
            Most probable tokens to choose from; 0 is all.
        seed (`int`, *optional*, defaults to 0):
            A batch of the same rows gives the same replies.
        repetition_penalty (`float`, *optional*, defaults to 1.0):
            Of `generate`, on tokens of prompt and reply; 1 is none.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number that is not negative, but is {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], but is {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, but is {self.top_k}.")
        for name in ("top_p", "top_k"):
            if self.temperature == 0 and getattr(self, name) != getattr(LocalSampling, name):
                raise ValueError(f"{name} changes nothing when decoding is greedy: give a temperature too.")


def plan_generation_batches(
    lengths: list[int], max_new_tokens: int, token_budget: int, max_rows: int
) -> list[list[int]]:
    """
    Cuts prompts, sorted by length, into batches whose cache fits: rows x (longest prompt + `max_new_tokens`) is at most
    `token_budget`, or the batch is a single row.

    Args:
        lengths (`list[int]`):
            Prompt tokens.
        max_new_tokens (`int`):
            Tokens a reply may have.
        token_budget (`int`):
            Cached tokens, padding included.
        max_rows (`int`):
            Rows of a batch.

    Returns:
        `list[list[int]]`: indices into `lengths`, the longest prompts first, so that what does not fit shows at once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        batch = batches[-1] if batches else []
        # The first row of a batch is its longest.
        if (
            not batch
            or len(batch) == max_rows
            or (len(batch) + 1) * (lengths[batch[0]] + max_new_tokens) > token_budget
        ):
            batches.append([index])
        else:
            batch.append(index)
    return batches


@torch.no_grad()
def generate_replies(
    model: "PreTrainedModel",
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: list[int],
    sampling: LocalSampling = LocalSampling(),  # noqa: B008 (frozen)
) -> list[list[int]]:
    """
    Generates one reply to each prompt, all in one batch.

    Args:
        model (`PreTrainedModel`):
            A causal language model in evaluation mode.
        prompts (`list[list[int]]`):
            Token ids; none is empty.
        max_new_tokens (`int`):
            Tokens a reply may have.
        eos_token_ids (`list[int]`):
            Any of these ends a reply.
        sampling ([`LocalSampling`], *optional*):
            Greedy by default.

    Returns:
        `list[list[int]]`: the generated ids, with the one that ended the reply; a reply that was cut has none of them.
    """
    from transformers import DynamicCache, RepetitionPenaltyLogitsProcessor

    from ..decoding.attention_kernels import without_cudnn_attention
    from ..decoding.target_cache import name_of_cache

    device = model.device
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    # Padding is masked. A row's own token stands there, so that a repetition penalty finds none that the row does not hold.
    input_ids = torch.tensor([[prompt[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.ones(len(prompts), longest + max_new_tokens, dtype=torch.long)
    mask[:, :longest] = torch.arange(longest) >= longest - lengths[:, None]
    position_ids = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
    input_ids, mask, position_ids, lengths = (t.to(device) for t in (input_ids, mask, position_ids, lengths))

    eos = torch.tensor(eos_token_ids, device=device)
    penalize = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    choose = _token_chooser(sampling, prompts, device)
    prompt_ids = input_ids
    written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long, device=device)
    rows = torch.arange(len(prompts), device=device)
    is_finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = DynamicCache(config=model.config)
    cache_name = name_of_cache(model)
    num_written = 0
    while True:
        with without_cudnn_attention(device):
            logits = model(
                input_ids=input_ids,
                attention_mask=mask[:, : longest + num_written],
                position_ids=position_ids,
                **{cache_name: cache},
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        if sampling.repetition_penalty != 1:
            logits = penalize(torch.cat([prompt_ids[rows], written[rows, :num_written]], dim=1), logits.float())
        tokens = choose(logits)
        written[rows, num_written] = tokens
        num_written += 1
        is_finished |= torch.isin(tokens, eos)
        if num_written == max_new_tokens:
            break
        if num_written % _STEPS_BETWEEN_CHECKS == 0:
            unfinished = (~is_finished).nonzero()[:, 0]
            if len(unfinished) == 0:
                break
            if len(unfinished) <= (1 - _FINISHED_SHARE) * len(rows):
                cache.reorder_cache(unfinished)
                rows, is_finished, mask, lengths, tokens = (
                    t[unfinished] for t in (rows, is_finished, mask, lengths, tokens)
                )
        input_ids = tokens[:, None]
        position_ids = (lengths + num_written - 1)[:, None]

    stops = set(eos_token_ids)
    replies = []
    for ids in written[:, :num_written].tolist():
        end = next((position + 1 for position, token in enumerate(ids) if token in stops), num_written)
        replies.append(ids[:end])
    return replies


def _token_chooser(sampling: LocalSampling, prompts: list[list[int]], device: torch.device):
    if sampling.temperature == 0:
        return lambda logits: logits.argmax(-1)

    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    # Of the rows as well: else the n-th tokens of all batches would be drawn with the same random numbers.
    generator = torch.Generator(device).manual_seed(hash((sampling.seed, *map(tuple, prompts))) % 2**63)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.float()
        for warper in warpers:
            scores = warper(None, scores)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    return choose


def _generate_within_memory(model: "PreTrainedModel", prompts: list[list[int]], **options) -> list[list[int]]:
    """[`generate_replies`], in halves if the batch does not fit."""
    try:
        return generate_replies(model, prompts, **options)
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    # Outside the handler, whose traceback keeps the tensors of the attempt alive.
    torch.cuda.empty_cache()
    middle = len(prompts) // 2
    return [
        reply
        for half in (prompts[:middle], prompts[middle:])
        for reply in _generate_within_memory(model, half, **options)
    ]


class LocalGenerator:
    """
    The target on one device in this process, or on several in a process each. A context manager.

    Args:
        model (`str` or `PreTrainedModel`):
            Name or folder of the target; a model in memory serves one device, where it is.
        devices (`list[str]`):
            For example `["cuda:0", "cuda:1"]`.
        dtype (`torch.dtype`):
            Type of the weights of a model that is loaded.
        max_new_tokens, eos_token_ids, sampling:
            As in [`generate_replies`].
    """

    def __init__(
        self,
        model: "str | PreTrainedModel",
        devices: list[str],
        dtype: torch.dtype,
        *,
        max_new_tokens: int,
        eos_token_ids: list[int],
        sampling: LocalSampling,
    ):
        self._options = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids, "sampling": sampling}
        self._pool = None
        self._num_devices = len(devices)
        if not isinstance(model, str):
            if len(devices) > 1:
                raise ValueError("A model in memory serves one device: give its name or folder to use several.")
            self._model = model
        elif len(devices) == 1:
            self._model = _load(model, devices[0], dtype)
        else:
            # Processes, not threads: generation is bound by how fast one interpreter launches kernels.
            context = multiprocessing.get_context("spawn")
            free_devices = context.SimpleQueue()
            for device in devices:
                free_devices.put(device)
            self._pool = ProcessPoolExecutor(
                len(devices), context, _start_worker, (model, free_devices, dtype, self._options)
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def generate(self, batches: Iterator[list[list[int]]]) -> Iterator[tuple[int, list[list[int]]]]:
        """
        Answers batches of prompts, each device one after the other.

        Args:
            batches (`Iterator[list[list[int]]]`):
                Prompts, batch by batch. It is read no further than the devices are.

        Yields:
            `tuple[int, list[list[int]]]`: number of the batch, and its replies, in the order in which they are done.
        """
        if self._pool is None:
            for number, prompts in enumerate(batches):
                yield number, _generate_within_memory(self._model, prompts, **self._options)
            return
        numbered = enumerate(batches)
        running = {}
        while True:
            # One batch a device is waiting, so that none is idle while replies are written down.
            while len(running) < 2 * self._num_devices and (item := next(numbered, None)) is not None:
                running[self._pool.submit(_answer, item[1])] = item[0]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _load(model: str, device: str, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


# ---- in a worker process

_worker_model: "PreTrainedModel"
_worker_options: dict


def _start_worker(model: str, free_devices, dtype: torch.dtype, options: dict) -> None:
    global _worker_model, _worker_options

    def end_with_parent():
        wait_for_sentinels([multiprocessing.parent_process().sentinel])
        os._exit(1)

    # A worker that waits for work does not notice that the process that had it was killed.
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker_model = _load(model, free_devices.get(), dtype)
    _worker_options = options


def _answer(prompts: list[list[int]]) -> list[list[int]]:
    return _generate_within_memory(_worker_model, prompts, **_worker_options)
