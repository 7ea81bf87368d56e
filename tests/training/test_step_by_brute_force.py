# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Loss and gradients of a whole optimizer step against a loop over documents, anchors, slots and keys, in fp64.

The loop reads each document by itself and each block with the keys that it may see and no others: no masks, no padding.
"""

import math

import brute_force
import pytest
import torch
from datasets import Dataset
from tiny_drafters import make_drafter, make_rows
from tiny_models import make_target
from tiny_training import GradientRecorder, make_trainer, relative_difference

from hf_dflash import FrozenTarget
from hf_dflash.training.block_batch import draw_blocks


pytestmark = pytest.mark.compat

# No prompt and shorter than most blocks; one anchor at the very end; nothing supervised; a cut-off end; two turns.
MASKS = ["111", "00011", "0000", "0111111100", "001111100111111", "0" + "1" * 17, "01"]
FIRST_ROW_ID = 7
LAYER_IDS = [1, 3]
OPTIONS = {
    "num_anchors": 512,
    "anchor_ratio": 0.6,
    "loss_type": "ce",
    "loss_weighting": "decay",
    "loss_gamma": 4.0,
    "dpace_alpha": 0.5,
    "labels": "target",
}


def norm(states, weight, eps):
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate(states, positions, theta):
    """`[n, heads, D]`, the two halves as real and imaginary parts."""
    half = states.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=states.dtype)
    angles = torch.tensor(positions, dtype=states.dtype)[:, None, None] * frequencies
    turned = torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def run_block(weights, config, slots, features, anchor):
    """Hidden states `[B, H]` of one block, from the features of the positions before its anchor."""
    size, heads, groups = config.block_size, config.num_attention_heads, config.num_key_value_heads
    eps, theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    positions = list(range(anchor + size))
    for index, layer_type in enumerate(config.layer_types):
        layer = {
            name.removeprefix(f"layers.{index}.").removesuffix(".weight"): weight for name, weight in weights.items()
        }
        is_sliding = layer_type == "sliding_attention"
        is_causal = is_sliding if config.is_causal is None else config.is_causal
        normed = norm(slots, layer["input_layernorm"], eps)
        read = torch.cat([context, normed])
        queries = (normed @ layer["self_attn.q_proj"].T).view(size, heads, -1)
        queries = rotate(norm(queries, layer["self_attn.q_norm"], eps), positions[anchor:], theta)
        keys = (read @ layer["self_attn.k_proj"].T).view(len(read), groups, -1)
        keys = rotate(norm(keys, layer["self_attn.k_norm"], eps), positions, theta)
        values = (read @ layer["self_attn.v_proj"].T).view(len(read), groups, -1)
        attended = []
        for slot in range(size):
            at = anchor + slot
            seen = [
                key
                for key in positions
                if (not is_sliding or abs(at - key) < config.sliding_window) and (not is_causal or key <= at)
            ]
            for head in range(heads):
                group = head * groups // heads
                scores = keys[seen, group] @ queries[slot, head] / math.sqrt(config.head_dim)
                attended.append(scores.softmax(0) @ values[seen, group])
        slots = slots + torch.stack(attended).view(size, -1) @ layer["self_attn.o_proj"].T
        normed = norm(slots, layer["post_attention_layernorm"], eps)
        gate = normed @ layer["mlp.gate_proj"].T
        slots = slots + (gate * gate.sigmoid() * (normed @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    return norm(slots, weights["norm.weight"], eps)


def slot_loss(logits, target_logits, label, loss_type):
    log_q, log_p = logits.log_softmax(0), target_logits.log_softmax(0)
    if loss_type == "ce":
        return -log_q[label]
    kl = (log_p.exp() * (log_p - log_q)).sum()
    tv = (log_p.exp() - log_q.exp()).abs().sum() / 2
    share = math.exp(-3 * float(torch.minimum(log_p.exp(), log_q.exp()).sum().detach()))
    return {"kl": kl, "tv": tv, "lk": share * kl + (1 - share) * tv}[loss_type]


def slot_weights(losses, options):
    """Of the supervised slots of a block, which are its first ones."""
    if options["loss_weighting"] == "decay":
        return [math.exp(-k / options["loss_gamma"]) for k in range(len(losses))]
    alpha = options["dpace_alpha"]
    smoothed = [(1 - alpha) * math.exp(-float(loss.detach())) + alpha for loss in losses]
    return [sum(math.prod(smoothed[: m + 1]) for m in range(k, len(losses))) for k in range(len(losses))]


def step_by_loops(drafter, target, rows, options, lost_rows):
    """`(loss, gradients)` of one step over all rows; those of `lost_rows` keep their share of the denominator."""
    config, frozen = drafter.config, FrozenTarget(target, LAYER_IDS)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in drafter.named_parameters()}
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    total, denominator = 0, 0.0
    for row in rows:
        ids, mask = row["input_ids"], row["loss_mask"]
        everywhere = torch.arange(len(ids))
        features = frozen(torch.tensor([ids]), torch.tensor([len(ids)]), everywhere, return_label_hidden_states=True)
        target_logits = features.label_hidden_states @ head.T
        limits = (options["num_anchors"], options["anchor_ratio"] or None)
        for anchor in brute_force.select_anchors(mask, *limits, 42, 0, row["row_id"]):
            slots = embedding[[ids[anchor]] + [config.mask_token_id] * (config.block_size - 1)]
            states = run_block(weights, config, slots, features.context_hidden_states, anchor)
            losses = []
            for slot in range(1, 1 + sum(brute_force.supervised_slots(mask, anchor, config.block_size))):
                wanted = target_logits[anchor + slot - 1]
                label = int(wanted.argmax()) if options["labels"] == "target" else ids[anchor + slot]
                losses.append(slot_loss(head @ states[slot], wanted, label, options["loss_type"]))
            of_block = slot_weights(losses, options)
            denominator += sum(of_block) if options["loss_weighting"] == "decay" else len(losses)
            if row["row_id"] not in lost_rows:
                total = total + sum(weight * loss for weight, loss in zip(of_block, losses, strict=True))
    loss = total / denominator
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in weights.items()}


class LosesDocuments(FrozenTarget):
    """The last position of documents of one length overflows."""

    lost_length = None

    def __call__(self, input_ids, lengths, *args, **kwargs):
        features = super().__call__(input_ids, lengths, *args, **kwargs)
        features.context_hidden_states[(lengths.cumsum(0) - 1)[lengths == self.lost_length]] = float("inf")
        return features


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "drafter_options", "options", "lost_length"),
    [
        ("qwen3", {"block_size": 2}, {"anchor_ratio": 0.0, "loss_gamma": 0.5}, None),
        ("qwen3_5", {"block_size": 5, "is_causal": True}, {"labels": "data", "num_anchors": 2}, None),
        ("qwen3_5", {"block_size": 7, "sliding_window": 9, "is_causal": None}, {"loss_weighting": "dpace"}, 10),
        ("llama", {"block_size": 30}, {"loss_type": "kl", "loss_gamma": 1e9}, 18),
        ("qwen3_sliding", {"block_size": 4, "sliding_window": 4}, {"loss_type": "tv"}, 3),
        ("qwen3_5", {"block_size": 16, "is_causal": True}, {"loss_type": "lk"}, None),
    ],
    ids=str,
)
def test_a_step_is_that_of_plain_loops_however_it_is_cut_and_laid_out(
    kind, drafter_options, options, lost_length, tmp_path, monkeypatch
):
    target, options = make_target(kind, torch.float64), {**OPTIONS, **options}
    rows = make_rows(MASKS, first_row_id=FIRST_ROW_ID)
    if drafter_options.get("sliding_window"):
        drafter_options = {**drafter_options, "layer_types": ["sliding_attention", "full_attention"]}
    drafter = make_drafter(target, torch.float64, **drafter_options)
    lost_rows = {row["row_id"] for row in rows if row["length"] == lost_length}
    loss, gradients = step_by_loops(drafter, target, rows, options, lost_rows)

    for token_budget, accumulation, packed, checkpointing in (
        (999, 1, False, False),
        (1, 9, False, True),
        (36, 5, True, False),
    ):
        # The layout of flex attention, which has no backward pass here, with dense masks.
        monkeypatch.setattr(
            "hf_dflash.training.micro_batches.draw_blocks",
            lambda *args, packed=packed, **kwargs: draw_blocks(*args, **{**kwargs, "packed": packed}),
        )
        reading, recorder = LosesDocuments(target, LAYER_IDS), GradientRecorder()
        reading.lost_length = lost_length
        trainer = make_trainer(
            tmp_path / str(token_budget),
            dtype=torch.float64,
            target=reading,
            drafter=make_drafter(target, torch.float64, **drafter_options),
            dataset=Dataset.from_list(rows),
            callbacks=[recorder],
            max_steps=1,
            max_grad_norm=0.0,
            token_budget=token_budget,
            gradient_accumulation_steps=accumulation,
            gradient_checkpointing=checkpointing,
            **options,
        )
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-12)
        assert relative_difference(recorder.first, gradients) <= 1e-12
