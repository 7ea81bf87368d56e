# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Decoded text, token by token: which were drafts that the target accepted, which it chose itself, which it rejected."""

import torch
from transformers import AutoTokenizer

from ..decoding.speculative import SpeculativeOutput


# Of a prompt, as much as reminds of what was asked.
_PROMPT_TOKENS = 48


def mark_tokens(first: int, acceptance_lengths: list[int], drafts: list[list[int]], tokens: list[int]) -> list:
    """
    What became of each token of a reply that was decoded greedily.

    Args:
        first (`int`): place of the first new token, which comes from the pass over the prompt.
        acceptance_lengths (`list[int]`), drafts (`list[list[int]]`): of each verify pass.
        tokens (`list[int]`): prompt and reply.

    Returns:
        `list[tuple[int, str]]`: token ids, each `"accepted"`, `"rejected"` (the draft that the next token takes the place of) or
        `"target"` (the target's own: the first token, and the bonus tokens).
    """
    marked = [(tokens[first], "target")]
    place = first + 1
    for length, block in zip(acceptance_lengths, drafts, strict=True):
        for slot, token in enumerate(tokens[place : place + length]):
            draft = block[slot] if slot < len(block) else None
            if draft is not None and draft != token:
                marked.append((draft, "rejected"))
            marked.append((token, "accepted" if draft == token else "target"))
        place += length
    return marked


def describe_sample(prompt: torch.Tensor, output: SpeculativeOutput, tokenizer) -> dict:
    """
    One reply for the run log.

    Args:
        prompt (`torch.Tensor` of shape `[L]`, int64): its tokens.
        output ([`SpeculativeOutput`]): of this prompt alone.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's; ids are shown where there is none.

    Returns:
        `dict`: `prompt` (its end), `pieces` (pairs of text and mark, see [`mark_tokens`]), `acceptance_length`.
    """

    def text_of(ids: list[int]) -> str:
        return " ".join(map(str, ids)) + " " if tokenizer is None else tokenizer.decode(ids)

    lengths = output.acceptance_lengths[0]
    marked = mark_tokens(len(prompt), lengths, output.drafts[0], output.sequences[0].tolist())
    end = prompt[-_PROMPT_TOKENS:].tolist()
    return {
        "prompt": ("… " if len(prompt) > len(end) else "") + text_of(end),
        "pieces": [[text_of([token]), mark] for token, mark in marked],
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
    }


def find_tokenizer(trainer):
    """The target's tokenizer, `None` if the target came without one.

    Args:
        trainer ([`DFlashTrainer`]): its own one, or that of the target's folder or repository.
    """
    if trainer.processing_class is not None:
        return trainer.processing_class
    name = trainer.target.model.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name) if name else None
    except (OSError, ValueError):
        return None
