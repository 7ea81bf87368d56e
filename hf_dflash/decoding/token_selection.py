# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which drafts the target accepts, and which token follows them: greedy, and exact sampling.

Drafts that are the drafter's most likely tokens are a one-hot proposal. Accepting one with probability p(draft), and
otherwise drawing from p without it, is the same as drawing from p and accepting the draft if it was drawn: so the target's
choice is made at every position and compared. Drafts that were themselves drawn, from q, are accepted with probability
min(1, p / q), and a rejected one is replaced by a draw from max(0, p - q) (arXiv 2211.17192). The two are never mixed: a
one-hot draft judged by p / q of the drafter's softmax would not leave the target's distribution.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import torch
from transformers import LogitsProcessorList


# Processors whose result at a position does not depend on the tokens before it: one call serves all positions.
_PREFIX_FREE_PROCESSORS = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)


# Processors that remember earlier calls, by the argument of `generate` that makes them: they would remember rejected drafts.
_STATEFUL_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}


def is_prefix_free(processor) -> bool:
    """Whether a logits processor looks at the scores alone."""
    return type(processor).__name__ in _PREFIX_FREE_PROCESSORS


def check_processors(logits_processor: LogitsProcessorList) -> None:
    """
    Raises:
        `ValueError`: if a processor keeps a state from one token to the next, naming it and what made it.
    """
    for processor in logits_processor:
        name = type(processor).__name__
        if name in _STATEFUL_PROCESSORS:
            raise ValueError(
                f"{name} keeps a state from one token to the next, which drafts that are rejected would spoil: leave out "
                f"`{_STATEFUL_PROCESSORS[name]}`, or decode without a drafter."
            )


def process_logits(
    logits: torch.Tensor,
    logits_processor: LogitsProcessorList,
    prefixes: list[torch.Tensor],
    rows: list[int] | None = None,
    num_rows: int = 1,
) -> torch.Tensor:
    """
    Applies logits processors at every position of a block, as `generate` would at each step.

    Args:
        logits (`torch.Tensor` of shape `[B, length, vocabulary]`, fp32): of the target.
        logits_processor (`LogitsProcessorList`): as `generate` prepares it.
        prefixes (`list[torch.Tensor]`): for each row, the ids `[tokens]` of everything up to the last position of the block;
            position i of the block sees all but the last `length - 1 - i` of them.
        rows (`list[int]`, *optional*), num_rows (`int`, *optional*, defaults to 1): which prompts of the batch these are, and how
            many it began with: processors may be made for all of them (lengths of padding, `prefix_allowed_tokens_fn`). By
            default the only one.

    Returns:
        `torch.Tensor` of the shape of `logits`.
    """
    if not logits_processor:
        return logits
    batch, length, vocabulary = logits.shape
    if all(is_prefix_free(processor) for processor in logits_processor):
        flat = logits.reshape(batch * length, vocabulary)
        # The ids are not looked at, but there must be as many rows of them.
        return logits_processor(flat.new_zeros(batch * length, 1, dtype=torch.long), flat).view_as(logits)
    processed = torch.empty_like(logits)
    for place, prefix in enumerate(prefixes):
        row = 0 if rows is None else rows[place]
        for position in range(length):
            seen = prefix[None, : prefix.shape[0] - (length - 1 - position)]
            # Rows are of different lengths, so each comes alone, but in all places: a processor knows it by its place.
            scores = logits_processor(seen.repeat(num_rows, 1), logits[place, position].repeat(num_rows, 1))
            processed[place, position] = scores[row]
    return processed


def choose_tokens(scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None) -> torch.Tensor:
    """The token of each position of `[..., vocabulary]` scores: the most likely one, or one that is drawn."""
    if not do_sample:
        return scores.argmax(dim=-1)
    return _draw(scores.softmax(dim=-1), generator)


def _draw(probabilities: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, num_samples=1, generator=generator).view(probabilities.shape[:-1])


def verify_drafts(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probabilities: torch.Tensor | None,
    do_sample: bool,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """
    Chooses the token at every position of a block; a draft is accepted where it is that token.

    Args:
        scores (`torch.Tensor` of shape `[B, D + 1, vocabulary]`, fp32): the target's processed logits at the anchor and at each
            of the D drafts.
        drafts (`torch.Tensor` of shape `[B, D]`): ids.
        draft_probabilities (`torch.Tensor` of shape `[B, D, vocabulary]`, *optional*): the distribution q that each draft was
            drawn from; `None` for drafts that are the drafter's most likely tokens.
        do_sample (`bool`): draw from the target's distribution, or take its most likely token.
        generator (`torch.Generator`, *optional*): source of randomness.

    Returns:
        `torch.Tensor` of shape `[B, D + 1]`: a row emits its leading tokens that are its drafts, and the one behind them.
    """
    if draft_probabilities is None:
        return choose_tokens(scores, do_sample, generator)
    probabilities = scores.softmax(dim=-1)
    at_drafts, bonus = probabilities[:, :-1], probabilities[:, -1:]
    p = at_drafts.gather(-1, drafts[..., None])[..., 0]
    q = draft_probabilities.gather(-1, drafts[..., None])[..., 0]
    uniform = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype)
    accepted = uniform * q < p
    # It holds nothing of a rejected draft, for which q >= p.
    residual = (at_drafts - draft_probabilities).clamp(min=0)
    # Where p = q nothing is left and nothing is ever rejected, but `multinomial` still wants a distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_drafts)
    tokens = _draw(torch.cat([residual, bonus], dim=1), generator)
    tokens[:, :-1] = torch.where(accepted, drafts, tokens[:, :-1])
    return tokens


def count_agreeing(drafts: list[int], tokens: list[int]) -> int:
    """How many leading drafts are the tokens that were chosen."""
    count = 0
    while count < len(drafts) and drafts[count] == tokens[count]:
        count += 1
    return count
