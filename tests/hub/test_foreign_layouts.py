# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_drafters import make_drafter
from tiny_models import make_target

from hf_dflash import DFlashForSpeculation
from hf_dflash.hub.foreign_layouts import read_foreign_config, strip_foreign_weights
from hf_dflash.hub.layouts import import_drafter


pytestmark = pytest.mark.compat

# Other projects' layouts, as their own savers write them (keys and prefixes; facts in docs/engines).
BODY = {
    "attention_bias": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
}
Z_LAB = {
    **BODY,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 6,
    "layer_types": ["full_attention", "full_attention"],
    "rope_theta": 1e6,
    "rope_scaling": None,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 3]},
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": 4,
    "draft_vocab_size": 96,
    "aux_hidden_state_layer_ids": [2, 4],
    "mask_token_id": 95,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "transformer_layer_config": {
        **BODY,
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "speculators_config": {"verifier": {"name_or_path": None, "architectures": []}},
}


def sliding(layout: dict, **body) -> dict:
    return {
        **layout,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "use_sliding_window": True,
        **body,
    }


@pytest.mark.parametrize(
    ("layout", "is_causal", "layer_type"),
    [
        (Z_LAB, False, "full_attention"),
        (sliding(Z_LAB), None, "sliding_attention"),
        (sliding(Z_LAB, is_causal=False), False, "sliding_attention"),
        # Model-Optimizer: layer types stay at full attention, a flag makes all layers sliding, causality is said for all.
        (
            {
                **Z_LAB,
                "dflash_config": {**Z_LAB["dflash_config"], "use_swa": True, "swa_window_size": 8, "causal": False},
            },
            False,
            "sliding_attention",
        ),
        ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "causal": True}}, True, "full_attention"),
        # Layers that are not listed are what a Qwen3 config makes of its flag.
        (sliding(Z_LAB, layer_types=None, max_window_layers=0), None, "sliding_attention"),
        (sliding(Z_LAB, layer_types=None, max_window_layers=2), False, "full_attention"),
        (SPECULATORS, False, "full_attention"),
        (
            {**SPECULATORS, "transformer_layer_config": sliding(SPECULATORS["transformer_layer_config"])},
            None,
            "sliding_attention",
        ),
        (
            {
                **SPECULATORS,
                "sliding_window_non_causal": True,
                "transformer_layer_config": sliding(SPECULATORS["transformer_layer_config"]),
            },
            False,
            "sliding_attention",
        ),
    ],
)
def test_each_layout_is_read_as_engines_read_it(layout, is_causal, layer_type, tmp_path):
    make_target("qwen3").config.save_pretrained(tmp_path)
    config = read_foreign_config(layout, target=str(tmp_path))
    assert config.target_layer_ids == [1, 3]
    assert config.num_target_layers == 6
    assert config.mask_token_id == 95
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.is_causal is is_causal
    assert config.layer_types == [layer_type] * 2
    assert config.sliding_window == (8 if layer_type == "sliding_attention" else None)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, "'eagle3'"),
        ({**SPECULATORS, "draft_vocab_size": 32}, "reduced vocabulary"),
        ({**SPECULATORS, "sample_from_anchor": True}, "DSpark"),
        ({**Z_LAB, "architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({**Z_LAB, "dflash_config": {**Z_LAB["dflash_config"], "conv_kernel_size": 4}}, "conv_kernel_size"),
        ({**Z_LAB, "dflash_config": {"mask_token_id": 95}}, "target_layer_ids"),
        ({**Z_LAB, "dflash_config": [1, 3]}, "`dflash_config` is"),
        ({**Z_LAB, "vocab_size": None}, "`vocab_size`"),
        ({**SPECULATORS, "transformer_layer_config": None}, "`vocab_size`"),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "at least one id|--target"),
        ({**Z_LAB, "dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 95}}, "highest usable id"),
        ({**Z_LAB, "dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id"),
        ({**Z_LAB, "rope_theta": None}, "rope_theta"),
        ({**Z_LAB, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (sliding(Z_LAB, use_sliding_window=False), "use_sliding_window"),
        (sliding(Z_LAB, sliding_window=None), "sliding_window"),
        ({key: value for key, value in Z_LAB.items() if key != "num_target_layers"}, "--target"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(layout, message):
    with pytest.raises(ValueError, match=message):
        read_foreign_config(layout)


@pytest.mark.parametrize("prefix", ["", "model.", "draft_model.", "module.dflash_module.", "_orig_mod."])
def test_weights_of_other_trainers_lose_prefix_and_what_the_target_owns(prefix, tiny_qwen3):
    own = make_drafter(tiny_qwen3).state_dict()
    foreign = {f"{prefix}{name}".replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in own.items()}
    for name in ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d", "d2t"):
        foreign[f"{prefix}{name}"] = torch.zeros(4)
    if prefix not in ("", "_orig_mod."):
        foreign["target.lm_head.weight"] = torch.zeros(4)
    stripped = strip_foreign_weights(foreign)
    assert stripped.keys() == own.keys()
    assert all(torch.equal(stripped[name], tensor) for name, tensor in own.items())


def test_a_checkpoint_of_another_project_decodes_as_ours(tiny_qwen3, tmp_path):
    """The whole way from z-lab's files (prefixed, with an embedding) to a native folder."""
    drafter = make_drafter(tiny_qwen3, mask_token_id=95)
    tensors = {f"model.{name}": tensor for name, tensor in drafter.state_dict().items()}
    (tmp_path / "z-lab").mkdir()
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(96, 32)}, tmp_path / "z-lab" / "model.safetensors")
    theta = drafter.config.rope_parameters["rope_theta"]
    (tmp_path / "z-lab" / "config.json").write_text(json.dumps({**Z_LAB, "rope_theta": theta}))
    import_drafter(tmp_path / "z-lab", tmp_path / "native")
    imported = DFlashForSpeculation.from_pretrained(tmp_path / "native")
    inputs = (torch.randn(1, 4, 32), torch.randn(1, 7, 64), torch.arange(11)[None])
    with torch.no_grad():
        assert torch.equal(imported(*inputs).last_hidden_state, drafter(*inputs).last_hidden_state)
