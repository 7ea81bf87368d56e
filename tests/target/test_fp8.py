# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import VOCAB_SIZE, make_target
from torch import nn

from hf_dflash.target.fp8 import Fp8Linear, quantize_to_fp8, round_to_fp8
from hf_dflash.target.frozen_target import FrozenTarget


pytestmark = pytest.mark.compat


def test_rounding_keeps_each_rows_largest_value_and_errs_by_a_sixteenth_at_most():
    states = torch.randn(5, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0])[:, None]
    rounded, scales = round_to_fp8(states)
    assert rounded.dtype == torch.float8_e4m3fn and scales.shape == (5, 1)
    back = rounded.float() * scales
    torch.testing.assert_close(back.abs().amax(1), states.abs().amax(1), rtol=1e-6, atol=0)
    # e4m3 has three bits behind the point; values far below the largest lose more.
    error = (back - states).abs()
    assert (error <= states.abs() / 16 + scales * 2**-9).all()
    assert torch.equal(back[4], torch.zeros(64))


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_of_values_that_fp8_holds_is_exact(with_bias):
    linear = nn.Linear(16, 32, bias=with_bias).double()
    powers = torch.randint(-3, 4, (32, 16)).double()
    linear.weight.data = torch.exp2(powers)
    linear.weight.data[:, 0] = 448.0
    states = torch.exp2(torch.randint(-3, 4, (2, 5, 16)).double())
    states[..., 0] = 448.0
    out = Fp8Linear(linear)(states.float())
    assert out.dtype == torch.float32 and out.shape == (2, 5, 32)
    torch.testing.assert_close(out.double(), linear(states), rtol=1e-6, atol=1e-6)


def test_the_large_matrices_of_the_layers_are_changed_and_nothing_else():
    model = make_target("qwen3_5")
    head, embedding = model.lm_head.weight.clone(), model.get_input_embeddings().weight.clone()
    changed = quantize_to_fp8(model.get_decoder(), smallest=32)
    mixer = model.get_decoder().layers[0].linear_attn
    assert isinstance(mixer.in_proj_qkv, Fp8Linear) and isinstance(
        model.get_decoder().layers[2].mlp.up_proj, Fp8Linear
    )
    # Four wide: gates.
    assert type(mixer.in_proj_a) is nn.Linear
    assert changed == sum(isinstance(module, Fp8Linear) for module in model.modules())
    assert type(model.lm_head) is nn.Linear and torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert not list(mixer.in_proj_qkv.parameters()), "nothing that an optimizer could find"


def test_features_of_a_target_in_fp8_are_near_and_matrices_take_half_of_bf16():
    ids, lengths = torch.randint(6, VOCAB_SIZE, (2, 12)), torch.tensor([12, 7])
    exact = FrozenTarget(make_target("qwen3", hidden_size=64, intermediate_size=64), [0, 2, 4])
    expected = exact(ids, lengths).context_hidden_states
    quantize_to_fp8(exact.decoder, smallest=32)
    features = exact(ids, lengths).context_hidden_states
    error = (features - expected).norm() / expected.norm()
    assert 0 < error < 0.15
    linear = exact.decoder.layers[0].mlp.up_proj
    assert linear.weight.element_size() == 1
