# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Acceptance length and speed of a drafter, really decoded, against plain decoding in the same run."""

import logging
import time
from collections.abc import Iterable

import torch
import transformers

from ..decoding.attention_kernels import without_cudnn_attention
from ..decoding.generation_settings import settings_that_decide
from ..decoding.speculative import speculative_generate
from ..progress import ProgressBar
from .acceptance import repeated_ngram_share
from .acceptance_report import AcceptanceReport, PromptResult, show_figure
from .prompts import encode_prompt, read_turns


logger = logging.getLogger(__name__)

# Arguments of `speculative_generate` that plain `generate` does not know.
OURS_ONLY = ("sample_drafts", "adaptive_block", "tree_budget", "cuda_graph")

# New tokens of a turn, unless another number is given: acceptance lengths of different numbers are hard to compare.
MAX_NEW_TOKENS = 512


def measure_acceptance(
    target,
    drafter,
    prompts: Iterable[dict],
    tokenizer,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    enable_thinking: bool | None = None,
    do_sample: bool = False,
    compare_with_plain: bool = True,
    seed: int = 0,
    progress: bool = True,
    **generation_kwargs,
) -> AcceptanceReport:
    """
    Decodes prompts one by one with the drafter and, for comparison, without it.

    Args:
        target (`PreTrainedModel`), drafter ([`DFlashForSpeculation`]): in evaluation mode, on their devices.
        prompts (`Iterable[dict]`): rows as [`load_prompts`] gives them.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        max_new_tokens (`int`, *optional*, defaults to 512): of each turn.
        enable_thinking (`bool`, *optional*): given to the chat template; its own default if not given, as everywhere. A drafter
            that was trained on completions with thinking accepts far less without it, and the other way round.
        do_sample (`bool`, *optional*, defaults to `False`): draw tokens instead of taking the most likely ones.
        compare_with_plain (`bool`, *optional*, defaults to `True`): time plain `generate` on the same prompts, and when greedy
            compare the tokens.
        seed (`int`, *optional*, defaults to 0): of sampling, set anew for each prompt.
        progress (`bool`, *optional*, defaults to `True`): show a progress bar.
        generation_kwargs: of [`speculative_generate`] (`temperature`, `sample_drafts`, ...).

    Returns:
        [`AcceptanceReport`].

    Raises:
        `ValueError`: if a row is no prompt, naming its id.
    """
    prompts = list(prompts)
    ours_only = {name: generation_kwargs.pop(name) for name in OURS_ONLY if name in generation_kwargs}
    plain_kwargs = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, **generation_kwargs}
    report = AcceptanceReport(
        settings={
            "target": target.config._name_or_path or type(target).__name__,
            "drafter": drafter.config._name_or_path or type(drafter).__name__,
            "block_size": drafter.config.block_size,
            "max_new_tokens": max_new_tokens,
            "enable_thinking": enable_thinking,
            "do_sample": do_sample,
            "seed": seed if do_sample else None,
            **ours_only,
            **generation_kwargs,
            **settings_that_decide(_prepare_generation_config(target, plain_kwargs), do_sample),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": _device_name(target.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    context_length = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    measure = _Measurement(
        target,
        drafter,
        plain_kwargs,
        ours_only,
        compare_with_plain,
        seed,
    )
    with ProgressBar(prompts, desc="Decoding", unit="prompt", disable=not progress) as bar:
        for number, row in enumerate(bar):
            name = str(row.get("id", number))
            messages, turns = read_turns(row, f"prompt {name}")
            for turn_number, turn in enumerate(turns, start=1):
                messages = [*messages, {"role": "user", "content": turn}]
                input_ids = encode_prompt(tokenizer, messages, enable_thinking).to(target.device)
                if context_length is not None and input_ids.shape[1] + max_new_tokens > context_length:
                    logger.warning(
                        f"Prompt {name} and its reply may take {input_ids.shape[1]} + {max_new_tokens} tokens, but the target was "
                        f"made for {context_length}: what is written behind them says nothing. Leave the prompt out, or take "
                        "fewer new tokens."
                    )
                result, new_tokens = measure(input_ids)
                result.id = name if turn_number == 1 else f"{name}/turn{turn_number}"
                result.domain = str(row.get("domain") or row.get("source") or "prompts")
                report.results.append(result)
                answer = tokenizer.decode(new_tokens, skip_special_tokens=True)
                messages = [*messages, {"role": "assistant", "content": answer}]
            bar.set_postfix(acceptance=show_figure(report.acceptance_length))
    return report


def _prepare_generation_config(target, generation_kwargs: dict) -> transformers.GenerationConfig:
    """What `generate` makes of its arguments, the target's generation config and its own defaults."""
    any_ids = torch.ones(1, 1, dtype=torch.long, device=target.device)
    return target.generate(
        any_ids,
        attention_mask=any_ids,
        custom_generate=lambda model, input_ids, generation_config, **_: generation_config,
        **generation_kwargs,
    )


class _Measurement:
    """Decodes one prompt both ways, after a few unmeasured tokens that let everything initialise itself."""

    def __init__(self, target, drafter, generation_kwargs, ours_only, compare_with_plain, seed):
        self.target, self.drafter = target, drafter
        self.generation_kwargs, self.ours_only = generation_kwargs, ours_only
        self.compare_with_plain, self.seed = compare_with_plain, seed
        self.is_warm = False

    def __call__(self, input_ids: torch.LongTensor) -> tuple[PromptResult, torch.LongTensor]:
        if not self.is_warm:
            self._speculative(input_ids, max_new_tokens=4)
            if self.compare_with_plain:
                self._plain(input_ids, max_new_tokens=4)
            self.is_warm = True
        out, seconds = self._timed(self._speculative, input_ids)
        new_tokens = out.sequences[0, input_ids.shape[1] :]
        result = PromptResult(
            id="",
            domain="",
            num_prompt_tokens=input_ids.shape[1],
            num_new_tokens=len(new_tokens),
            acceptance_lengths=out.acceptance_lengths[0],
            num_target_passes=out.num_target_passes,
            seconds=seconds,
            repeated_4gram_share=repeated_ngram_share(new_tokens.tolist()),
        )
        if self.compare_with_plain:
            plain, result.plain_seconds = self._timed(self._plain, input_ids)
            plain_tokens = plain[0, input_ids.shape[1] :]
            result.num_plain_tokens = len(plain_tokens)
            if not self.generation_kwargs["do_sample"]:
                result.first_difference = find_first_difference(new_tokens, plain_tokens)
        return result, new_tokens

    def _speculative(self, input_ids, **overrides):
        mask = torch.ones_like(input_ids)
        arguments = {**self.generation_kwargs, **self.ours_only, **overrides}
        return speculative_generate(self.target, self.drafter, input_ids, mask, **arguments)

    def _plain(self, input_ids, **overrides):
        arguments = {**self.generation_kwargs, **overrides}
        # As ours does: the two differ in what is speculative alone.
        with without_cudnn_attention(self.target.device):
            return self.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)

    def _timed(self, function, input_ids):
        torch.manual_seed(self.seed)
        _synchronize(self.target.device)
        start = time.perf_counter()
        out = function(input_ids)
        _synchronize(self.target.device)
        return out, time.perf_counter() - start


def find_first_difference(tokens: torch.Tensor, reference: torch.Tensor) -> int:
    """The first position in which two 1-D sequences differ (the end of the shorter one counts), -1 if they are the same."""
    shared = min(len(tokens), len(reference))
    different = (tokens[:shared] != reference[:shared]).nonzero()
    if len(different):
        return int(different[0])
    return -1 if len(tokens) == len(reference) else shared


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
