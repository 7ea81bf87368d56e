# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: losses by a Triton kernel and compiled, against plain PyTorch."""

import pytest
import torch
from tiny_losses import measure_loss_peak

from hf_dflash.drafter.losses import LOSS_TYPES, _score, compute_dflash_loss, default_implementation
from hf_dflash.target.language_head import LanguageHead


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, VOCABULARY = 128, 20011
HEADS = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "soft-capped": {"softcap": 2.0},
    "both": {"scale": 1.7, "softcap": 3.0},
}


def make_head(dtype, vocabulary=VOCABULARY, **options):
    torch.manual_seed(0)
    return LanguageHead((0.3 * torch.randn(vocabulary, HIDDEN, device="cuda")).to(dtype), **options)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 16, 8192])
def test_the_kernel_gives_loss_token_and_gradient_of_plain_pytorch(dtype, head, vocabulary):
    from hf_dflash.drafter.cross_entropy_kernel import cross_entropy_in_place

    head = make_head(dtype, vocabulary, **HEADS[head])
    projected = head.project(torch.randn(37, HIDDEN, device="cuda"))
    labels = torch.randint(0, vocabulary, (37,), device="cuda")
    labels[0], labels[1] = 0, vocabulary - 1
    losses, tokens, gradient = _score(head, projected.clone(), labels, "ce", None, True)

    kept = projected.clone()
    without = cross_entropy_in_place(kept, labels, head.scale, head.softcap, False)
    assert torch.equal(kept, projected), "it is overwritten on request only"
    result = cross_entropy_in_place(projected, labels, head.scale, head.softcap, True)
    for one, two in zip(result, without, strict=True):
        assert torch.equal(one, two)
    torch.testing.assert_close(result[0], losses, rtol=1e-5, atol=1e-5)
    # A soft-cap rounds in another order, so that nearly equal tokens may swap.
    logits = head.finish(kept)
    picked, best = (logits.gather(1, t[:, None]) for t in (result[1], tokens))
    torch.testing.assert_close(picked, best, rtol=1e-6, atol=1e-6)
    if head.softcap is None:
        assert torch.equal(result[1], tokens), "the first of equal tokens"
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(projected.float(), gradient.float(), rtol=tolerance, atol=1e-6)


def test_a_logit_that_is_not_finite_makes_its_own_loss_so_and_no_other():
    from hf_dflash.drafter.cross_entropy_kernel import cross_entropy_in_place

    projected = torch.randn(3, 1000, device="cuda")
    projected[1, 500] = torch.nan
    losses, _ = cross_entropy_in_place(projected, torch.zeros(3, dtype=torch.long, device="cuda"))
    assert losses.isfinite().tolist() == [True, False, True]


def run(head, implementation, loss_type, dtype, max_elements):
    # Not the head's seed: each state would be a row of it, and its distribution one token.
    generator = torch.Generator("cuda").manual_seed(1)
    where = {"device": "cuda", "generator": generator}
    states = torch.randn(40, 7, HIDDEN, **where).to(dtype).requires_grad_()
    # Near the drafter: where two distributions do not overlap, the gradient of their total variation is rounding alone.
    target = states.detach() + (0.3 * torch.randn(40, 7, HIDDEN, **where)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (40, 7), **where)
    supervised = torch.rand(40, 7, **where) < 0.8
    loss, correct = compute_dflash_loss(
        states,
        head,
        labels,
        supervised,
        loss_type=loss_type,
        target_hidden_states=None if loss_type == "ce" else target,
        implementation=implementation,
        max_elements=max_elements,
    )
    (gradient,) = torch.autograd.grad(loss, states)
    return loss.detach(), gradient.float(), correct


@pytest.mark.parametrize(
    ("implementation", "loss_type"), [("triton", "ce")] + [("compiled", kind) for kind in LOSS_TYPES]
)
def test_whole_losses_and_gradients_equal_plain_pytorch_whatever_the_pieces(implementation, loss_type):
    head = make_head(torch.float32)
    expected = run(head, "eager", loss_type, torch.float32, 1 << 28)
    for max_elements in (17 * VOCABULARY, 150 * VOCABULARY, None):
        loss, gradient, correct = run(head, implementation, loss_type, torch.float32, max_elements)
        torch.testing.assert_close(loss, expected[0], rtol=1e-4, atol=0)
        torch.testing.assert_close(gradient, expected[1], rtol=0, atol=2e-4 * float(expected[1].abs().max()))
        assert (correct != expected[2]).float().mean() < 0.01


def test_what_is_used_by_default():
    head = make_head(torch.bfloat16)
    assert default_implementation("ce", head.weight) == "triton"
    assert default_implementation("kl", head.weight) == "compiled"
    assert default_implementation("ce", head.weight.double()) == "eager"
    assert default_implementation("ce", head.weight.cpu()) == "eager"


def test_one_copy_of_the_logits_stands_in_memory():
    head = make_head(torch.bfloat16)
    logits = 4000 * VOCABULARY * 2
    assert measure_loss_peak(head, slots=4000) < 1.1 * logits
