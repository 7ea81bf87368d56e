# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The drafter and its loss against an outside implementation: speculators 0.9.0, on identical weights.

What differs there, and is kept out of the comparison: no anchor stands in the last block of a row; supervision of a block
does not stop at its first unsupervised token (so blocks here are fully supervised); the loss is divided by the number of
supervised slots (so numerators are compared).
"""

import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import HIDDEN_SIZE, VOCAB_SIZE
from torch.nn.attention.flex_attention import create_mask

from hf_dflash.drafter.blocks import (
    create_anchor_block_mask_mod,
    create_dense_mask,
    find_eligible_anchors,
    find_supervised_slots,
)
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, create_training_masks
from hf_dflash.target.language_head import LanguageHead


speculators = pytest.importorskip(
    "speculators",
    reason="the outside reference is missing: `make test` installs it with `pip install --no-deps speculators==0.9.0`",
)

from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.dflash import attention as peer_attention  # noqa: E402
from speculators.models.dflash import core as peer_core  # noqa: E402


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
make_speculators_model = runpy.run_path(str(BENCHMARKS / "speculators_model.py"))["make_speculators_model"]

pytestmark = pytest.mark.compat

BLOCK_SIZE = 4
MASK_TOKEN_ID = 5
TARGET_LAYER_IDS = [1, 3]
# Three documents of a packed row, two prompts in the second one, and padding behind them.
DOCUMENT_LENGTHS = (17, 26, 9)
PADDING = 6


def make_drafter(**overrides) -> DFlashForSpeculation:
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TARGET_LAYER_IDS,
        "num_target_layers": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "initializer_range": 0.2,
        **overrides,
    }
    drafter = DFlashForSpeculation(DFlashConfig(**values)).eval()
    for name, parameter in drafter.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter


def make_peer(drafter: DFlashForSpeculation, target) -> torch.nn.Module:
    """speculators' drafter with the weights of ours, and the embedding, head and final norm of the target."""
    peer = make_speculators_model(drafter.config, "cpu").eval()
    head = target.get_output_embeddings().weight
    missing, unexpected = peer.load_state_dict(
        {
            **drafter.state_dict(),
            "embed_tokens.weight": target.get_input_embeddings().weight,
            "lm_head.weight": head,
            "verifier_lm_head.weight": head,
            "verifier_norm.weight": target.model.norm.weight,
        },
        strict=False,
    )
    assert not missing and not unexpected
    return peer


class PackedRow:
    """One row of several documents, target features at random, and the fully supervised blocks in it."""

    def __init__(self, target, block_size: int = BLOCK_SIZE):
        lengths = torch.tensor(DOCUMENT_LENGTHS)
        self.document_ids = torch.cat([torch.arange(3).repeat_interleave(lengths), torch.full((PADDING,), -1)])
        self.position_ids = torch.cat([torch.arange(length) for length in [*DOCUMENT_LENGTHS, PADDING]])
        context_length = len(self.document_ids)
        self.input_ids = torch.randint(6, VOCAB_SIZE, (context_length,))
        self.loss_mask = torch.ones(context_length, dtype=torch.long)
        for start, end in ((0, 5), (17, 21), (28, 31), (43, 45), (52, context_length)):
            self.loss_mask[start:end] = 0
        self.context = torch.randn(1, context_length, len(TARGET_LAYER_IDS) * HIDDEN_SIZE)
        self.last_hidden_states = torch.randn(1, context_length, HIDDEN_SIZE)

        eligible = find_eligible_anchors(self.loss_mask, self.document_ids).nonzero().squeeze(1)
        valid = torch.ones_like(eligible, dtype=torch.bool)
        supervised = find_supervised_slots(self.loss_mask, eligible, valid, block_size, self.document_ids)
        self.anchors = eligible[supervised.all(1) & (eligible < context_length - block_size)]
        self.valid = torch.ones_like(self.anchors, dtype=torch.bool)
        assert len(self.anchors) > 20

        offsets = torch.arange(block_size)
        slot_ids = torch.full((len(self.anchors), block_size), MASK_TOKEN_ID)
        slot_ids[:, 0] = self.input_ids[self.anchors]
        self.noise_embeds = target.get_input_embeddings()(slot_ids.view(1, -1))
        slot_positions = self.position_ids[self.anchors][:, None] + offsets
        self.all_positions = torch.cat([self.position_ids, slot_positions.view(-1)])[None]
        # Hidden state whose logits predict token a + k, for slots 1 .. B - 1.
        self.label_hidden_states = target.model.norm(
            self.last_hidden_states[0, self.anchors[:, None] + offsets[1:] - 1]
        )
        self.labels = target.get_output_embeddings()(self.label_hidden_states).argmax(-1)

    def hidden_states(self, drafter) -> torch.Tensor:
        """Of shape `[A, B, H]`."""

        def create_mask_(**kind):
            mask_mod, q_len, kv_len = create_anchor_block_mask_mod(
                self.document_ids, self.anchors, self.valid, drafter.config.block_size, **kind
            )
            return create_dense_mask(mask_mod, 1, q_len, kv_len, self.context.device)

        masks = create_training_masks(drafter, create_mask_)
        output = drafter(self.noise_embeds, self.context, self.all_positions, attention_mask=masks)
        return output.last_hidden_state.view(len(self.anchors), drafter.config.block_size, -1)

    def peer_arguments(self) -> dict:
        return {
            "hidden_states": self.context,
            "input_ids": self.input_ids[None],
            "loss_mask": self.loss_mask[None],
            "verifier_last_hidden_states": self.last_hidden_states,
            "document_ids": self.document_ids[None],
            "position_ids": self.position_ids[None],
            "max_anchors": len(self.anchors),
        }


@pytest.fixture(scope="module")
def row(tiny_qwen3):
    torch.manual_seed(3)
    return PackedRow(tiny_qwen3)


@pytest.fixture
def same_anchors(row, monkeypatch):
    """speculators draws anchors with torch's generator: give it ours."""
    monkeypatch.setattr(peer_core, "select_anchors", lambda *args: (row.anchors, row.valid))


@st.composite
def packed_documents(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = draw(st.integers(0, 4))
    document_ids = torch.cat(
        [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.full((padding,), -1)]
    )
    block_size = draw(st.integers(2, 5))
    anchors = draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=5, unique=True).map(sorted))
    return document_ids, torch.tensor(anchors), block_size


def visible(mask_mod, q_len, kv_len) -> torch.Tensor:
    return create_mask(mask_mod, B=1, H=1, Q_LEN=q_len, KV_LEN=kv_len, device="cpu")[0, 0]


@settings(max_examples=60, deadline=None)
@given(packed_documents())
def test_full_attention_mask_is_bit_equal(layout):
    document_ids, anchors, block_size = layout
    ours = create_anchor_block_mask_mod(document_ids, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size)
    theirs = peer_attention.create_anchor_block_mask_mod(document_ids, len(document_ids), anchors, block_size)
    assert ours[1:] == theirs[1:]
    assert torch.equal(visible(*ours), visible(*theirs))


@settings(max_examples=60, deadline=None)
@given(packed_documents(), st.integers(5, 12), st.booleans())
def test_sliding_window_of_speculators_does_not_move_with_the_slot(layout, window, is_causal):
    """Slot k at position a + k sees context keys above a + k - W here (and in vLLM and SGLang), from a - W on there."""
    document_ids, anchors, block_size = layout
    ours, q_len, kv_len = create_anchor_block_mask_mod(
        document_ids,
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
        block_size,
        sliding_window=window,
        is_causal=is_causal,
    )
    theirs, *_ = peer_attention.create_anchor_block_mask_mod(
        document_ids,
        len(document_ids),
        anchors,
        block_size,
        sliding_window=window,
        sliding_window_non_causal=not is_causal,
    )
    ours, theirs = visible(ours, q_len, kv_len), visible(theirs, q_len, kv_len)
    key = torch.arange(kv_len)
    anchor = anchors.repeat_interleave(block_size)[:, None]
    slot = torch.arange(block_size).repeat(len(anchors))[:, None]
    same_document = torch.zeros(q_len, kv_len, dtype=torch.bool)
    same_document[:, : len(document_ids)] = document_ids == document_ids[anchor]
    only_theirs = same_document & (key < anchor) & (key >= anchor - window) & (key <= anchor + slot - window)
    assert torch.equal(theirs, ours | only_theirs)
    assert not (ours & only_theirs).any()


def test_last_hidden_state_is_equal(row, tiny_qwen3, same_anchors):
    drafter = make_drafter()
    peer = make_peer(drafter, tiny_qwen3)
    with torch.no_grad():
        theirs, *_ = peer._backbone_forward(**row.peer_arguments())
        ours = row.hidden_states(drafter)
    torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=0, atol=1e-5)


def test_gradients_of_every_parameter_are_equal(row, tiny_qwen3, same_anchors):
    drafter = make_drafter()
    peer = make_peer(drafter, tiny_qwen3)
    loss, supervised = peer_loss(peer, row, "ce", "fixed-exp-decay")
    (loss * supervised).backward()
    our_loss(drafter, row, tiny_qwen3, "ce", "decay").backward()
    theirs = dict(peer.named_parameters())
    for name, parameter in drafter.named_parameters():
        scale = theirs[name].grad.abs().max()
        assert scale > 0
        assert (parameter.grad - theirs[name].grad).abs().max() / scale < 1e-5, name


def peer_loss(peer, row, loss_name: str, weighting: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and what it was divided by: the number of supervised slots, plus an epsilon."""
    _, loss, _ = peer(
        **row.peer_arguments(),
        loss_config=resolve_loss_config(loss_name, "eager"),
        gamma=4.0,
        per_position_loss_weight=weighting,
        dpace_alpha=0.5,
    )
    return loss, len(row.anchors) * (peer.block_size - 1) + 1e-5


def our_loss(drafter, row, target, loss_type: str, weighting: str) -> torch.Tensor:
    loss, _ = compute_dflash_loss(
        row.hidden_states(drafter)[:, 1:],
        LanguageHead.from_model(target),
        row.labels,
        torch.ones_like(row.labels, dtype=torch.bool),
        loss_type=loss_type,
        weighting=weighting,
        gamma=4.0,
        denominator=1.0,
        target_hidden_states=None if loss_type == "ce" else row.label_hidden_states,
    )
    return loss


@pytest.mark.parametrize(
    ("loss_type", "weighting", "peer_loss_name", "peer_weighting"),
    [
        ("ce", "decay", "ce", "fixed-exp-decay"),
        ("ce", "dpace", "ce", "dpace"),
        ("kl", "decay", "kl_div", "fixed-exp-decay"),
        ("tv", "decay", "tv", "fixed-exp-decay"),
        ("lk", "decay", "lk_hybrid", "fixed-exp-decay"),
    ],
)
def test_loss_numerator_is_equal(loss_type, weighting, peer_loss_name, peer_weighting, row, tiny_qwen3, same_anchors):
    drafter = make_drafter()
    peer = make_peer(drafter, tiny_qwen3)
    with torch.no_grad():
        loss, denominator = peer_loss(peer, row, peer_loss_name, peer_weighting)
        ours = our_loss(drafter, row, tiny_qwen3, loss_type, weighting)
    torch.testing.assert_close(ours, loss * denominator, rtol=1e-5, atol=0)
