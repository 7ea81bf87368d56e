# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The loss of a drafter: what each supervised slot costs, and how much each slot counts.

Shapes: N blocks, B slots of a block, S supervised slots of all blocks, H hidden size, V vocabulary.
The head is frozen, so the gradient of a slot's loss by its hidden state can be made in the forward pass, chunk by chunk:
the full `[S, V]` logits never exist, and nothing is computed twice. Slots only meet in the weights, which are detached.
"""

from functools import lru_cache

import torch
from torch.utils._triton import has_triton

from ..target.language_head import split_rows
from .compilation import compile_function


LOSS_TYPES = ("ce", "kl", "tv", "lk")
WEIGHTINGS = ("decay", "dpace")
IMPLEMENTATIONS = ("eager", "compiled", "triton")

# Logits that stand in memory at once: eager steps hold several copies in fp32 (1 GiB each), fused ones one or two in the
# head's dtype (2 GiB each in bf16). Higher pieces keep more of a GPU busy in the product with the head's weights.
_MAX_ELEMENTS = {"eager": 1 << 28, "compiled": 1 << 29, "triton": 1 << 30}


def position_weights(block_size: int, gamma: float, device=None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """How much slots 1 .. B - 1 count: exp(-(k - 1) / gamma), for a slot is only reached if those before it were right
    (paper, section 4.2).

    Args:
        block_size (`int`): B.
        gamma (`float`): how slowly the weights decay, in slots.
        device (`torch.device`, *optional*), dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): of the weights.

    Returns:
        `torch.Tensor` of shape `[B - 1]`.
    """
    if gamma is None or not gamma > 0:
        raise ValueError(f"`gamma` is {gamma}: the decay of the slot weights must be a positive number of slots.")
    # Below 1e-3 all but the first are 0 in any dtype; and what rounds to 0 would make the first one 0 / 0.
    return torch.exp(-torch.arange(block_size - 1, device=device, dtype=dtype) / max(gamma, 1e-3))


def dpace_weights(confidences: torch.Tensor, supervised: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """D-PACE weights (arXiv 2605.18810): slot j counts as much as the slots behind it are likely to be reached.

    With q~ = (1 - alpha) q + alpha, w_j = sum over m >= j of prod over i <= m of q~_i. Unsupervised slots count as 1 in the
    product and 0 in the sum.

    Args:
        confidences (`torch.Tensor` of shape `[N, B - 1]`): q, the drafter's probability of each label.
        supervised (`torch.Tensor` of shape `[N, B - 1]`, bool): which slots have a label.
        alpha (`float`, *optional*, defaults to 0.5): smoothing.

    Returns:
        `torch.Tensor` of shape `[N, B - 1]`, detached.
    """
    smoothed = torch.where(supervised, (1 - alpha) * confidences.detach() + alpha, 1.0)
    reached = smoothed.cumprod(dim=1) * supervised
    return reached.flip(1).cumsum(1).flip(1) * supervised


def default_implementation(loss_type: str, weight: torch.Tensor) -> str:
    """How losses are computed by default: cross-entropy on CUDA by a Triton kernel, other losses there compiled, all else in
    plain PyTorch, which is the reference (and the only one in fp64).

    Args:
        loss_type (`str`): see [`compute_dflash_loss`].
        weight (`torch.Tensor`): of the head.
    """
    if weight.device.type != "cuda" or weight.dtype == torch.float64 or not has_triton():
        return "eager"
    return "triton" if loss_type == "ce" else "compiled"


class _SlotLosses(torch.autograd.Function):
    """Losses of slots `[S]` with the gradient by `hidden_states` made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden_states, head, labels, loss_type, target_hidden_states, implementation, max_elements):
        needs_gradient = ctx.needs_input_grad[0]
        precise = torch.promote_types(head.weight.dtype, torch.float32)
        losses = torch.empty(hidden_states.shape[0], device=hidden_states.device, dtype=precise)
        predictions = torch.empty(hidden_states.shape[0], device=hidden_states.device, dtype=torch.long)
        gradient = torch.empty_like(hidden_states) if needs_gradient else None
        start = 0
        for chunk in split_rows(hidden_states, max_elements // head.vocab_size):
            rows = slice(start, start + chunk.shape[0])
            start = rows.stop
            projected = head.project(chunk)
            if loss_type == "ce":
                target_projected = None
            else:
                target_projected = head.project(target_hidden_states[rows])
            if implementation == "triton":
                losses[rows], predictions[rows], grad_projected = _score_by_kernel(
                    head, projected, labels[rows], needs_gradient
                )
            else:
                score = _compiled_score() if implementation == "compiled" else _score
                losses[rows], predictions[rows], grad_projected = score(
                    head, projected, labels[rows], loss_type, target_projected, needs_gradient
                )
            if needs_gradient:
                gradient[rows] = head.multiply_gradient(grad_projected).to(gradient.dtype)
            # Not to stand beside the next chunk's.
            del projected, target_projected, grad_projected
        ctx.gradient = gradient
        ctx.mark_non_differentiable(predictions)
        return losses, predictions

    @staticmethod
    def backward(ctx, grad_losses, _):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("The loss's gradient is made once: call `backward` once, or compute the loss again.")
        return gradient.mul_(grad_losses[:, None]), None, None, None, None, None, None


def _score(head, projected, labels, loss_type, target_projected, needs_gradient):
    """`(losses, predictions, gradient by projected)` of a few slots."""
    logits = head.finish(projected)
    if loss_type == "ce":
        losses, grad_logits = _cross_entropy(logits, labels, needs_gradient)
    else:
        losses, grad_logits = _divergence(logits, head.finish(target_projected), loss_type, needs_gradient)
    return losses, logits.argmax(-1), head.unfinish(logits, grad_logits, labels) if needs_gradient else None


def _score_by_kernel(head, projected, labels, needs_gradient):
    """The same for cross-entropy."""
    from .cross_entropy_kernel import cross_entropy_in_place, cross_entropy_to_fp8

    if head.is_fp8:
        return cross_entropy_to_fp8(projected, labels, head.scale, head.softcap, needs_gradient)
    losses, predictions = cross_entropy_in_place(projected, labels, head.scale, head.softcap, needs_gradient)
    return losses, predictions, projected


@lru_cache(maxsize=1)
def _compiled_score():
    return compile_function(_score, dynamic=True)


def _cross_entropy(logits, labels, needs_gradient):
    log_normalizer = logits.logsumexp(-1)
    losses = log_normalizer - logits.gather(1, labels[:, None]).squeeze(1)
    if not needs_gradient:
        return losses, None
    probabilities = torch.exp(logits - log_normalizer[:, None])
    return losses, probabilities.scatter_add_(1, labels[:, None], -torch.ones_like(losses)[:, None])


def _divergence(logits, target_logits, loss_type, needs_gradient):
    """KL(p || q), TV(p, q), or LK = lambda KL + (1 - lambda) TV with lambda = exp(-3 sum min(p, q)) (arXiv 2602.23881)."""
    log_q, log_p = logits.log_softmax(-1), target_logits.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    share = {"kl": torch.ones_like(kl), "tv": torch.zeros_like(kl), "lk": torch.exp(-3 * (1 - tv))}[loss_type]
    losses = share * kl + (1 - share) * tv
    if not needs_gradient:
        return losses, None
    towards_q = 0.5 * torch.sign(q - p)
    grad_tv = q * (towards_q - (q * towards_q).sum(-1, keepdim=True))
    return losses, share[:, None] * (q - p) + (1 - share)[:, None] * grad_tv


def compute_dflash_loss(
    hidden_states: torch.Tensor,
    head,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    *,
    loss_type: str = "ce",
    weighting: str = "decay",
    gamma: float = 4.0,
    dpace_alpha: float = 0.5,
    denominator: torch.Tensor | float | None = None,
    target_hidden_states: torch.Tensor | None = None,
    slot_indices: torch.Tensor | None = None,
    kept_blocks: torch.Tensor | None = None,
    implementation: str | None = None,
    max_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of N blocks: sum of weight * loss over supervised slots, by a denominator.

    Args:
        hidden_states (`torch.Tensor` of shape `[N, B - 1, H]`):
            The drafter's output for slots 1 .. B - 1.
        head ([`LanguageHead`]):
            The target's, on the same device; for `"ce"` perhaps in FP8, an [`Fp8Head`].
        labels (`torch.Tensor` of shape `[N, B - 1]`, int64):
            Token that each slot shall predict; anything where unsupervised.
        supervised (`torch.Tensor` of shape `[N, B - 1]`, bool):
            Which slots have a label.
        loss_type (`str`, *optional*, defaults to `"ce"`):
            `"ce"` on `labels`; `"kl"`, `"tv"` or `"lk"` against the target's distribution.
        weighting (`str`, *optional*, defaults to `"decay"`):
            `"decay"` for [`position_weights`], `"dpace"` for [`dpace_weights`] (needs `"ce"`).
        gamma (`float`, *optional*, defaults to 4.0):
            Of the decay weights.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            Smoothing of the D-PACE weights.
        denominator (`torch.Tensor` or `float`, *optional*):
            What the weighted sum is divided by; by default the sum of the decay weights of these supervised slots (D-PACE:
            their number). A trainer passes that of the whole optimizer step, over all micro-batches and ranks.
        target_hidden_states (`torch.Tensor` of shape `[N, B - 1, H]`, or `[S, H]` with `slot_indices`, *optional*):
            The target's final normed hidden states from which it predicts each slot's token; its logits are made of them.
        slot_indices (`torch.Tensor` of shape `[S]`, int64, *optional*):
            `supervised.flatten().nonzero()`, if known: finding them makes the host wait for a GPU.
        kept_blocks (`torch.Tensor` of shape `[N]`, bool, *optional*):
            Blocks whose loss counts. Others (of a sample that came out non-finite) add nothing but keep their share of the
            denominator.
        implementation (`str`, *optional*):
            `"eager"`, `"compiled"` or, for `"ce"` on CUDA, `"triton"`; see [`default_implementation`].
        max_elements (`int`, *optional*):
            Logits that stand in memory at once; 2^28 in plain PyTorch, more where they are in the head's dtype.

    Returns:
        `(loss, correct)`: a scalar in fp32 or better, and `[N, B - 1]` bool, whether the drafter's most likely token is the
        label (`False` where unsupervised).

    Raises:
        `ValueError`: if an option is unknown or an input that it needs is missing.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"`loss_type` is {loss_type!r}: choose one of {', '.join(LOSS_TYPES)}.")
    if weighting not in WEIGHTINGS:
        raise ValueError(f"`weighting` is {weighting!r}: choose one of {', '.join(WEIGHTINGS)}.")
    if weighting == "dpace" and loss_type != "ce":
        raise ValueError(f"D-PACE weights are made of cross-entropies: use `loss_type='ce'`, not {loss_type!r}.")
    if loss_type != "ce" and target_hidden_states is None:
        raise ValueError(f"`loss_type={loss_type!r}` compares distributions: pass `target_hidden_states`.")
    if head.is_fp8 and loss_type != "ce":
        raise ValueError(f"A head in FP8 is for `loss_type='ce'`, not {loss_type!r}.")
    if implementation is None:
        implementation = default_implementation(loss_type, head.weight)
    elif implementation not in IMPLEMENTATIONS or (implementation == "triton" and loss_type != "ce"):
        raise ValueError(
            f"`implementation={implementation!r}` with `loss_type={loss_type!r}`: choose one of {', '.join(IMPLEMENTATIONS)}; "
            "triton is for ce only."
        )

    num_blocks, num_drafts, hidden_size = hidden_states.shape
    if slot_indices is None:
        slot_indices = supervised.flatten().nonzero().squeeze(1)
    if target_hidden_states is not None and target_hidden_states.dim() == 3:
        target_hidden_states = target_hidden_states.reshape(-1, target_hidden_states.shape[-1])[slot_indices]
    if kept_blocks is not None:
        kept_slots = kept_blocks[slot_indices // num_drafts]
        if target_hidden_states is not None:
            # A zero weight does not silence NaN.
            target_hidden_states = torch.where(kept_slots[:, None], target_hidden_states, 0)

    slot_labels = labels.flatten()[slot_indices]
    losses, predictions = _SlotLosses.apply(
        # Not by square brackets, whose backward pass sorts the indices.
        hidden_states.reshape(-1, hidden_size).index_select(0, slot_indices),
        head,
        slot_labels,
        loss_type,
        target_hidden_states,
        implementation,
        max_elements or _MAX_ELEMENTS[implementation],
    )
    decay = position_weights(num_drafts + 1, gamma, device=losses.device, dtype=losses.dtype)
    if weighting == "decay":
        weights = decay[slot_indices % num_drafts]
        own_denominator = weights.sum()
    else:
        flat = torch.zeros(num_blocks * num_drafts, device=losses.device, dtype=losses.dtype)
        confidences = flat.index_put((slot_indices,), torch.exp(-losses.detach())).view(num_blocks, num_drafts)
        weights = dpace_weights(confidences, supervised, dpace_alpha).flatten()[slot_indices]
        own_denominator = supervised.sum().to(losses.dtype)
    if kept_blocks is not None:
        weights = weights * kept_slots

    if denominator is None:
        denominator = own_denominator
    # A step without any supervised slot has a zero loss and zero gradients, and every rank still runs its backward pass.
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.to(losses.device, losses.dtype)
    else:
        # Filled in by a kernel: a copy from the host would make it wait for the device.
        denominator = torch.full((), denominator, device=losses.device, dtype=losses.dtype)
    loss = (weights * losses).sum() / torch.where(denominator > 0, denominator, torch.ones_like(denominator))

    correct = torch.zeros(num_blocks * num_drafts, dtype=torch.bool, device=losses.device)
    correct[slot_indices] = predictions == slot_labels
    return loss, correct.view(num_blocks, num_drafts)
