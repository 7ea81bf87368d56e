# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""After a roll-back, caches are as if the rejected tokens had never been there; caches that cannot do it are refused."""

import pytest
import torch
from oracle_drafter import make_drafter
from tiny_models import make_target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.decoding.target_cache import RollbackCache


def forward(target, cache, block):
    return target(
        input_ids=block,
        attention_mask=cache.attention_mask(block.shape[1], block.device),
        position_ids=cache.next_positions(block.shape[1], block.device),
        past_key_values=cache.cache,
        use_cache=True,
    ).logits


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "qwen3_5"])
def test_rows_keep_what_each_of_them_accepted_and_nothing_else(kind):
    target = make_target(kind, torch.float64)
    prompts = [torch.randint(3, 95, (length,)) for length in (7, 3, 12)]
    input_ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    cache = RollbackCache(DynamicCache(config=target.config), [len(prompt) for prompt in prompts], target)
    rows = list(prompts)
    with cache:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        target(input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache.cache, use_cache=True)
        cache.record()
        for kept in ([5, 2, 1], [1, 5, 4], [5, 5, 5], [2, 2, 2]):
            block = torch.randint(3, 95, (3, 5))
            logits = forward(target, cache, block)
            cache.keep(5, kept)
            for row in range(3):
                expected = target(torch.cat([rows[row], block[row]])[None], use_cache=False).logits[0, -5:]
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)
                rows[row] = torch.cat([rows[row], block[row, : kept[row]]])
        # The longest row leaves, and the padding that only it made necessary.
        cache.select_rows([0, 1])
        assert cache.row_lengths == [len(rows[0]), len(rows[1])]
        for layer in cache.attention_layers:
            assert layer.keys.shape[2] <= max(cache.row_lengths)
        block = torch.randint(3, 95, (2, 3))
        logits = forward(target, cache, block)
        for row in range(2):
            expected = target(torch.cat([rows[row], block[row]])[None], use_cache=False).logits[0, -3:]
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_recurrent_states_are_those_of_the_accepted_tokens_alone():
    target = make_target("qwen3_5", torch.float64)
    tokens = torch.randint(3, 95, (1, 12))
    cache = RollbackCache(DynamicCache(config=target.config), [6], target)
    with cache:
        target(tokens[:, :6], past_key_values=cache.cache, use_cache=True)
        cache.record()
        forward(target, cache, tokens[:, 6:])
        cache.keep(6, [2])
    fresh = DynamicCache(config=target.config)
    target(tokens[:, :8], past_key_values=fresh, use_cache=True)
    assert cache.recurrent_layers
    for index, layer in cache.recurrent_layers.items():
        for name in ("conv_states", "recurrent_states"):
            state, expected = getattr(layer, name)[0], getattr(fresh.layers[index], name)[0]
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-5)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_full_attention_is_given_the_mask_that_each_layer_would_make(kind):
    target = make_target(kind, torch.float64)
    cache = RollbackCache(DynamicCache(config=target.config), [7], target)
    with cache:
        target(torch.randint(3, 95, (1, 7)), past_key_values=cache.cache, use_cache=True)
        mask = cache.attention_mask(5, torch.device("cpu"))
    assert mask.dtype == torch.float64 and mask.shape == (1, 1, 5, 12)
    assert torch.equal(mask[0, 0] == 0, torch.ones(5, 12, dtype=torch.bool).tril(7))
    assert mask[mask < 0].unique().tolist() == [torch.finfo(torch.float64).min]
    # Otherwise attention on a GPU copies it at every layer.
    assert all(stride % 16 == 0 for stride in mask.stride()[:3])
    assert cache.attention_mask(1, torch.device("cpu")) is None


def test_target_that_needs_masks_of_its_own_makes_them():
    eager = make_target("llama")
    eager.set_attn_implementation("eager")
    for target in (make_target("qwen3_sliding"), eager):
        cache = RollbackCache(DynamicCache(config=target.config), [7], target)
        assert cache.attention_mask(5, torch.device("cpu")) is None


class UnknownLayer(DynamicLayer):
    pass


def test_unknown_kind_of_cache_is_refused_by_name():
    target = make_target("qwen3")
    cache = DynamicCache(config=target.config)
    cache.layers[3] = UnknownLayer()
    with pytest.raises(ValueError, match="Layer 3 of the cache is a UnknownLayer"):
        speculative_generate(
            target, make_drafter(target), torch.tensor([[5, 6, 7]]), max_new_tokens=4, past_key_values=cache
        )


def test_recurrent_mixer_that_is_not_known_to_continue_is_refused_by_name():
    target = make_target("qwen3_5")
    mixer = target.model.layers[0].linear_attn
    mixer.__class__ = type("SomeMamba", (type(mixer),), {})
    with pytest.raises(ValueError, match=r"Layer 0 of Qwen3_5ForCausalLM \(SomeMamba\)"):
        speculative_generate(target, make_drafter(target), torch.tensor([[5, 6, 7]]), max_new_tokens=4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_cache_that_already_holds_tokens_is_refused():
    target = make_target("qwen3")
    cache = DynamicCache(config=target.config)
    target(torch.tensor([[5, 6]]), past_key_values=cache)
    with pytest.raises(ValueError, match="already holds tokens"):
        speculative_generate(
            target, make_drafter(target), torch.tensor([[5, 6, 7]]), max_new_tokens=4, past_key_values=cache
        )
