# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Lossless speculative decoding with a DFlash drafter, for dense, sliding-window and gated-delta-net targets.

The target's pass over the prompt gives the first token. Then, block by block: the last token, which the target has not
read yet, is the anchor; the drafter proposes the tokens behind it; one pass of the target over anchor and drafts gives its
own choice at each of them; the leading drafts that agree are accepted, and the target's choice behind them is the bonus
token, the next anchor. The features that the drafter reads are captured in the same pass.

`generate` itself prepares everything around that loop (generation config, processors, stopping criteria, cache), so that
each of them means here what it means there.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from .speculative_loop import SpeculativeLoop, SpeculativeOutput


def speculative_generate(
    target,
    drafter,
    input_ids: torch.LongTensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int | None = None,
    do_sample: bool | None = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    eos_token_id: int | list[int] | None = None,
    logits_processor=None,
    stopping_criteria=None,
    stop_strings: str | list[str] | None = None,
    tokenizer=None,
    streamer=None,
    generator: torch.Generator | None = None,
    sample_drafts: bool = False,
    adaptive_block: bool = False,
    tree_budget: int | None = None,
    cuda_graph: bool = False,
    return_stats: bool = True,
    **generation_kwargs,
) -> SpeculativeOutput | torch.LongTensor:
    """
    Generates with a drafter exactly what `target.generate` generates without one: the same tokens when greedy, the same
    distribution when sampling.

    Args:
        target (`PreTrainedModel`): the model whose output is wanted. Dense (full and sliding-window attention) and hybrid with
            gated delta net (Qwen3.5, Qwen3.6, Qwen3-Next).
        drafter ([`DFlashForSpeculation`]): trained for that target.
        input_ids (`torch.LongTensor` of shape `[B, length]`): prompts, padded on the left.
        attention_mask (`torch.Tensor` of shape `[B, length]`, *optional*): 0 on padding.
        max_new_tokens (`int`, *optional*): tokens to generate at most; 0 returns the prompts. By default what `generate`
            takes from the target's generation config.
        do_sample (`bool`, *optional*, defaults to `False`): draw tokens instead of taking the most likely; `None` for what the
            target's generation config says, as in `generate`.
        temperature (`float`, *optional*), top_p (`float`, *optional*), top_k (`int`, *optional*): of sampling; by default
            the target's generation config, as in `generate`.
        eos_token_id (`int` or `list[int]`, *optional*): tokens that end a row; by default all of the generation config's.
        logits_processor (`LogitsProcessorList`, *optional*), stopping_criteria (`StoppingCriteriaList`, *optional*): further
            ones. Criteria are called for one row at a time; so are processors, which find that row in all places of a batch of the
            usual size. Neither may remember earlier calls.
        stop_strings (`str` or `list[str]`, *optional*): end a row once its text contains one. Needs `tokenizer`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the target's.
        streamer (`BaseStreamer`, *optional*): is given the prompt, then the tokens of each block. One prompt only.
        generator (`torch.Generator`, *optional*): of sampling, on the target's device.
        sample_drafts (`bool`, *optional*, defaults to `False`): draw drafts from the drafter's distribution instead of taking
            its most likely tokens. Both are exact; drawn drafts of one block know nothing of each other, so fewer are accepted.
        adaptive_block (`bool`, *optional*, defaults to `False`): verify only as many drafts of a block as pay, judged by what
            was accepted and how long blocks took so far.
        tree_budget (`int`, *optional*): verify a tree of so many drafts in one pass instead of one chain (DDTree). One prompt,
            targets with full attention in every layer.
        cuda_graph (`bool`, *optional*, defaults to `False`): replay the verify pass as a CUDA graph, over a static cache. Pays
            where the host cannot keep up with the device: small targets, one prompt. Not with `adaptive_block` or `tree_budget`.
        return_stats (`bool`, *optional*, defaults to `True`): return a [`SpeculativeOutput`], else the sequences alone.
        generation_kwargs: any other argument of `generate` (`repetition_penalty`, `generation_config`, ...).

    Raises:
        `ValueError`: if drafter and target do not fit, prompts are not padded on the left or are more than token ids (images),
            the target's cache cannot be rolled back, a logits processor keeps a state (`guidance_scale`, SynthID watermarks),
            or an argument asks for what is not made here (beams, `output_scores`).

    Example:

    ```python
    >>> out = speculative_generate(target, drafter, input_ids, max_new_tokens=64)
    >>> mean = sum(out.acceptance_lengths[0]) / len(out.acceptance_lengths[0])
    ```
    """
    check_drafter_fits(target, drafter)
    _check_prompts(input_ids, attention_mask)
    if tree_budget is not None and tree_budget < 1:
        raise ValueError(f"`tree_budget` is {tree_budget}: a tree has at least one draft, or leave it out.")
    if max_new_tokens == 0:
        # `generate` refuses 0.
        out = SpeculativeOutput(input_ids, [[] for _ in input_ids], 0, 0)
        return out if return_stats else out.sequences
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"`streamer` prints one conversation, `input_ids` holds {input_ids.shape[0]} prompts.")

    _check_reads_ids_only(generation_kwargs)
    stopping_criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`stop_strings` needs `tokenizer`, the target's, to know the text of a token.")
        stopping_criteria.append(StopStringCriteria(tokenizer, stop_strings))

    chosen = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "eos_token_id": eos_token_id,
    }
    generation_kwargs.update({name: value for name, value in chosen.items() if value is not None})
    # Targets that were saved by a training run may say `False`. The output does not depend on it, rolling back does.
    generation_kwargs["use_cache"] = True

    loop = SpeculativeLoop(drafter, streamer, generator, sample_drafts, adaptive_block, tree_budget, cuda_graph)
    if cuda_graph:
        loop.check_graph_is_possible(target, input_ids)
        if generation_kwargs.setdefault("cache_implementation", "static") != "static":
            raise ValueError("`cuda_graph` needs `cache_implementation='static'`: leave `cache_implementation` out.")
    out = target.generate(
        input_ids,
        attention_mask=attention_mask,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        streamer=streamer,
        custom_generate=loop,
        **generation_kwargs,
    )
    return out if return_stats else out.sequences


def _check_prompts(input_ids, attention_mask) -> None:
    is_tensor = isinstance(input_ids, torch.Tensor)
    # As the embedding does; the tokens that come back are int64 in any case.
    is_ids = is_tensor and input_ids.dtype in (torch.int64, torch.int32)
    if not is_ids or input_ids.dim() != 2 or input_ids.numel() == 0:
        given = (
            f"a {input_ids.dtype} tensor of shape {list(input_ids.shape)}"
            if is_tensor
            else f"a {type(input_ids).__name__}"
        )
        raise ValueError(
            f"`input_ids` is {given}: pass token ids of shape [prompts, length], at least one of each. One prompt is `ids[None]`."
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has the shape {list(attention_mask.shape)}, `input_ids` has {list(input_ids.shape)}: pass one of the "
            "same, or none where nothing is padded."
        )


def _check_reads_ids_only(generation_kwargs: dict) -> None:
    """Refuses what the target's passes here would not be given: images, embeddings, positions of one's own."""
    for name, value in generation_kwargs.items():
        tensors = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, torch.Tensor)]
        # Types of tokens are all 0 where everything is text.
        if any(bool(tensor.any()) for tensor in tensors):
            raise ValueError(
                f"`{name}`: with a drafter the target reads token ids alone, at their usual positions. Leave it out, or decode "
                "with `target.generate`."
            )


def check_drafter_fits(target, drafter) -> None:
    """
    Raises:
        `ValueError`: if the drafter was made for a target of another width, vocabulary or depth.
    """
    text_config = target.config.get_text_config(decoder=True)
    pairs = (
        ("hidden_size", drafter.config.hidden_size, text_config.hidden_size),
        ("vocab_size", drafter.config.vocab_size, text_config.vocab_size),
        ("num_target_layers", drafter.config.num_target_layers, text_config.num_hidden_layers),
    )
    for name, drafters, targets in pairs:
        if drafters is not None and drafters != targets:
            raise ValueError(
                f"The drafter's `{name}` is {drafters}, the target ({type(target).__name__}) has {targets}: this drafter "
                "was made for another target."
            )
    if drafter.config.mask_token_id is None:
        raise ValueError("The drafter's config has no `mask_token_id`, the token that its slots hold.")
