# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dflash.drafter import losses
from hf_dflash.drafter.losses import (
    LOSS_TYPES,
    compute_dflash_loss,
    default_implementation,
    dpace_weights,
    position_weights,
)
from hf_dflash.target.language_head import LanguageHead


HIDDEN, VOCABULARY = 6, 11
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 3.0},
}


def make_head(dtype=torch.float64, bias=False, scale=1.0, softcap=None, vocabulary=VOCABULARY):
    weight = torch.randn(vocabulary, HIDDEN, dtype=torch.float64)
    return LanguageHead(
        weight.to(dtype), torch.randn(vocabulary, dtype=torch.float64).to(dtype) if bias else None, scale, softcap
    )


def plain_logits(head, hidden_states):
    logits = hidden_states @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def plain_loss(head, hidden_states, label, loss_type, target_hidden_state):
    """Of one slot, by autograd."""
    logits = plain_logits(head, hidden_states)
    if loss_type == "ce":
        return -logits.log_softmax(-1)[label]
    p = plain_logits(head, target_hidden_state).softmax(-1)
    q = logits.softmax(-1)
    kl = sum(p[v] * (p[v].log() - q[v].log()) for v in range(len(p)))
    tv = 0.5 * (p - q).abs().sum()
    if loss_type == "kl":
        return kl
    if loss_type == "tv":
        return tv
    share = torch.exp(-3 * torch.minimum(p, q).sum()).detach()
    return share * kl + (1 - share) * tv


class Blocks:
    def __init__(self, num_blocks=5, block_size=4, dtype=torch.float64, vocabulary=VOCABULARY):
        shape = (num_blocks, block_size - 1)
        self.hidden_states = torch.randn(*shape, HIDDEN, dtype=dtype)
        self.target_hidden_states = torch.randn(*shape, HIDDEN, dtype=dtype)
        self.labels = torch.randint(0, vocabulary, shape)
        # 0 to B - 1 supervised slots of a block, in front.
        lengths = torch.arange(num_blocks) % block_size
        self.supervised = torch.arange(block_size - 1)[None] < lengths[:, None]

    def compute(self, head, loss_type="ce", **options):
        """`(loss, gradient, correct)`."""
        hidden_states = self.hidden_states.clone().requires_grad_()
        target = None if loss_type == "ce" else self.target_hidden_states
        loss, correct = compute_dflash_loss(
            hidden_states,
            head,
            self.labels,
            self.supervised,
            loss_type=loss_type,
            target_hidden_states=target,
            **options,
        )
        (gradient,) = torch.autograd.grad(loss, hidden_states)
        return loss.detach(), gradient, correct

    def loop(self, head, loss_type="ce", weight_of=None, denominator=None, kept=None):
        """The same, one slot after the other."""
        hidden_states = self.hidden_states.clone().requires_grad_()
        total, weights = hidden_states.sum() * 0, 0.0
        correct = torch.zeros_like(self.supervised)
        for n in range(self.labels.shape[0]):
            for k in range(self.labels.shape[1]):
                if not self.supervised[n, k]:
                    continue
                weight = math.exp(-k / 4.0) if weight_of is None else weight_of(n, k)
                weights += weight
                label = int(self.labels[n, k])
                loss = plain_loss(head, hidden_states[n, k], label, loss_type, self.target_hidden_states[n, k])
                if kept is None or kept[n]:
                    total = total + weight * loss
                correct[n, k] = plain_logits(head, hidden_states[n, k]).argmax() == label
        loss = total / (weights if denominator is None else denominator)
        return loss.detach(), torch.autograd.grad(loss, hidden_states)[0], correct


def assert_equal(result, expected, tolerance=1e-12):
    for ours, theirs in zip(result[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    assert torch.equal(result[2], expected[2])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_a_loop_over_slots(head, loss_type):
    head, blocks = make_head(**HEADS[head]), Blocks()
    expected = blocks.loop(head, loss_type)
    for max_elements in (1, 3 * VOCABULARY, 1 << 28):
        assert_equal(blocks.compute(head, loss_type, max_elements=max_elements), expected)


@settings(max_examples=40, deadline=None)
@given(
    supervised=st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=n, max_size=n)
    ),
    denominator=st.one_of(st.none(), st.floats(0.5, 50)),
    rows=st.integers(1, 7),
    data=st.data(),
)
def test_any_supervision_denominator_chunking_and_kept_blocks_equal_a_loop(supervised, denominator, rows, data):
    head, blocks = make_head(), Blocks(len(supervised))
    blocks.supervised = torch.tensor(supervised)
    kept = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=len(supervised), max_size=len(supervised))))
    if not blocks.supervised.any():
        denominator = denominator or 1.0
    result = blocks.compute(
        head,
        denominator=denominator,
        max_elements=rows * VOCABULARY,
        kept_blocks=None if kept is None else torch.tensor(kept),
    )
    assert_equal(result, blocks.loop(head, denominator=denominator, kept=kept))


def test_known_slot_indices_change_nothing():
    head, blocks = make_head(), Blocks()
    indices = blocks.supervised.flatten().nonzero().squeeze(1)
    assert_equal(blocks.compute(head, slot_indices=indices), blocks.compute(head), tolerance=0)
    flat = blocks.target_hidden_states.flatten(0, 1)[indices]
    loss, _ = compute_dflash_loss(
        blocks.hidden_states,
        head,
        blocks.labels,
        blocks.supervised,
        loss_type="kl",
        slot_indices=indices,
        target_hidden_states=flat,
    )
    assert torch.equal(loss, blocks.compute(head, "kl")[0])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_target_that_is_not_finite_in_a_left_out_block_reaches_neither_loss_nor_gradient(loss_type):
    head, blocks = make_head(), Blocks()
    kept = torch.tensor([True, True, False, True, False])
    expected = blocks.loop(head, loss_type, kept=kept)
    blocks.target_hidden_states[~kept] = torch.nan
    assert_equal(blocks.compute(head, loss_type, kept_blocks=kept), expected)


def test_left_out_blocks_keep_their_share_of_the_denominator():
    head, blocks = make_head(), Blocks()
    kept = torch.tensor([True, True, False, True, False])
    loss, gradient, _ = blocks.compute(head, kept_blocks=kept)
    whole = float((blocks.supervised * position_weights(4, 4.0)).sum())
    part = Blocks.loop(blocks, head, denominator=whole, kept=kept)
    torch.testing.assert_close(loss, part[0], rtol=0, atol=1e-6)
    assert (gradient[~kept] == 0).all() and (gradient[3] != 0).any()


# ---- D-PACE ----


def test_dpace_weights_are_the_closed_form():
    confidences = torch.rand(4, 5, dtype=torch.float64)
    supervised = torch.arange(5)[None] < torch.tensor([5, 3, 1, 0])[:, None]
    weights = dpace_weights(confidences, supervised, alpha=0.3)
    for n in range(4):
        for j in range(5):
            expected = 0.0
            for m in range(j, 5):
                if supervised[n, m] and supervised[n, j]:
                    expected += math.prod(0.7 * float(confidences[n, i]) + 0.3 for i in range(m + 1))
            assert float(weights[n, j]) == pytest.approx(expected, abs=1e-14)
    assert (weights.diff(dim=1) <= 0).all()


def test_dpace_loss_is_detached_in_its_weights_and_divided_by_the_number_of_slots():
    head, blocks = make_head(), Blocks()
    with torch.no_grad():
        q = plain_logits(head, blocks.hidden_states).softmax(-1).gather(-1, blocks.labels[..., None]).squeeze(-1)
    weights = dpace_weights(q, blocks.supervised, 0.5)
    expected = blocks.loop(head, weight_of=lambda n, k: float(weights[n, k]), denominator=int(blocks.supervised.sum()))
    assert_equal(blocks.compute(head, weighting="dpace", dpace_alpha=0.5, max_elements=2 * VOCABULARY), expected)


# ---- Weights ----


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (2, 4.0)])
def test_position_weights_start_at_one_and_decay(block_size, gamma):
    weights = position_weights(block_size, gamma, dtype=torch.float64)
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / gamma) for k in range(1, block_size)], abs=1e-15)
    assert weights[0] == 1


@pytest.mark.parametrize("gamma", [0, -1.0, None, float("nan")])
def test_a_gamma_that_does_not_decay_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        position_weights(4, gamma)


# ---- Memory and precision ----


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize(("loss_type", "weighting"), [(kind, "decay") for kind in LOSS_TYPES] + [("ce", "dpace")])
def test_full_logits_never_exist_neither_forward_nor_backward(loss_type, weighting):
    vocabulary = 500
    head, blocks = make_head(vocabulary=vocabulary), Blocks(200, vocabulary=vocabulary)
    num_slots = int(blocks.supervised.sum())
    assert num_slots == 300
    with LargestTensor() as largest:
        blocks.compute(head, loss_type, weighting=weighting, max_elements=4 * vocabulary)
    # Four slots of logits at once, or the hidden states of everything, whichever is larger.
    assert largest.elements == max(4 * vocabulary, vocabulary * HIDDEN, 200 * 3 * HIDDEN)
    with LargestTensor() as largest:
        blocks.compute(head, loss_type, weighting=weighting)
    assert largest.elements == num_slots * vocabulary


def test_softmax_of_a_bfloat16_head_is_in_float32():
    head, blocks = make_head(torch.bfloat16), Blocks(dtype=torch.float32)
    loss, gradient, _ = blocks.compute(head)
    assert loss.dtype == gradient.dtype == torch.float32
    logits = (blocks.hidden_states.bfloat16() @ head.weight.T).float()
    log_probabilities = logits.log_softmax(-1).gather(-1, blocks.labels[..., None]).squeeze(-1)
    weights = position_weights(4, 4.0) * blocks.supervised
    torch.testing.assert_close(loss, -(weights * log_probabilities).sum() / weights.sum(), rtol=1e-6, atol=0)


# ---- Implementations ----


def test_plain_pytorch_is_used_on_a_cpu():
    head = make_head(torch.bfloat16)
    assert all(default_implementation(loss_type, head.weight) == "eager" for loss_type in LOSS_TYPES)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_compiled_form_is_one_graph_with_the_same_numbers(loss_type, monkeypatch):
    compiled = torch.compile(losses._score, fullgraph=True, dynamic=True, backend="eager")
    monkeypatch.setattr(losses, "_compiled_score", lambda: compiled)
    head, blocks = make_head(**HEADS["all"]), Blocks()
    expected = blocks.compute(head, loss_type, implementation="eager")
    assert_equal(blocks.compute(head, loss_type, implementation="compiled"), expected)


@pytest.mark.parametrize(("implementation", "loss_type"), [("triton", "kl"), ("liger", "ce")])
def test_an_implementation_that_is_not_there_is_refused(implementation, loss_type):
    with pytest.raises(ValueError, match="eager, compiled, triton"):
        Blocks().compute(make_head(), loss_type, implementation=implementation)


# ---- Nothing supervised, bad options ----


@pytest.mark.parametrize("options", [{}, {"denominator": 0.0}, {"weighting": "dpace"}, {"loss_type": "lk"}])
def test_nothing_supervised_gives_zero_loss_and_zero_gradients(options):
    head, blocks = make_head(), Blocks()
    blocks.supervised = torch.zeros_like(blocks.supervised)
    loss, gradient, correct = blocks.compute(head, **options)
    assert loss == 0 and torch.equal(gradient, torch.zeros_like(gradient)) and not correct.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "mse"}, "choose one of ce, kl, tv, lk"),
        ({"weighting": "flat"}, "choose one of decay, dpace"),
        ({"loss_type": "kl", "weighting": "dpace"}, "cross-entropies"),
        ({"loss_type": "kl"}, "target_hidden_states"),
    ],
)
def test_unknown_options_and_missing_inputs_are_refused(options, message):
    blocks = Blocks()
    with pytest.raises(ValueError, match=message):
        compute_dflash_loss(blocks.hidden_states, make_head(), blocks.labels, blocks.supervised, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decay_too_fast_for_the_dtype_leaves_the_first_slot(dtype):
    for gamma in (1e-2, 1e-46, 5e-324):
        assert position_weights(4, gamma, dtype=dtype)[0] == 1
        assert position_weights(4, gamma, dtype=dtype)[1:].max() < 1e-40


def test_a_second_backward_says_that_the_gradient_is_made_once():
    head = make_head()
    hidden_states = torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss, _ = compute_dflash_loss(
        hidden_states, head, torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call `backward` once"):
        loss.backward()
