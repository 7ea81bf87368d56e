# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import KINDS, make_target
from transformers import (
    AutoModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from hf_dflash.target.language_head import LanguageHead, split_rows


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
ODD_HEADS = {
    "gemma2, soft-capped": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 1.5}),
    "cohere, scaled": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite, divided": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 6.0}),
    "phi, with a bias": (PhiForCausalLM, PhiConfig, {"partial_rotary_factor": 0.5}),
}


def models():
    for kind in KINDS:
        yield pytest.param(lambda kind=kind: make_target(kind), id=kind)
    for name, (model_class, config_class, fields) in ODD_HEADS.items():

        def make(model_class=model_class, config_class=config_class, fields=fields):
            model = model_class(config_class(**SIZES, **fields)).eval()
            if model.get_output_embeddings().bias is not None:
                torch.nn.init.normal_(model.get_output_embeddings().bias)
            return model

        yield pytest.param(make, id=name)


@pytest.mark.parametrize("make", list(models()))
@torch.no_grad()
def test_logits_and_predictions_are_those_of_the_model(make):
    model = make()
    input_ids = torch.randint(6, 40, (2, 9))
    expected = model(input_ids).logits
    head = LanguageHead.from_model(model)
    hidden_states = model.get_decoder()(input_ids).last_hidden_state
    torch.testing.assert_close(head.logits(hidden_states), expected, rtol=0, atol=1e-5)
    flat = hidden_states.flatten(0, 1)
    assert torch.equal(head.predict(flat), expected.flatten(0, 1).argmax(-1))
    assert head.vocab_size == model.config.get_text_config().vocab_size


@pytest.mark.parametrize("max_elements", [1, 40, 100, 1000])
def test_predictions_do_not_depend_on_the_chunks(max_elements):
    head = LanguageHead(torch.randn(40, 8), softcap=2.0)
    hidden_states = torch.randn(7, 8)
    assert torch.equal(head.predict(hidden_states, max_elements), head.logits(hidden_states).argmax(-1))
    nothing = head.predict(hidden_states[:0])
    assert nothing.shape == (0,) and nothing.dtype == torch.int64


@pytest.mark.parametrize("options", [{}, {"scale": 0.4}, {"softcap": 2.0}, {"scale": 1.5, "softcap": 3.0}])
def test_backward_is_the_gradient_of_logits(options):
    head = LanguageHead(torch.randn(40, 8, dtype=torch.float64), torch.randn(40, dtype=torch.float64), **options)
    hidden_states = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    logits = head.logits(hidden_states)
    grad_logits = torch.randn_like(logits)
    (expected,) = torch.autograd.grad(logits, hidden_states, grad_logits)
    torch.testing.assert_close(
        head.multiply_gradient(head.unfinish(logits.detach(), grad_logits)), expected, rtol=0, atol=1e-12
    )


def test_logits_of_a_half_precision_head_come_in_float32():
    head = LanguageHead(torch.randn(40, 8).bfloat16())
    assert head.logits(torch.randn(2, 8)).dtype == torch.float32
    assert LanguageHead(head.weight.double()).logits(torch.randn(2, 8)).dtype == torch.float64


def test_nothing_is_copied_where_nothing_changes_and_no_gradient_reaches_the_target(tiny_qwen3):
    head = LanguageHead.from_model(tiny_qwen3)
    assert head.to(torch.device("cpu")).weight.data_ptr() == tiny_qwen3.get_output_embeddings().weight.data_ptr()
    assert not head.weight.requires_grad


def test_a_model_without_a_head_is_refused_with_the_class_to_load(tiny_llama):
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        LanguageHead.from_model(AutoModel.from_config(tiny_llama.config))


@pytest.mark.parametrize(
    ("rows", "most", "heights"),
    [
        (0, 5, []),
        (7, 3, [3, 3, 1]),
        (7, 0, [1] * 7),
        (300, 1000, [300]),
        (7680, 4324, [3840, 3840]),
        (1000, 400, [384, 384, 232]),
        # Not 256 + 44, and no more than what is allowed.
        (300, 280, [256, 44]),
        (260, 130, [130, 130]),
    ],
)
def test_rows_are_split_into_nearly_equal_pieces_of_whole_tiles(rows, most, heights):
    states = torch.arange(rows)[:, None]
    pieces = split_rows(states, most)
    assert [len(piece) for piece in pieces] == heights
    assert not pieces or torch.equal(torch.cat(pieces), states)
