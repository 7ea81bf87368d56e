# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Speculative decoding gives what plain decoding gives, whatever the drafter proposes and wherever the output ends.

In float64, where random models do not tie; decoding itself compares logits in float32, as `generate` does.
"""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_drafter import make_drafter, make_oracle
from tiny_models import COMMON, make_target
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
)

from hf_dflash.decoding.speculative import speculative_generate


BASIC_KINDS = ["llama", "qwen3", "qwen3_sliding", "qwen3_5"]
ALL_KINDS = [*BASIC_KINDS, "qwen3_5_moe", "gemma2", "gemma3"]
WINDOW = 8
# No token of the vocabulary: decoding stops at the length only.
NEVER = 10_000


@cache
def target_of(kind):
    if kind in BASIC_KINDS:
        return make_target(kind, torch.float64)
    common = {**COMMON, "tie_word_embeddings": False}
    if kind == "qwen3_5_moe":
        config = Qwen3_5MoeTextConfig(
            **common,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
        # The grouped product has no float64 form.
        config._experts_implementation = "eager"
        model_class = Qwen3_5MoeForCausalLM
    elif kind == "gemma2":
        config, model_class = Gemma2Config(**common, sliding_window=WINDOW, query_pre_attn_scalar=8), Gemma2ForCausalLM
    else:
        config = Gemma3TextConfig(**common, sliding_window=WINDOW, query_pre_attn_scalar=8)
        model_class = Gemma3ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    return model.double().eval().requires_grad_(False)


def draw_prompt(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 95, (1, length), generator=generator)


def decode_plainly(target, input_ids, attention_mask=None, **kwargs):
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return target.generate(input_ids, attention_mask=attention_mask, do_sample=False, **kwargs)


def long_continuation(target, input_ids, length=60):
    """Tokens of prompt and plain continuation, past every end token."""
    return decode_plainly(target, input_ids, max_new_tokens=length, eos_token_id=NEVER)[0].tolist()


@cache
def drafter_of(kind, drafter_kind, block_size, window):
    make = make_drafter if drafter_kind == "random" else make_oracle
    return make(target_of(kind), block_size, sliding_window=window)


@cache
def plain_continuation(kind, prompt_length):
    return long_continuation(target_of(kind), draw_prompt(prompt_length, 0), length=32)


def cut_at_end(sequence, prompt_length, max_new_tokens, end_tokens):
    """The sequence as `generate` ends it."""
    new_tokens = sequence[prompt_length : prompt_length + max_new_tokens]
    ends = [place for place, token in enumerate(new_tokens, start=1) if token in end_tokens]
    return sequence[: prompt_length + min(ends, default=len(new_tokens))]


@pytest.mark.compat
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_greedy_output_equals_plain_decoding(kind):
    target = target_of(kind)

    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        # From one token to three windows.
        prompt_length=st.sampled_from([1, 2, 5, WINDOW, 3 * WINDOW]),
        block_size=st.sampled_from([2, 3, 5, 8, 16]),
        window=st.sampled_from([None, 16]),
        drafter_kind=st.sampled_from(["random", "oracle", "adversarial"]),
        max_new_tokens=st.integers(1, 16),
        end_places=st.lists(st.integers(0, 15), max_size=3),
        seed=st.integers(0, 10**6),
    )
    def check(prompt_length, block_size, window, drafter_kind, max_new_tokens, end_places, seed):
        input_ids = draw_prompt(prompt_length, 0)
        continuation = plain_continuation(kind, prompt_length)
        # End tokens that really come: inside a block, as its bonus token, in the first place.
        end_tokens = [continuation[prompt_length + place] for place in end_places]
        drafter = drafter_of(kind, drafter_kind, block_size, window)
        generator = torch.Generator().manual_seed(seed)
        if drafter_kind == "oracle":
            drafter.plan([continuation], lambda: int(torch.randint(block_size, (), generator=generator)))
        elif drafter_kind == "adversarial":
            drafter.plan([continuation], lambda: 0)

        out = speculative_generate(
            target, drafter, input_ids, max_new_tokens=max_new_tokens, eos_token_id=end_tokens or NEVER
        )
        expected = cut_at_end(continuation, prompt_length, max_new_tokens, end_tokens)
        assert out.sequences[0].tolist() == expected
        assert 1 + sum(out.acceptance_lengths[0]) == len(expected) - prompt_length
        assert out.num_target_passes == 1 + len(out.acceptance_lengths[0])
        if drafter_kind == "adversarial":
            assert set(out.acceptance_lengths[0]) <= {1}

    check()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_expected_output_above_is_what_generate_gives(kind):
    continuation = plain_continuation(kind, 5)
    end_tokens = [continuation[5 + 11], continuation[5 + 17]]
    generated = decode_plainly(target_of(kind), draw_prompt(5, 0), max_new_tokens=30, eos_token_id=end_tokens)
    assert generated[0].tolist() == cut_at_end(continuation, 5, 30, end_tokens)


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5", "gemma3"])
def test_batch_of_prompts_of_their_own_lengths_equals_plain_decoding_of_each(kind):
    target = target_of(kind)
    lengths = [3, 14, 1, 9, 14]
    prompts = [draw_prompt(length, seed) for seed, length in enumerate(lengths)]
    continuations = [long_continuation(target, prompt) for prompt in prompts]
    input_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, -prompt.shape[1] :] = prompt
        attention_mask[row, -prompt.shape[1] :] = 1
    generator = torch.Generator().manual_seed(0)
    oracle = make_oracle(target, 5, sliding_window=16)
    oracle.plan(continuations, lambda: int(torch.randint(5, (), generator=generator)))
    # Rows end at different times, the first of them at once.
    end_tokens = [continuations[row][lengths[row] + offset] for row, offset in ((0, 0), (1, 7), (3, 12))]

    out = speculative_generate(target, oracle, input_ids, attention_mask, max_new_tokens=24, eos_token_id=end_tokens)
    for row, prompt in enumerate(prompts):
        expected = decode_plainly(target, prompt, max_new_tokens=24, eos_token_id=end_tokens)[0, lengths[row] :]
        new_tokens = out.sequences[row, max(lengths) :]
        assert new_tokens[: len(expected)].tolist() == expected.tolist()
        assert set(new_tokens[len(expected) :].tolist()) <= {0}
        assert 1 + sum(out.acceptance_lengths[row]) == len(expected)
    assert max(length for row in out.acceptance_lengths for length in row) > 1


@pytest.mark.parametrize("kind", BASIC_KINDS)
def test_perfect_drafts_fill_blocks_and_hopeless_ones_leave_the_bonus_token(kind):
    target, input_ids = target_of(kind), draw_prompt(6, 0)
    continuation = long_continuation(target, input_ids)
    oracle = make_oracle(target, block_size=4)
    perfect = speculative_generate(
        target, oracle.plan([continuation], lambda: 3), input_ids, max_new_tokens=13, eos_token_id=NEVER
    )
    assert perfect.acceptance_lengths == [[4, 4, 4]]
    hopeless = speculative_generate(
        target, oracle.plan([continuation], lambda: 0), input_ids, max_new_tokens=5, eos_token_id=NEVER
    )
    assert hopeless.acceptance_lengths == [[1, 1, 1, 1]]


def test_block_cut_by_end_token_or_length_counts_what_was_emitted():
    target, input_ids = target_of("qwen3"), draw_prompt(6, 0)
    continuation = long_continuation(target, input_ids)
    oracle = make_oracle(target, block_size=8).plan([continuation], lambda: 7)
    # Token 0 comes from the prompt's pass, so the end token is the third of the first block.
    end = speculative_generate(target, oracle, input_ids, max_new_tokens=30, eos_token_id=continuation[6 + 3])
    expected = decode_plainly(target, input_ids, max_new_tokens=30, eos_token_id=continuation[6 + 3])
    assert end.sequences.tolist() == expected.tolist()
    assert sum(end.acceptance_lengths[0]) == expected.shape[1] - 6 - 1
    length = speculative_generate(target, oracle, input_ids, max_new_tokens=6, eos_token_id=NEVER)
    assert length.acceptance_lengths == [[5]]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_max_new_tokens_of_zero_and_one(kind):
    target, input_ids = target_of(kind), draw_prompt(4, 0)
    drafter = make_drafter(target)
    nothing = speculative_generate(target, drafter, input_ids, max_new_tokens=0)
    assert nothing.sequences.tolist() == input_ids.tolist() and nothing.num_target_passes == 0
    one = speculative_generate(target, drafter, input_ids, max_new_tokens=1)
    assert one.sequences.tolist() == decode_plainly(target, input_ids, max_new_tokens=1).tolist()
    assert (one.acceptance_lengths, one.num_target_passes, one.num_drafter_passes) == ([[]], 1, 0)


def test_mask_token_that_the_target_emits_is_a_token_like_others():
    target, input_ids = target_of("qwen3_5"), draw_prompt(5, 3)
    continuation = long_continuation(target, input_ids)
    mask_token_id = continuation[8]
    generator = torch.Generator().manual_seed(0)
    oracle = make_oracle(target, mask_token_id=mask_token_id)
    oracle.plan([continuation], lambda: int(torch.randint(5, (), generator=generator)))
    out = speculative_generate(target, oracle, input_ids, max_new_tokens=30, eos_token_id=NEVER)
    assert mask_token_id in out.sequences[0, 5:].tolist()
    assert out.sequences[0].tolist() == continuation[:35]


def test_one_target_pass_and_one_drafter_pass_a_block_and_no_hidden_states_of_all_layers():
    target, input_ids = target_of("qwen3_5"), draw_prompt(5, 0)
    oracle = make_oracle(target, block_size=4).plan([long_continuation(target, input_ids)], lambda: 1)
    seen = []
    handle = target.get_decoder().register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    out = speculative_generate(target, oracle, input_ids, max_new_tokens=9, eos_token_id=NEVER)
    handle.remove()
    assert len(seen) == out.num_target_passes == 1 + len(out.acceptance_lengths[0])
    # Two tokens a block; the last one has room for no draft and calls no drafter.
    assert out.acceptance_lengths == [[2, 2, 2, 2]] and out.num_drafter_passes == 4
    assert not any(seen)


def test_drafter_cache_holds_the_accepted_context_only():
    target, input_ids = target_of("qwen3_5"), draw_prompt(5, 0)
    continuation = long_continuation(target, input_ids)
    generator = torch.Generator().manual_seed(0)
    oracle = make_oracle(target, block_size=4)
    oracle.plan([continuation], lambda: int(torch.randint(4, (), generator=generator)))
    calls = []

    def record(module, args, kwargs):
        cache, positions = kwargs["past_key_values"], kwargs["position_ids"][0]
        calls.append((cache.get_seq_length(), int(positions[0]), int(positions[-4]), kwargs["context_hidden_states"]))

    handle = oracle.register_forward_pre_hook(record, with_kwargs=True)
    speculative_generate(target, oracle, input_ids, max_new_tokens=20, eos_token_id=NEVER)
    handle.remove()

    hidden_states = target(torch.tensor([continuation]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[i + 1] for i in oracle.config.target_layer_ids], dim=-1)
    context_length = 0
    for cached, first_position, anchor, context in calls:
        assert cached == first_position == context_length
        context_length += context.shape[1]
        assert anchor == context_length
        # What a drafter trained on whole passes has seen: the features do not depend on how they were computed.
        torch.testing.assert_close(context, features[:, cached:context_length], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize("lengths", [(7, 7), (7, 4)])
def test_padding_that_all_rows_share_changes_nothing(kind, lengths):
    target = target_of(kind)
    prompts = [draw_prompt(length, seed) for seed, length in enumerate(lengths)]
    input_ids = torch.cat([torch.nn.functional.pad(prompt, (11 - prompt.shape[1], 0)) for prompt in prompts])
    mask = (input_ids > 0).long()
    out = speculative_generate(
        target, drafter_of(kind, "random", 5, None), input_ids, mask, max_new_tokens=30, eos_token_id=NEVER
    )
    for row, prompt in zip(out.sequences, prompts, strict=True):
        expected = decode_plainly(target, prompt, max_new_tokens=30, eos_token_id=NEVER)[0, prompt.shape[1] :]
        assert row[11:].tolist() == expected.tolist()


def test_row_left_alone_is_drafted_for_as_if_it_had_been_alone():
    target = target_of("qwen3")
    prompts = [draw_prompt(14, 0), draw_prompt(5, 1)]
    continuations = [long_continuation(target, prompt) for prompt in prompts]
    input_ids = torch.cat([prompts[0], torch.cat([torch.zeros(1, 9, dtype=torch.long), prompts[1]], dim=1)])
    attention_mask = (input_ids > 0).long()
    drafter = make_drafter(target, 5)

    def record(end_place, *prompt):
        calls = []
        handle = drafter.register_forward_hook(
            lambda m, args, kwargs, out: calls.append(kwargs | out), with_kwargs=True
        )
        end_token = continuations[0][14 + end_place]
        assert end_token not in continuations[1][5:20]
        speculative_generate(target, drafter, *prompt, max_new_tokens=15, eos_token_id=end_token)
        handle.remove()
        return {int(call["position_ids"][-1, -5]): call for call in calls if len(call["position_ids"]) == 1}

    # The longer row ends with the pass over the prompts, or in a block.
    for end_place in (0, 4):
        beside, alone = record(end_place, input_ids, attention_mask), record(end_place, prompts[1])
        assert len(beside) > 2 and beside.keys() <= alone.keys()
        for anchor, call in beside.items():
            assert torch.equal(call["position_ids"], alone[anchor]["position_ids"])
            for name in ("context_hidden_states", "last_hidden_state"):
                torch.testing.assert_close(call[name], alone[anchor][name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_processors_see_the_tokens_that_generate_would_show_them(kind):
    target, input_ids = target_of(kind), draw_prompt(7, 1)
    penalties = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    plain = decode_plainly(target, input_ids, max_new_tokens=30, logits_processor=penalties, eos_token_id=NEVER)
    without = decode_plainly(target, input_ids, max_new_tokens=30, eos_token_id=NEVER)
    assert plain.tolist() != without.tolist()
    oracle = make_oracle(target, block_size=6).plan([plain[0].tolist() + [0] * 6], lambda: 3)
    for arguments in ({"logits_processor": penalties}, {"repetition_penalty": 1.3}):
        out = speculative_generate(target, oracle, input_ids, max_new_tokens=30, eos_token_id=NEVER, **arguments)
        assert out.sequences.tolist() == plain.tolist()
        assert max(out.acceptance_lengths[0]) > 1


def pad_left(prompts):
    """A batch and its mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - prompt.shape[1] :] = prompt
    return input_ids, (input_ids > 0).long()


@pytest.mark.compat
@pytest.mark.parametrize(
    "arguments",
    [
        # transformers 5.2x hands it the padding of each row.
        {"repetition_penalty": 1.5},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + row, 95, 3))},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_processors_of_a_batch_know_which_row_they_see(arguments):
    target = target_of("qwen3")
    input_ids, attention_mask = pad_left([draw_prompt(length, seed) for seed, length in enumerate((9, 4, 7))])
    free = decode_plainly(target, input_ids, attention_mask, max_new_tokens=20, eos_token_id=NEVER)
    # The second row leaves the batch before the others do.
    arguments = arguments | {"max_new_tokens": 20, "eos_token_id": int(free[1, 9 + 5])}
    plain = decode_plainly(target, input_ids, attention_mask, **arguments)
    assert plain.tolist() != free.tolist()
    sequences = [row[mask.argmax() :].tolist() for row, mask in zip(plain, attention_mask, strict=True)]
    oracle = make_oracle(target, block_size=5).plan([ids + [0] * 5 for ids in sequences], lambda: 3)
    out = speculative_generate(target, oracle, input_ids, attention_mask, **arguments)
    assert out.sequences.tolist() == plain.tolist()
    assert max(length for row in out.acceptance_lengths for length in row) > 1


def test_processors_that_remember_earlier_calls_are_refused_with_the_argument_that_made_them():
    target, input_ids = target_of("qwen3"), draw_prompt(7, 1)
    watermark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    for arguments in ({"guidance_scale": 1.5}, {"watermarking_config": watermark}):
        with pytest.raises(ValueError, match=f"leave out `{next(iter(arguments))}`"):
            speculative_generate(target, make_drafter(target), input_ids, max_new_tokens=4, **arguments)


def test_target_whose_generation_config_says_no_cache_is_decoded_as_others_are():
    target, input_ids = make_target("qwen3", torch.float64), draw_prompt(7, 1)
    target.generation_config.use_cache = target.config.use_cache = False
    plain = decode_plainly(target, input_ids, max_new_tokens=20, eos_token_id=NEVER)
    out = speculative_generate(target, make_drafter(target), input_ids, max_new_tokens=20, eos_token_id=NEVER)
    assert out.sequences.tolist() == plain.tolist()


def test_generation_config_of_the_target_counts_as_in_generate():
    target, input_ids = make_target("qwen3", torch.float64), draw_prompt(7, 1)
    target.generation_config.repetition_penalty = 1.3
    target.generation_config.no_repeat_ngram_size = 2
    target.generation_config.eos_token_id = [7, 9, 11, 20, 33]
    plain = decode_plainly(target, input_ids, max_new_tokens=40)
    out = speculative_generate(target, make_drafter(target), input_ids, max_new_tokens=40)
    assert out.sequences.tolist() == plain.tolist()


class StopAfterToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_stopping_criteria_end_the_output_inside_a_block():
    target, input_ids = target_of("qwen3_5"), draw_prompt(7, 2)
    continuation = long_continuation(target, input_ids)
    oracle = make_oracle(target, block_size=8).plan([continuation], lambda: 7)
    for criteria in ([StopAfterToken(continuation[7 + 4])], [MaxLengthCriteria(7 + 4)]):
        criteria = StoppingCriteriaList(criteria)
        plain = decode_plainly(target, input_ids, max_new_tokens=40, eos_token_id=NEVER, stopping_criteria=criteria)
        out = speculative_generate(
            target, oracle, input_ids, max_new_tokens=40, eos_token_id=NEVER, stopping_criteria=criteria
        )
        assert out.sequences.tolist() == plain.tolist()


def test_stop_strings_end_the_output_inside_a_block(word_tokenizer):
    target, input_ids = target_of("qwen3"), draw_prompt(7, 2)
    continuation = long_continuation(target, input_ids)
    oracle = make_oracle(target, block_size=8).plan([continuation], lambda: 7)
    stop = word_tokenizer.convert_ids_to_tokens(continuation[7 + 4])
    arguments = {"max_new_tokens": 40, "eos_token_id": NEVER, "stop_strings": [stop], "tokenizer": word_tokenizer}
    out = speculative_generate(target, oracle, input_ids, **arguments)
    assert out.sequences.tolist() == decode_plainly(target, input_ids, **arguments).tolist()
    assert out.sequences.shape[1] <= 7 + 5
    with pytest.raises(ValueError, match="needs `tokenizer`"):
        speculative_generate(target, oracle, input_ids, stop_strings=[stop])


def test_streamer_is_given_every_token_once(word_tokenizer, capsys):
    target, input_ids = target_of("qwen3"), draw_prompt(7, 2)
    oracle = make_oracle(target, block_size=8).plan([long_continuation(target, input_ids)], lambda: 4)
    decode_plainly(target, input_ids, max_new_tokens=20, eos_token_id=NEVER, streamer=TextStreamer(word_tokenizer))
    plain = capsys.readouterr().out
    speculative_generate(
        target, oracle, input_ids, max_new_tokens=20, eos_token_id=NEVER, streamer=TextStreamer(word_tokenizer)
    )
    assert capsys.readouterr().out == plain


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_static_cache_gives_the_same_output(kind):
    target, input_ids = target_of(kind), draw_prompt(7, 2)
    continuation = long_continuation(target, input_ids)
    generator = torch.Generator().manual_seed(0)
    oracle = make_oracle(target, block_size=5)
    oracle.plan([continuation], lambda: int(torch.randint(5, (), generator=generator)))
    out = speculative_generate(
        target, oracle, input_ids, max_new_tokens=40, eos_token_id=NEVER, cache_implementation="static"
    )
    assert out.sequences[0].tolist() == continuation[:47]


def test_static_sliding_cache_and_static_cache_of_a_batch_are_refused_by_name():
    arguments = {"max_new_tokens": 4, "cache_implementation": "static"}
    target = target_of("qwen3_sliding")
    with pytest.raises(ValueError, match="is a StaticSlidingWindowLayer|is a StaticLayer"):
        speculative_generate(target, make_drafter(target), draw_prompt(5, 0), **arguments)
    target = target_of("qwen3")
    with pytest.raises(ValueError, match="Layer 0 of the cache is a StaticLayer"):
        speculative_generate(target, make_drafter(target), draw_prompt(5, 0).expand(2, -1), **arguments)


def test_sequences_alone_without_statistics():
    target, input_ids = target_of("qwen3"), draw_prompt(4, 0)
    out = speculative_generate(target, make_drafter(target), input_ids, max_new_tokens=5, return_stats=False)
    assert out.tolist() == decode_plainly(target, input_ids, max_new_tokens=5).tolist()


def test_drafter_of_another_target_is_refused():
    drafter = make_drafter(make_target("qwen3", torch.float64, hidden_size=16))
    with pytest.raises(ValueError, match="`hidden_size` is 16, the target .* has 32"):
        speculative_generate(target_of("qwen3"), drafter, draw_prompt(4, 0), max_new_tokens=5)


def test_prompts_padded_on_the_right_are_refused():
    target = target_of("qwen3")
    with pytest.raises(ValueError, match="pad prompts on the left"):
        speculative_generate(
            target,
            make_drafter(target),
            torch.tensor([[5, 6, 0], [5, 6, 7]]),
            torch.tensor([[1, 1, 0], [1, 1, 1]]),
            max_new_tokens=5,
        )


def test_inputs_that_are_no_token_ids_are_refused_and_types_of_text_are_not():
    target, input_ids = target_of("qwen3"), draw_prompt(5, 0)
    drafter = make_drafter(target)
    # A model for images too would be asked without them, and the answer would look right.
    for name, value in {
        "pixel_values": torch.ones(4, 12),
        "image_features": [torch.ones(4)],
        "position_ids": torch.arange(5)[None],
        "inputs_embeds": torch.ones(1, 5, 32),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`: with a drafter the target reads token ids alone"):
            speculative_generate(target, drafter, input_ids, max_new_tokens=4, **{name: value})
    with pytest.raises(ValueError, match="not used by the model"):  # of `generate`: it came through
        speculative_generate(target, drafter, input_ids, max_new_tokens=4, token_type_ids=torch.zeros(1, 5).long())


def test_beams_are_refused():
    target = target_of("qwen3")
    with pytest.raises(ValueError, match="`num_beams` must be 1"):
        speculative_generate(target, make_drafter(target), draw_prompt(4, 0), max_new_tokens=5, num_beams=2)


@pytest.mark.parametrize(
    "argument", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}, {"force_words_ids": [[[7]]]}]
)
def test_ways_to_search_that_would_not_be_followed_are_refused(argument):
    target = target_of("qwen3")
    with pytest.raises(ValueError, match="takes the most likely token or draws one"):
        speculative_generate(target, make_drafter(target), draw_prompt(4, 0), max_new_tokens=5, **argument)


def test_drafts_are_drawn_only_where_tokens_are():
    target = make_target("llama")
    with pytest.raises(ValueError, match="pass `do_sample=True` too"):
        speculative_generate(target, make_drafter(target), draw_prompt(4, 0), max_new_tokens=5, sample_drafts=True)


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states", "output_attentions"])
def test_outputs_that_would_not_be_made_are_refused(name):
    target = target_of("qwen3")
    with pytest.raises(ValueError, match=f"`{name}`: speculative decoding returns tokens"):
        speculative_generate(
            target,
            make_drafter(target),
            draw_prompt(4, 0),
            max_new_tokens=5,
            return_dict_in_generate=True,
            **{name: True},
        )


@pytest.mark.parametrize(
    "input_ids",
    [torch.arange(4), torch.zeros(1, 0).long(), torch.zeros(0, 4).long(), torch.ones(1, 4), [[5, 6]], None],
)
def test_prompts_that_are_no_batch_of_ids_are_refused_with_what_is_expected(input_ids):
    target = target_of("qwen3")
    with pytest.raises(ValueError, match=r"pass token ids of shape \[prompts, length\]"):
        speculative_generate(target, make_drafter(target), input_ids, max_new_tokens=5)


@pytest.mark.parametrize("shape", [(1, 4), (1, 6), (5,)])
def test_masks_of_another_shape_than_the_prompts_are_refused(shape):
    target = target_of("qwen3")
    with pytest.raises(ValueError, match=r"`input_ids` has \[1, 5\]"):
        speculative_generate(target, make_drafter(target), draw_prompt(5, 0), torch.ones(shape), max_new_tokens=5)


def test_drafts_of_a_block_are_its_emitted_tokens_as_far_as_they_were_accepted(tiny_qwen3):
    prompt = torch.arange(6, 11)[None]
    sequence = tiny_qwen3.generate(prompt, max_new_tokens=20, eos_token_id=NEVER, do_sample=False)[0].tolist()
    right = iter([2, 0, 4, 1] * 20)
    oracle = make_oracle(tiny_qwen3).plan([sequence], lambda: next(right))
    out = speculative_generate(tiny_qwen3, oracle, prompt, max_new_tokens=20, eos_token_id=NEVER)
    assert out.sequences[0].tolist() == sequence
    # The first token comes from the pass over the prompt.
    place, accepted = 6, []
    for length, drafts in zip(out.acceptance_lengths[0], out.drafts[0], strict=True):
        emitted = sequence[place : place + length]
        assert drafts[: length - 1] == emitted[:-1]
        accepted.append(sum(draft == token for draft, token in zip(drafts, emitted, strict=False)))
        place += length
    assert accepted[:6] == [2, 0, 4, 1, 2, 0]
