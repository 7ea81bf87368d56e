# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The head in FP8, with the same numbers on a CPU: what is exact, and how far the rest is off."""

import pytest
import torch

from hf_dflash.drafter.fp8_head import Fp8Gradient, Fp8Head, _round_in_pieces
from hf_dflash.drafter.losses import LOSS_TYPES, compute_dflash_loss
from hf_dflash.target.fp8 import round_to_fp8
from hf_dflash.target.language_head import LanguageHead


pytestmark = pytest.mark.compat

HIDDEN, VOCABULARY = 64, 512
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 5.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 6.0},
}


def make_head(dtype=torch.bfloat16, bias=False, **options) -> LanguageHead:
    weight = 0.2 * torch.randn(VOCABULARY, HIDDEN)
    return LanguageHead(weight.to(dtype), torch.randn(VOCABULARY).to(dtype) if bias else None, **options)


def run(head, hidden_states, labels, **options):
    """`(loss, gradient, correct)` of blocks that are supervised everywhere."""
    hidden_states = hidden_states.clone().requires_grad_()
    supervised = torch.ones_like(labels, dtype=torch.bool)
    loss, correct = compute_dflash_loss(hidden_states, head, labels, supervised, **options)
    loss.backward()
    return loss.detach(), hidden_states.grad, correct


def relative_error(tensor, reference) -> float:
    return float((tensor - reference).norm() / reference.norm())


@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradient_are_a_few_per_cent_off(kind):
    head = make_head(**HEADS[kind])
    hidden_states, labels = torch.randn(60, 7, HIDDEN), torch.randint(0, VOCABULARY, (60, 7))
    loss, gradient, correct = run(head, hidden_states, labels)
    fp8_loss, fp8_gradient, fp8_correct = run(Fp8Head.from_head(head), hidden_states, labels)
    assert fp8_loss.dtype == torch.float32 and fp8_gradient.dtype == hidden_states.dtype
    torch.testing.assert_close(fp8_loss, loss, rtol=0.01, atol=0)
    assert 1e-4 < relative_error(fp8_gradient, gradient) < 0.05
    assert (fp8_correct == correct).float().mean() > 0.98


def test_numbers_that_fp8_holds_make_the_loss_of_the_exact_head():
    """Powers of two in narrow ranges, and the largest of e4m3 in each row and column, so that scales are 1."""
    weight = torch.exp2(torch.randint(-5, 1, (VOCABULARY, HIDDEN)).float()) * torch.randn(VOCABULARY, HIDDEN).sign()
    weight[:, 0] = weight[0] = 448.0
    head = LanguageHead(weight.bfloat16(), scale=2**-10)
    hidden_states = torch.exp2(torch.randint(-2, 3, (6, HIDDEN)).float())
    hidden_states[:, 1] = 448.0
    fp8 = Fp8Head.from_head(head)
    assert torch.equal(fp8.by_token[1], torch.ones(VOCABULARY, 1)) and torch.equal(
        fp8.by_column[1], torch.ones(HIDDEN, 1)
    )
    assert torch.equal(fp8.project(hidden_states), (hidden_states @ weight.T).bfloat16())
    gradient = torch.exp2(torch.randint(-9, 0, (6, VOCABULARY)).float())
    gradient[:, 3] = 448 * 2**-9
    labels = torch.full((6,), 5)
    product = fp8.multiply_gradient(Fp8Gradient.round(gradient, labels))
    torch.testing.assert_close(product, gradient @ weight, rtol=2**-8, atol=0)


def test_the_labels_entry_and_its_row_of_the_head_are_not_rounded():
    """Of a drafter that is sure of another token, most of the gradient is the label's row."""
    head = make_head(torch.float32)
    gradient, labels = torch.zeros(4, VOCABULARY), torch.tensor([0, 7, VOCABULARY - 1, 7])
    gradient[torch.arange(4), labels] = torch.tensor([-0.123456789, -1.0, -1e-8, 0.0])
    rounded = Fp8Gradient.round(gradient, labels)
    assert not rounded.values.float().any()
    product = Fp8Head.from_head(head).multiply_gradient(rounded)
    torch.testing.assert_close(product, gradient @ head.weight, rtol=1e-6, atol=0)


def test_unlikely_tokens_keep_their_share_of_the_gradient():
    """Ten thousand tokens of about 1e-5 beside one of 0.9, which sets the scale of the row."""
    probabilities = torch.rand(1, 10_001) * 2e-5
    probabilities[0, 0] = 0.9
    rounded = Fp8Gradient.round(probabilities, torch.tensor([10_000]))
    others = (rounded.values.float() * rounded.scales)[0, 1:10_000]
    torch.testing.assert_close(others.sum(), probabilities[0, 1:10_000].sum(), rtol=0.02, atol=0)


def test_both_copies_together_are_one_of_bf16_and_scaled_by_token_and_by_column(monkeypatch):
    from hf_dflash.drafter import fp8_head

    head = make_head()
    whole = Fp8Head.from_head(head)
    assert sum(values.nbytes for values, _ in (whole.by_token, whole.by_column)) == head.weight.nbytes
    assert whole.by_token[0].is_contiguous() and whole.by_column[0].is_contiguous()
    for (values, scales), matrix in ((whole.by_token, head.weight), (whole.by_column, head.weight.t())):
        expected = round_to_fp8(matrix)
        assert values.shape == matrix.shape and torch.equal(values.float(), expected[0].float())
        assert torch.equal(scales, expected[1])
    monkeypatch.setattr(fp8_head, "_PIECE_ELEMENTS", 100)
    values, scales = _round_in_pieces(head.weight.t())
    assert torch.equal(values.float(), whole.by_column[0].float()) and torch.equal(scales, whole.by_column[1])


def test_pieces_of_any_height_and_the_compiled_form_give_the_same_numbers(monkeypatch):
    from hf_dflash.drafter import losses

    compiled = torch.compile(losses._score, fullgraph=True, dynamic=True, backend="eager")
    monkeypatch.setattr(losses, "_compiled_score", lambda: compiled)
    head = Fp8Head.from_head(make_head(**HEADS["all"]))
    hidden_states, labels = torch.randn(10, 7, HIDDEN), torch.randint(0, VOCABULARY, (10, 7))
    expected = run(head, hidden_states, labels)
    for options in ({"max_elements": 3 * VOCABULARY}, {"implementation": "compiled"}):
        for one, two in zip(run(head, hidden_states, labels, **options), expected, strict=True):
            # A product of another height may add in another order, and a logit fall into the next number of bf16.
            torch.testing.assert_close(one.float(), two.float(), rtol=1e-3, atol=2e-4)


def test_the_rounded_gradient_is_not_kept_for_an_evaluation():
    head, labels = Fp8Head.from_head(make_head()), torch.zeros(3, 7, dtype=torch.long)
    states = torch.randn(3, 7, HIDDEN)
    loss, _ = compute_dflash_loss(states, head, labels, torch.ones_like(labels, dtype=torch.bool))
    assert not loss.requires_grad and torch.equal(loss, run(head, states, labels)[0])


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "ce"])
def test_losses_of_distributions_are_refused(loss_type):
    labels, states = torch.zeros(3, 7, dtype=torch.long), torch.randn(3, 7, HIDDEN)
    with pytest.raises(ValueError, match="loss_type='ce'"):
        run(Fp8Head.from_head(make_head()), states, labels, loss_type=loss_type, target_hidden_states=states)


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch):
    from hf_dflash.target.fp8 import check_fp8_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"A100 has no FP8 arithmetic.*8\.9"):
        check_fp8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8_device(torch.device("cuda"))
    check_fp8_device(torch.device("cpu"))
