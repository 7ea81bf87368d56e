# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The loss of a drafter: what each supervised slot costs, and how much each slot counts.

Shapes: N blocks, B slots of a block, S supervised slots of all blocks, H hidden size, V vocabulary.
The head is frozen, so the gradient of a slot's loss by its hidden state can be made in the forward pass, chunk by chunk:
the full `[S, V]` logits never exist, and nothing is computed twice. Slots only meet in the weights, which are detached.
"""

import torch


LOSS_TYPES = ("ce", "kl", "tv", "lk")
WEIGHTINGS = ("decay", "dpace")


def position_weights(block_size: int, gamma: float, device=None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """How much slots 1 .. B - 1 count: exp(-(k - 1) / gamma), for a slot is only reached if those before it were right
    (paper, section 4.2).

    Args:
        block_size (`int`): B.
        gamma (`float`): how slowly the weights decay, in slots.

    Returns:
        `torch.Tensor` of shape `[B - 1]`.
    """
    if gamma is None or gamma <= 0:
        raise ValueError(f"`gamma` is {gamma}: the decay of the slot weights must be a positive number of slots.")
    return torch.exp(-torch.arange(block_size - 1, device=device, dtype=dtype) / gamma)


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


class _SlotLosses(torch.autograd.Function):
    """Losses of slots `[S]` with the gradient by `hidden_states` made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden_states, head, labels, loss_type, target_hidden_states, max_elements):
        needs_gradient = ctx.needs_input_grad[0]
        precise = torch.promote_types(head.weight.dtype, torch.float32)
        losses = torch.empty(hidden_states.shape[0], device=hidden_states.device, dtype=precise)
        predictions = torch.empty(hidden_states.shape[0], device=hidden_states.device, dtype=torch.long)
        gradient = torch.empty_like(hidden_states) if needs_gradient else None
        step = max(1, max_elements // head.vocab_size)
        for start in range(0, hidden_states.shape[0], step):
            rows = slice(start, start + step)
            logits = head.logits(hidden_states[rows])
            predictions[rows] = logits.argmax(-1)
            if loss_type == "ce":
                losses[rows], grad_logits = _cross_entropy(logits, labels[rows], needs_gradient)
            else:
                target_logits = head.logits(target_hidden_states[rows])
                losses[rows], grad_logits = _divergence(logits, target_logits, loss_type, needs_gradient)
            if needs_gradient:
                gradient[rows] = head.backward(logits, grad_logits).to(gradient.dtype)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(predictions)
        return losses, predictions

    @staticmethod
    def backward(ctx, grad_losses, _):
        gradient = grad_losses[:, None].to(ctx.gradient.dtype) * ctx.gradient
        ctx.gradient = None
        return gradient, None, None, None, None, None


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
    max_elements: int = 1 << 28,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of N blocks (DESIGN 3.6): sum of weight * loss over supervised slots, by a denominator.

    Args:
        hidden_states (`torch.Tensor` of shape `[N, B - 1, H]`):
            The drafter's output for slots 1 .. B - 1.
        head ([`LanguageHead`]):
            The target's, on the same device.
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
        max_elements (`int`, *optional*, defaults to 2^28):
            Logits that stand in memory at once.

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
        hidden_states.reshape(-1, hidden_size)[slot_indices],
        head,
        slot_labels,
        loss_type,
        target_hidden_states,
        max_elements,
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
    denominator = torch.as_tensor(denominator, device=losses.device, dtype=losses.dtype)
    loss = (weights * losses).sum() / torch.where(denominator > 0, denominator, torch.ones_like(denominator))

    correct = torch.zeros(num_blocks * num_drafts, dtype=torch.bool, device=losses.device)
    correct[slot_indices] = predictions == slot_labels
    return loss, correct.view(num_blocks, num_drafts)
