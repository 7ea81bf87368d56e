# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import make_target

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.training.warm_start import initialize_from_target


pytestmark = pytest.mark.compat


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_5"])
def test_a_drafter_starts_from_the_last_layers_of_its_target(kind):
    target = make_target(kind)
    drafter = DFlashForSpeculation(
        create_drafter_config(target.config, num_hidden_layers=2, mask_token_id=5, block_size=4)
    )
    copied = initialize_from_target(drafter, target)
    source = target.get_decoder().layers[-1]
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, source.mlp.up_proj.weight)
    assert ("layers.1.self_attn.q_proj.weight" in copied) is (kind != "qwen3_5")
    assert "norm.weight" in copied
    # The drafter's norm does what the target's does, however each stores its scale.
    states = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(
        drafter.layers[0].input_layernorm(states), target.get_decoder().layers[-2].input_layernorm(states)
    )
    torch.testing.assert_close(drafter.norm(states), target.get_decoder().norm(states))


def test_a_target_of_other_shapes_is_no_start():
    target = make_target("qwen3")
    config = create_drafter_config(
        target.config,
        num_hidden_layers=2,
        mask_token_id=5,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with pytest.raises(ValueError, match="No matrix of Qwen3ForCausalLM"):
        initialize_from_target(DFlashForSpeculation(config), target)
    deep = create_drafter_config(target.config, num_hidden_layers=7, mask_token_id=5)
    with pytest.raises(ValueError, match="has 7 layers .* Qwen3ForCausalLM, which has 6"):
        initialize_from_target(DFlashForSpeculation(deep), target)
