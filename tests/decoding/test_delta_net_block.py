# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A block read by our form of the gated delta rule: outputs and states are those of transformers' own mixers."""

import pytest
import torch
from tiny_models import make_target
from transformers import (
    DynamicCache,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_dflash.decoding.delta_net_block import DeltaNetBlock


PROMPT, BLOCK = 5, 7


def make_moe_target(model_class, config_class):
    config = config_class(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return model_class(config).eval()


MAKERS = {
    "Qwen3_5GatedDeltaNet": lambda: make_target("qwen3_5"),
    "Qwen3_5MoeGatedDeltaNet": lambda: make_moe_target(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
    "Qwen3NextGatedDeltaNet": lambda: make_moe_target(Qwen3NextForCausalLM, Qwen3NextConfig),
}


def make_case(name):
    """A mixer, its cache's name, three rows of prompt and block, and a function that makes a cache of given hidden states."""
    torch.manual_seed(0)
    target = MAKERS[name]()
    mixer = target.model.layers[0].linear_attn
    assert type(mixer).__name__ == name
    # Decays that differ between heads and are felt within a block.
    torch.nn.init.uniform_(mixer.A_log, -3, 0.5)
    torch.nn.init.uniform_(mixer.dt_bias, -1, 1)
    hidden_states = torch.randn(3, PROMPT + BLOCK, 32)

    def read(states):
        cache = DynamicCache(config=target.config)
        return mixer(states, cache), cache

    return mixer, hidden_states, read


@pytest.mark.compat
@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_outputs_and_states_after_any_number_of_tokens_are_the_mixers_own(name):
    mixer, hidden_states, read = make_case(name)
    expected, _ = read(hidden_states)
    _, cache = read(hidden_states[:, :PROMPT])
    block = DeltaNetBlock(mixer, cache)
    block.install()
    out = mixer(hidden_states[:, PROMPT:], cache)
    torch.testing.assert_close(out, expected[:, PROMPT:], rtol=1e-4, atol=1e-5)
    kept = [1, 4, BLOCK]
    block.keep(torch.tensor(kept))
    block.remove()
    for row, count in enumerate(kept):
        _, fresh = read(hidden_states[row : row + 1, : PROMPT + count])
        for states in ("conv_states", "recurrent_states"):
            ours, theirs = getattr(cache.layers[0], states)[0][row], getattr(fresh.layers[0], states)[0][0]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_prompt_shorter_than_the_convolution_and_a_block_of_one_token():
    mixer, hidden_states, read = make_case("Qwen3_5GatedDeltaNet")
    expected, fresh = read(hidden_states[:, :2])
    _, cache = read(hidden_states[:, :1])
    block = DeltaNetBlock(mixer, cache)
    block.install()
    out = mixer(hidden_states[:, 1:2], cache)
    block.keep(torch.tensor([1, 1, 1]))
    block.remove()
    torch.testing.assert_close(out, expected[:, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.layers[0].conv_states[0], fresh.layers[0].conv_states[0], rtol=0, atol=1e-6)


@torch.no_grad()
def test_forwards_with_another_cache_are_the_mixers_own_and_afterwards_all_are():
    mixer, hidden_states, read = make_case("Qwen3_5GatedDeltaNet")
    expected, _ = read(hidden_states)
    _, cache = read(hidden_states[:, :PROMPT])
    block = DeltaNetBlock(mixer, cache)
    block.install()
    assert torch.equal(read(hidden_states)[0], expected)
    assert torch.equal(mixer(hidden_states), expected)
    block.remove()
    assert "forward" not in vars(mixer)


@torch.no_grad()
def test_strong_decay_neither_overflows_nor_leaks_from_later_tokens():
    mixer, hidden_states, read = make_case("Qwen3_5GatedDeltaNet")
    mixer.dt_bias.fill_(60.0)
    mixer.A_log.fill_(2.5)
    expected, _ = read(hidden_states)
    _, cache = read(hidden_states[:, :PROMPT])
    block = DeltaNetBlock(mixer, cache)
    block.install()
    out = mixer(hidden_states[:, PROMPT:], cache)
    block.keep(torch.tensor([1, 2, 3]))
    block.remove()
    torch.testing.assert_close(out, expected[:, PROMPT:], rtol=1e-4, atol=1e-5)
    assert cache.layers[0].recurrent_states[0].isfinite().all()


def test_offloaded_mixer_is_refused_by_its_layer():
    mixer, hidden_states, read = make_case("Qwen3_5GatedDeltaNet")
    _, cache = read(hidden_states)
    with pytest.raises(ValueError, match="Layer 0 of the target is offloaded"):
        DeltaNetBlock(mixer.to("meta"), cache)
