# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_dflash.drafter.configuration_dflash import (
    DFlashConfig,
    create_drafter_config,
    find_mask_token_id,
    select_target_layer_ids,
)


pytestmark = pytest.mark.compat

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(theta, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


MROPE = rope(1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10], mrope_interleaved=True)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
HYBRID = {
    "head_dim": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": MROPE,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GEMMA = {"full_attention": rope(1e6), "sliding_attention": rope(1e4)}


def target(config_class, **fields):
    return config_class(**{**SIZES, **fields})


# The config, and what the drafter must have of it: rope theta, (heads, key and value heads, head width), MLP width.
TARGETS = {
    "llama": (target(LlamaConfig, rope_parameters=LLAMA3), 5e5, (8, 2, 64), 1024),
    "qwen2": (target(Qwen2Config, rope_parameters=rope(1e6)), 1e6, (8, 2, 64), 1024),
    "qwen3": (target(Qwen3Config, head_dim=128, rope_parameters=rope(1e6)), 1e6, (8, 2, 128), 1024),
    "qwen3_moe": (target(Qwen3MoeConfig, head_dim=64, rope_parameters=rope(1e6), **EXPERTS), 1e6, (8, 2, 64), 1536),
    "mixtral": (target(MixtralConfig, rope_parameters=rope(1e6)), 1e6, (8, 2, 64), 1536),
    "qwen3_5": (target(Qwen3_5TextConfig, **HYBRID), 1e7, (4, 1, 128), 1024),
    "qwen3_5_nested": (Qwen3_5Config(text_config={**SIZES, **HYBRID}), 1e7, (4, 1, 128), 1024),
    "qwen3_5_moe_nested": (
        Qwen3_5MoeConfig(text_config={**SIZES, **HYBRID, **EXPERTS}),
        1e7,
        (4, 1, 128),
        1536,
    ),
    "gemma3": (target(Gemma3TextConfig, head_dim=256, rope_parameters=GEMMA), 1e6, (4, 1, 128), 1024),
}


@pytest.mark.parametrize("name", TARGETS)
def test_sizes_are_the_targets_and_rotary_embedding_is_plain(name):
    target_config, theta, heads, width = TARGETS[name]
    config = create_drafter_config(target_config, mask_token_id=7)
    assert config.rope_parameters == rope(theta)
    assert not {"rope_scaling", "partial_rotary_factor", "mrope_section"} & set(config.to_diff_dict())
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == heads
    assert config.intermediate_size == width
    assert (config.hidden_size, config.vocab_size, config.max_position_embeddings) == (512, 4096, 2048)
    assert (config.num_hidden_layers, config.block_size, config.is_causal) == (5, 16, False)
    assert config.layer_types == ["full_attention"] * 5 and config.sliding_window is None
    assert (config.num_target_layers, config.target_layer_ids) == (8, [1, 2, 3, 4, 5])
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.rms_norm_eps == 1e-5


def test_reference_target_gets_the_reference_drafter():
    """Qwen3.6-27B and the published geometry of drafters for it."""
    text = {
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_parameters": MROPE,
    }
    config = create_drafter_config(Qwen3_5Config(text_config=text), mask_token_id=248070)
    assert config.target_layer_ids == [1, 16, 31, 46, 61]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)


@pytest.mark.parametrize("is_causal", [False, None, True])
def test_config_survives_saving_and_loading(is_causal, tmp_path):
    config = create_drafter_config(
        TARGETS["qwen3_5_nested"][0],
        mask_token_id=7,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
        is_causal=is_causal,
        block_size=8,
        target_layer_ids=[0, 3],
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "dflash"
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is DFlashConfig
    for name in config.to_dict():
        if name not in ("_name_or_path", "auto_map", "transformers_version"):
            assert getattr(loaded, name) == getattr(config, name), name
    assert loaded.is_causal is is_causal


def test_a_window_makes_every_layer_a_sliding_one():
    config = create_drafter_config(TARGETS["qwen3"][0], mask_token_id=7, num_hidden_layers=3, sliding_window=32)
    assert config.layer_types == ["sliding_attention"] * 3 and config.sliding_window == 32


# ---- Layers ----


@given(st.integers(2, 200), st.integers(1, 12))
def test_chosen_layers_are_even_increasing_and_before_the_last_one(num_layers, num_features):
    ids = select_target_layer_ids(num_layers, num_features)
    assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] <= num_layers - 2
    if len(ids) == 1:
        assert ids[0] == min(num_layers // 2, num_layers - 2)
    else:
        assert (ids[0], ids[-1]) == (1, num_layers - 3)
        gaps = [b - a for a, b in zip(ids, ids[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1
    assert len(ids) == max(1, min(num_features, num_layers - 3))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 7], "highest usable id of a target with 8 layers is 6"),
        ([1, 3, 3], "strictly increasing and without repetition"),
        ([3, 1], "strictly increasing"),
        ([-1, 3], "negative"),
        ([], "at least one"),
    ],
)
def test_unusable_layer_ids_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        create_drafter_config(TARGETS["qwen3"][0], mask_token_id=7, target_layer_ids=ids)


def test_a_target_of_one_layer_is_refused():
    with pytest.raises(ValueError, match="no layer before its last one"):
        create_drafter_config(target(Qwen3Config, num_hidden_layers=1), mask_token_id=7)


# ---- The mask token ----


def make_tokenizer(words: int, **special_tokens):
    vocabulary = {f"w{i}": i for i in range(words)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w3")), unk_token="w3", **special_tokens
    )


@pytest.mark.parametrize("mask_token_id", [4096, 10**9, -1])
def test_mask_token_outside_the_vocabulary_is_refused(mask_token_id):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        create_drafter_config(TARGETS["qwen3"][0], mask_token_id=mask_token_id)


def test_mask_token_that_is_the_pad_token_of_config_or_tokenizer_is_refused():
    with pytest.raises(ValueError, match="pad token"):
        create_drafter_config(TARGETS["qwen3"][0], mask_token_id=0)
    with pytest.raises(ValueError, match="pad token"):
        create_drafter_config(
            TARGETS["qwen3"][0], mask_token_id=9, tokenizer=make_tokenizer(100, pad_token="w9", eos_token="w2")
        )
    with pytest.raises(ValueError, match="tokenizer"):
        create_drafter_config(TARGETS["qwen3"][0])


def test_mask_token_is_found_in_the_order_mask_then_reserved_then_beyond_the_tokenizer():
    tokenizer = make_tokenizer(100, pad_token="w0", eos_token="w2")
    assert find_mask_token_id(tokenizer, 4096, 0) == 100
    assert create_drafter_config(TARGETS["qwen3"][0], tokenizer=tokenizer).mask_token_id == 100
    assert find_mask_token_id(tokenizer, 4096, 100) == 101, "the pad token of the config is passed over"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>", "<|reserved_7|>"]})
    assert find_mask_token_id(tokenizer, 4096, 0) == 101
    assert find_mask_token_id(tokenizer, 4096, 101) == 102
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    assert find_mask_token_id(tokenizer, 4096, 0) == tokenizer.mask_token_id == 102
    # A token that the tokenizer knows but the embedding has no row for.
    assert find_mask_token_id(tokenizer, 102, 0) == 101


def test_a_full_vocabulary_without_an_unused_token_is_an_error_that_says_what_to_pass():
    with pytest.raises(ValueError, match="pass `mask_token_id`"):
        find_mask_token_id(make_tokenizer(100, pad_token="w0"), 100, 0)


# ---- Values that would train or serve wrongly ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple of `num_key_value_heads`"),
        ({"head_dim": None}, "`head_dim` is None: it must be at least 1"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 8}, "shorter than a block"),
        ({"rope_parameters": LLAMA3}, "rope_parameters"),
        ({"rope_parameters": MROPE}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters"),
    ],
)
def test_values_that_would_train_or_serve_wrongly_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig(**values)


def test_rope_theta_by_itself_as_earlier_releases_wrote_it_is_not_lost():
    assert DFlashConfig(rope_theta=1e6).rope_parameters == rope(1e6)


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 256), ("vocab_size", 4000)])
def test_hidden_size_and_vocabulary_cannot_differ_from_the_targets(name, value):
    with pytest.raises(ValueError, match=name):
        create_drafter_config(TARGETS["qwen3"][0], mask_token_id=7, **{name: value})


def test_a_target_without_rope_theta_needs_rope_parameters():
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=4096)
    config.rms_norm_eps = config.intermediate_size = None
    with pytest.raises(ValueError, match="rope_parameters="):
        create_drafter_config(config, mask_token_id=7)


@pytest.mark.parametrize(
    ("name", "meant"), [("block_sise", "block_size"), ("mask_token", "mask_token_id"), ("x", "see")]
)
def test_a_misspelt_field_is_refused_and_the_one_that_was_meant_named(name, meant):
    with pytest.raises(ValueError, match=f"`{name}` is no field .*{meant}"):
        create_drafter_config(TARGETS["qwen3"][0], mask_token_id=7, **{name: 4})
