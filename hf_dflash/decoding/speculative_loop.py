# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The loop of speculative decoding: draft, verify, emit, until each row of a batch has ended.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import time
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput

from .adaptive_block import AdaptiveBlockLength
from .attention_kernels import without_cudnn_attention
from .borrowed_layers import compute_draft_logits, embed_slots
from .draft_tree import DraftTree
from .feature_capture import FeatureCapture
from .graphed_pass import GraphedPass
from .target_cache import RollbackCache, name_of_cache, upload
from .token_selection import (
    check_processors,
    choose_tokens,
    count_agreeing,
    is_prefix_free,
    process_logits,
    verify_drafts,
)


@dataclass
class SpeculativeOutput(ModelOutput):
    """
    Args:
        sequences (`torch.LongTensor` of shape `[B, length]`):
            Prompts and what was generated, as `generate` returns them: shorter rows are filled with the pad token.
        acceptance_lengths (`list[list[int]]`):
            For each prompt, the tokens that each verify pass emitted, bonus token included; a block that an end token or
            the length limit cuts counts what was emitted. Their sum is one less than the tokens generated: the first token
            comes from the pass over the prompt.
        num_target_passes (`int`):
            Forward passes of the target, the one over the prompt included.
        num_drafter_passes (`int`):
            Forward passes of the drafter.
        drafts (`list[list[list[int]]]`, *optional*):
            For each prompt and verify pass the tokens that were proposed, `[]` for a tree.
    """

    sequences: torch.LongTensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    num_target_passes: int | None = None
    num_drafter_passes: int | None = None
    drafts: list[list[list[int]]] | None = None


@dataclass
class _Row:
    """One prompt of the batch and what has been generated for it."""

    prompt_length: int
    generated: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.generated)


class SpeculativeLoop:
    """Called by `generate` with what it has prepared, in place of its own loop."""

    def __init__(self, drafter, streamer, generator, sample_drafts, adaptive_block, tree_budget, cuda_graph):
        self.drafter, self.block_size = drafter, drafter.config.block_size
        self.streamer, self.generator = streamer, generator
        self.sample_drafts, self.tree_budget = sample_drafts, tree_budget
        self.adaptive_block = AdaptiveBlockLength(self.block_size - 1) if adaptive_block else None
        self.graphed_pass = GraphedPass(self._forward_block) if cuda_graph else None
        self.num_target_passes = self.num_drafter_passes = 0

    def __call__(
        self, target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ) -> SpeculativeOutput:
        _check_generation_config(generation_config)
        check_processors(logits_processor)
        self.target, self.logits_processor = target, logits_processor
        self.cache_name = name_of_cache(target)
        self.do_sample = generation_config.do_sample
        if self.sample_drafts and not self.do_sample:
            raise ValueError(
                "`sample_drafts` draws drafts where tokens are drawn: pass `do_sample=True` too, or leave it out."
            )
        # End tokens and lengths are checked on the host, without asking the device at every token.
        end_criteria = [c for c in stopping_criteria if type(c) is EosTokenCriteria]
        length_criteria = [c for c in stopping_criteria if type(c) is MaxLengthCriteria]
        self.end_tokens = {token for c in end_criteria for token in c.eos_token_id.flatten().tolist()}
        self.max_length = min(c.max_length for c in length_criteria)
        self.other_criteria = StoppingCriteriaList(
            c for c in stopping_criteria if c not in end_criteria and c not in length_criteria
        )
        # Most generations have nobody who looks at earlier tokens, and then these stay on the host.
        self.is_prefix_free = all(map(is_prefix_free, logits_processor))
        self.are_tokens_looked_at = bool(self.other_criteria) or not self.is_prefix_free
        pad_token = generation_config._pad_token_tensor
        # Without end tokens rows end together, so nothing is padded.
        self.pad_token_id = 0 if pad_token is None else int(pad_token)
        with without_cudnn_attention(input_ids.device):
            return self._run(input_ids, model_kwargs)

    def _run(self, input_ids: torch.LongTensor, model_kwargs: dict) -> SpeculativeOutput:
        device = input_ids.device
        prompt_mask = _check_prompt_mask(input_ids, model_kwargs.get("attention_mask"))
        lengths = prompt_mask.sum(-1).tolist()
        self.rows = rows = [_Row(input_ids.shape[1]) for _ in lengths]
        if self.are_tokens_looked_at:
            # Prompts and all that can follow them. Unaccepted drafts lie here for a moment, behind what is certain.
            self.tokens = input_ids.new_zeros(len(rows), self.max_length + self.block_size)
            self.tokens[:, : input_ids.shape[1]] = input_ids
        self.mask_tokens = input_ids.new_full((len(rows), self.block_size - 1), self.drafter.config.mask_token_id)

        cache = model_kwargs.get("past_key_values", model_kwargs.get("cache"))
        if cache.get_seq_length() > 0:
            raise ValueError(
                "`past_key_values` already holds tokens: the drafter needs the target's features of the whole prompt, so pass "
                "an empty cache."
            )
        self.target_cache = RollbackCache(cache, lengths, self.target)
        self.drafter_cache = RollbackCache(DynamicCache(config=self.drafter.config), [0] * len(rows))
        self.drafter_cache.record()
        decode_block = self._decode_block
        if self.tree_budget is not None:
            self._check_tree_is_possible()
            decode_block = self._decode_tree

        layer_ids = self.drafter.config.target_layer_ids
        self.capture = FeatureCapture(self.target, layer_ids, self.drafter.device, self.drafter.dtype)
        with self.capture, self.target_cache:
            logits = self._prefill(input_ids, prompt_mask, cache)
            self.target_cache.record()
            features, fresh = _align_left(self.capture.take(), lengths), lengths
            scores = self._process(list(range(len(rows))), logits, list(input_ids))
            first = choose_tokens(scores, self.do_sample, self.generator)
            active = self._emit(list(range(len(rows))), first, first.tolist(), is_block=False)
            if active and len(active) < len(rows):
                features, fresh = features[active], [fresh[i] for i in active]
                self.target_cache.select_rows(active)
                self.drafter_cache.row_lengths = [0] * len(active)

            self.last_block_end = time.perf_counter()
            while active:
                num_drafts = min(self.block_size, max(self.max_length - self.rows[i].length for i in active)) - 1
                anchors = upload([[self.rows[i].generated[-1]] for i in active], device)
                slot_states = None
                if num_drafts > 0:
                    slot_states = self._draft(anchors, features, fresh)[:, 1 : num_drafts + 1]
                chosen, emitted, features, fresh = decode_block(active, anchors, slot_states)

                remaining = self._emit(active, chosen, emitted, is_block=True)
                if remaining and len(remaining) < len(active):
                    going_on = set(remaining)
                    places = [place for place, i in enumerate(active) if i in going_on]
                    features, fresh = features[upload(places, features.device)], [fresh[place] for place in places]
                    self.target_cache.select_rows(places)
                    self.drafter_cache.select_rows(places)
                active = remaining

        if self.streamer is not None:
            self.streamer.end()
        longest = max(len(row.generated) for row in rows)
        generated = [row.generated + [self.pad_token_id] * (longest - len(row.generated)) for row in rows]
        return SpeculativeOutput(
            sequences=torch.cat([input_ids, upload(generated, device)], dim=1),
            acceptance_lengths=[row.acceptance_lengths for row in self.rows],
            num_target_passes=self.num_target_passes,
            num_drafter_passes=self.num_drafter_passes,
            drafts=[row.drafts for row in self.rows],
        )

    def _prefill(self, input_ids, prompt_mask, cache) -> torch.Tensor:
        # The cache holds what the longest row needs: padding that all rows share must not enter it.
        longest = int(prompt_mask.sum(-1).max())
        input_ids, prompt_mask = input_ids[:, -longest:], prompt_mask[:, -longest:]
        is_padded = not bool(prompt_mask.all())
        arguments = {"position_ids": torch.arange(input_ids.shape[1], device=input_ids.device)[None]}
        if is_padded:
            arguments["position_ids"] = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
            arguments["attention_mask"] = prompt_mask
        else:
            arguments["position_ids"] = arguments["position_ids"].expand(input_ids.shape[0], -1)
        if self.target._supports_logits_to_keep():
            arguments["logits_to_keep"] = 1
        self.num_target_passes += 1
        return self.target(input_ids=input_ids, **{self.cache_name: cache}, use_cache=True, **arguments).logits[:, -1:]

    def _draft(self, anchors: torch.LongTensor, features: torch.Tensor, fresh: list[int]) -> torch.Tensor:
        """Hidden states, `[B, block_size, H]`, of the slots behind each row's context, which is extended by `features`."""
        cache = self.drafter_cache
        slots = torch.cat([anchors, self.mask_tokens[: len(fresh)]], dim=1)
        # Features of rejected tokens lie behind a row's own, and of padding where a longer row has left the batch.
        device, num_fresh = features.device, max(fresh)
        if len(fresh) == 1:
            positions, mask = cache.next_positions(num_fresh + self.block_size, device), None
        else:
            kept = torch.tensor(fresh)[:, None]
            start = torch.tensor(cache.row_lengths)[:, None]
            # A row's slots follow its own last token, whatever stands between them in the batch.
            slot_positions = start + kept + torch.arange(self.block_size)
            positions = upload(torch.cat([start + torch.arange(num_fresh), slot_positions], dim=1), device)
            longest = max(cache.row_lengths)
            real = [
                torch.arange(longest) >= longest - start,
                torch.arange(num_fresh) < kept,
                torch.ones(len(fresh), self.block_size, dtype=torch.bool),
            ]
            mask = upload(torch.cat(real, dim=1), device)
        self.num_drafter_passes += 1
        hidden_states = self.drafter(
            noise_embeds=embed_slots(self.target, slots).to(device, self.drafter.dtype),
            context_hidden_states=features[:, :num_fresh],
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache.cache,
        ).last_hidden_state
        cache.keep(num_fresh, fresh, num_behind=self.block_size)
        return hidden_states

    def _decode_block(self, active: list[int], anchors: torch.LongTensor, slot_states: torch.Tensor | None):
        """
        One block of each row.

        Args:
            active (`list[int]`): rows that are being decoded.
            anchors (`torch.LongTensor` of shape `[B, 1]`): their last tokens.
            slot_states (`torch.Tensor` of shape `[B, drafts, H]`, *optional*): the drafter's hidden states, `None` where there
                is room for the bonus token only.

        Returns:
            The target's tokens `[B, length]`, what each row emits of them, the features of the tokens that were read, and the
            number of leading ones that were accepted.
        """
        drafts, draft_probabilities = anchors[:, :0], None
        if slot_states is not None:
            if self.adaptive_block is not None:
                slot_states = slot_states[:, : self.adaptive_block.choose()]
            drafts, draft_probabilities = self._propose(slot_states, anchors.device)
        num_drafts = drafts.shape[1]
        logits, features = self._verify(
            torch.cat([anchors, drafts], dim=1),
            self.target_cache.attention_mask(num_drafts + 1, anchors.device),
            self.target_cache.next_positions(num_drafts + 1, anchors.device),
        )
        scores = self._process(active, logits, self._prefixes(active, drafts))
        chosen = verify_drafts(scores, drafts, draft_probabilities, self.do_sample, self.generator)
        emitted = []
        # The one place of a block where the host waits for the device.
        for i, tokens in zip(active, torch.cat([drafts, chosen], dim=1).tolist(), strict=True):
            proposed, tokens = tokens[:num_drafts], tokens[num_drafts:]
            self.rows[i].drafts.append(proposed)
            emitted.append(tokens[: count_agreeing(proposed, tokens) + 1])
        fresh = [len(tokens) for tokens in emitted]
        self.target_cache.keep(num_drafts + 1, fresh)
        if self.adaptive_block is not None:
            now = time.perf_counter()
            self.adaptive_block.observe(num_drafts, [count - 1 for count in fresh], now - self.last_block_end)
            self.last_block_end = now
        return chosen, emitted, features, fresh

    def _decode_tree(self, active: list[int], anchors: torch.LongTensor, slot_states: torch.Tensor | None):
        """As [`_decode_block`], but the drafts are a tree."""
        if slot_states is None:
            return self._decode_block(active, anchors, None)
        logits = compute_draft_logits(self.target, slot_states[0]).float()
        best = logits.log_softmax(dim=-1).topk(min(self.tree_budget, logits.shape[-1]), dim=-1)
        # A tree is grown on the host, so it waits for the device a second time.
        tree = DraftTree(best.values.tolist(), best.indices.tolist(), self.tree_budget)
        num_cached, device = self.target_cache.row_lengths[0], anchors.device
        nodes = upload([tree.tokens], device)
        logits, features = self._verify(
            torch.cat([anchors, nodes], dim=1),
            tree.attention_mask(num_cached, self.target.dtype, device),
            num_cached + upload([tree.depths], device),
        )
        scores = self._process_tree(active[0], logits.float(), tree)
        chosen = choose_tokens(scores, self.do_sample, self.generator)
        tokens = chosen[0].tolist()
        path = tree.follow(tokens)
        self.rows[active[0]].drafts.append([])
        self.target_cache.keep_path(path)
        features = features[:, upload(path, features.device)]
        return chosen[:, upload(path, device)], [[tokens[node] for node in path]], features, [len(path)]

    def _process_tree(self, i: int, logits: torch.Tensor, tree: DraftTree) -> torch.Tensor:
        if self.is_prefix_free:
            return process_logits(logits, self.logits_processor, [])
        known = self.tokens[i, : self.rows[i].length]
        scores = torch.empty_like(logits)
        for node in range(logits.shape[1]):
            drafts = known.new_tensor([tree.tokens[ancestor - 1] for ancestor in tree.path(node)[1:]])
            prefix = torch.cat([known, drafts])
            scores[:, node : node + 1] = process_logits(logits[:, node : node + 1], self.logits_processor, [prefix])
        return scores

    def check_graph_is_possible(self, target, input_ids: torch.LongTensor) -> None:
        if target.device.type != "cuda":
            raise ValueError(f"`cuda_graph` needs a target on CUDA, this one is on {target.device}.")
        if len(input_ids) > 1:
            raise ValueError(f"`cuda_graph` decodes one prompt at a time, `input_ids` holds {len(input_ids)}.")
        if self.adaptive_block is not None or self.tree_budget is not None:
            raise ValueError("`cuda_graph` replays blocks of one shape: leave out `adaptive_block` and `tree_budget`.")

    def _check_tree_is_possible(self) -> None:
        if len(self.rows) > 1:
            raise ValueError(f"`tree_budget` decodes one prompt at a time, `input_ids` holds {len(self.rows)}.")
        if self.sample_drafts or self.adaptive_block is not None:
            raise ValueError(
                "`tree_budget` chooses the drafts itself: leave out `sample_drafts` and `adaptive_block`."
            )
        if self.target.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"Tree verification needs an attention that takes a mask, not {self.target.config._attn_implementation!r}: "
                "load the target with attn_implementation='sdpa'."
            )
        self.target_cache.check_full_attention()

    def _propose(self, slot_states: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[B, drafts]`, and the distribution that they were drawn from if they were."""
        logits = compute_draft_logits(self.target, slot_states).to(device)
        if not self.sample_drafts:
            return logits.argmax(dim=-1), None
        # Any q is exact as long as drafts are drawn from it: what depends on earlier tokens is left out.
        processors = LogitsProcessorList(p for p in self.logits_processor if is_prefix_free(p))
        scores = process_logits(logits.float(), processors, [])
        return choose_tokens(scores, True, self.generator), scores.softmax(dim=-1)

    def _verify(self, block: torch.LongTensor, attention_mask, position_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits, `[B, length, vocabulary]`, at the anchors and the drafts, and the features of all of them."""
        self.num_target_passes += 1
        # The last block may be shorter than what is recorded.
        if self.graphed_pass is not None and block.shape[1] == self.block_size:
            return self.graphed_pass(block, position_ids)
        return self._forward_block(block, position_ids, attention_mask)

    def _forward_block(self, block: torch.LongTensor, position_ids, attention_mask=None) -> tuple:
        logits = self.target(
            input_ids=block,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{self.cache_name: self.target_cache.cache},
            use_cache=True,
        ).logits
        return logits, self.capture.take()

    def _process(self, active: list[int], logits: torch.Tensor, prefixes: list[torch.Tensor]) -> torch.Tensor:
        return process_logits(logits.float(), self.logits_processor, prefixes, active, len(self.rows))

    def _prefixes(self, active: list[int], drafts: torch.LongTensor) -> list[torch.Tensor]:
        """For each row, all its tokens and the drafts behind them, where a processor looks at earlier tokens."""
        if self.is_prefix_free:
            return []
        self._write(active, drafts)
        return [self.tokens[i, : self.rows[i].length + drafts.shape[1]] for i in active]

    def _write(self, active: list[int], tokens: torch.LongTensor) -> None:
        """Puts tokens behind what each row holds, where they may be overwritten."""
        columns = torch.tensor([self.rows[i].length for i in active])[:, None] + torch.arange(tokens.shape[1])
        device = self.tokens.device
        self.tokens[upload(active, device)[:, None], upload(columns, device)] = tokens

    def _emit(self, active: list[int], chosen: torch.Tensor, emitted: list[list[int]], is_block: bool) -> list[int]:
        """Appends the emitted tokens to their rows, cut where plain decoding would stop, and returns the rows that go on."""
        if self.are_tokens_looked_at:
            self._write(active, chosen)
        going_on = []
        for i, tokens in zip(active, emitted, strict=True):
            row = self.rows[i]
            count, is_finished = self._count_until_end(i, tokens)
            row.generated += tokens[:count]
            if is_block:
                row.acceptance_lengths.append(count)
            if self.streamer is not None:
                self.streamer.put(torch.tensor(tokens[:count]))
            if not is_finished:
                going_on.append(i)
        return going_on

    def _count_until_end(self, i: int, tokens: list[int]) -> tuple[int, bool]:
        """How many of the tokens plain decoding would have emitted, and whether it would have stopped there."""
        length = self.rows[i].length
        for count, token in enumerate(tokens, start=1):
            if token in self.end_tokens or length + count >= self.max_length:
                return count, True
            if self.other_criteria and bool(self.other_criteria(self.tokens[i : i + 1, : length + count], None).all()):
                return count, True
        return len(tokens), False


def _check_generation_config(generation_config) -> None:
    """Refuses what `generate` would have heeded and this loop would not."""
    mode = generation_config.get_generation_mode()
    if generation_config.num_beams > 1 or mode not in ("greedy_search", "sample", "assisted_generation"):
        raise ValueError(
            f"Speculative decoding takes the most likely token or draws one, and follows one continuation of a prompt: this is "
            f"{mode.replace('_', ' ')}, so `num_beams` must be 1, and `penalty_alpha`, `dola_layers` and `force_words_ids` left out."
        )
    for name in ("output_scores", "output_logits", "output_hidden_states", "output_attentions"):
        if getattr(generation_config, name, None):
            raise ValueError(
                f"`{name}`: speculative decoding returns tokens and what was accepted. Leave it out, or decode with "
                "`target.generate`."
            )


def _check_prompt_mask(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of a batch of prompts, all ones where there is none."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or bool((mask[:, -1] == 0).any()):
        raise ValueError(
            "`attention_mask` has zeros behind ones: pad prompts on the left (`padding_side='left'`). Where none was passed, "
            "`generate` has made one with zeros at all pad tokens: pass one where pad tokens are part of a prompt."
        )
    return mask


def _align_left(features: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Moves the features of a left-padded batch, `[B, length, width]`, to the front of each row."""
    surplus = features.shape[1] - torch.tensor(lengths)
    if not bool(surplus.any()):
        return features
    index = (torch.arange(features.shape[1]) + surplus[:, None]).clamp(max=features.shape[1] - 1)
    return features.gather(1, index[:, :, None].expand_as(features).to(features.device))
