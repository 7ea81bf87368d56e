# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: the head in FP8 against the same numbers on a CPU."""

import pytest
import torch
from tiny_losses import measure_loss_peak

from hf_dflash.drafter.fp8_head import Fp8Head
from hf_dflash.drafter.losses import _score, compute_dflash_loss
from hf_dflash.target.language_head import LanguageHead


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with FP8",
    ),
]

HIDDEN, VOCABULARY = 512, 20016
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.3},
    "soft-capped": {"softcap": 4.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 6.0},
}


def make_head(device="cuda", bias=False, vocabulary=VOCABULARY, dtype=torch.bfloat16, **options) -> LanguageHead:
    generator = torch.Generator().manual_seed(0)
    weight = (0.1 * torch.randn(vocabulary, HIDDEN, generator=generator)).bfloat16().to(dtype)
    bias = torch.randn(vocabulary, generator=generator).bfloat16().to(dtype) if bias else None
    return LanguageHead(weight, bias, **options).to(torch.device(device))


def relative_error(tensor, reference) -> float:
    tensor, reference = tensor.double().cpu(), reference.double().cpu()
    return float((tensor - reference).norm() / reference.norm())


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("implementation", ["triton", "eager", "compiled"])
def test_loss_and_gradient_are_as_near_to_exact_ones_as_those_of_a_cpu(kind, implementation):
    """
    Sums in another order, and with fewer bits in the tensor cores, move some logits to the next number of bf16. Only plain
    PyTorch rounds the gradient to bf16 before it does to FP8, so that others may be nearer.
    """
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(40, 7, HIDDEN, generator=generator).bfloat16()
    head = make_head("cpu", **HEADS[kind])
    exact = make_head("cpu", dtype=torch.float64, **HEADS[kind])
    labels = torch.randint(0, VOCABULARY, (40, 7), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCABULARY - 1
    # Where the drafter is right, the label's exact row of the head is no longer most of the gradient.
    labels[10:] = head.logits(states[10:]).argmax(-1)
    supervised = torch.rand(40, 7, generator=generator) < 0.8

    def run(head, implementation):
        device = head.weight.device
        own = states.to(device, torch.promote_types(states.dtype, head.weight.dtype), copy=True).requires_grad_()
        loss, correct = compute_dflash_loss(
            own,
            head,
            labels.to(device),
            supervised.to(device),
            implementation=implementation,
            max_elements=100 * VOCABULARY,
        )
        loss.backward()
        return loss.detach().cpu(), own.grad.cpu(), correct.cpu()

    expected = run(Fp8Head.from_head(head), "eager")
    result = run(Fp8Head.from_head(make_head("cuda", **HEADS[kind])), implementation)
    torch.testing.assert_close(result[0], expected[0], rtol=5e-3, atol=0)
    _, gradient, _ = run(exact, "eager")
    assert relative_error(result[1], gradient) < 1.1 * relative_error(expected[1], gradient)
    assert (result[2] == expected[2]).float().mean() > 0.98


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 16, 8192])
def test_the_kernel_rounds_as_plain_pytorch_does(kind, vocabulary):
    from hf_dflash.drafter.cross_entropy_kernel import cross_entropy_in_place, cross_entropy_to_fp8

    head = Fp8Head.from_head(make_head(vocabulary=vocabulary, **HEADS[kind]))
    torch.manual_seed(0)
    projected = head.project(torch.randn(37, HIDDEN, device="cuda"))
    labels = torch.randint(0, vocabulary, (37,), device="cuda")
    labels[0], labels[1] = 0, vocabulary - 1
    labels[2] = projected[2].argmax()
    kept = projected.clone()
    losses, tokens, gradient = cross_entropy_to_fp8(projected, labels, head.scale, head.softcap)
    assert torch.equal(projected, kept), "the gradient has a matrix of its own"
    assert (gradient.values.float().gather(1, labels[:, None]) == 0).all()
    without = cross_entropy_to_fp8(projected, labels, head.scale, head.softcap, write_gradient=False)
    # Kernels that do not look for what the gradient needs may sum in another order.
    torch.testing.assert_close(without[0], losses, rtol=1e-6, atol=0)
    assert torch.equal(without[1], tokens) and without[2] is None

    expected = _score(head, projected.clone(), labels, "ce", None, True)[2]
    # Plain PyTorch rounds to bf16 first.
    torch.testing.assert_close(gradient.at_labels, expected.at_labels, rtol=8e-3, atol=1e-6)
    whole, rounded = (g.values.float() * g.scales for g in (expected, gradient))
    # Two roundings of the same numbers; with a soft-cap their scales differ.
    assert relative_error(rounded, whole) < (0.02 if head.softcap is None else 0.06)
    exact = cross_entropy_in_place(kept, labels, head.scale, head.softcap)
    torch.testing.assert_close(exact[0], losses, rtol=1e-6, atol=0)
    assert torch.equal(exact[1], tokens)
    kept.scatter_(1, labels[:, None], 0.0)
    assert relative_error(rounded, kept.float()) < 0.04


def test_a_vocabulary_that_fp8_takes_no_products_of_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        Fp8Head.from_head(make_head(vocabulary=VOCABULARY + 1))


def test_logits_in_bf16_and_a_gradient_in_fp8_stand_in_memory():
    head = Fp8Head.from_head(make_head())
    logits = 4000 * VOCABULARY * 3
    assert measure_loss_peak(head, slots=4000) < 1.15 * logits
