# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""speculators 0.9.0 loads what we export, and we import what it saves."""

import pytest
import torch
from tiny_models import make_target

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_dense_mask
from hf_dflash.drafter.modeling_dflash import create_training_masks
from hf_dflash.hub.layouts import export_drafter, import_drafter


pytest.importorskip(
    "speculators",
    reason="the outside reference is missing: `make test` installs it with `pip install --no-deps speculators==0.9.0`",
)

from speculators import SpeculatorModel  # noqa: E402
from speculators.models.dflash import core as peer_core  # noqa: E402
from speculators.models.dflash.config import DFlashSpeculatorConfig  # noqa: E402


pytestmark = pytest.mark.compat

BLOCK_SIZE = 4
CONTEXT = 40
ANCHORS = torch.tensor([3, 17, 30])
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """speculators takes embedding, head and final norm from the target's own files."""
    folder = tmp_path_factory.mktemp("target")
    make_target("qwen3").save_pretrained(folder)
    return folder


def export_and_load(target, target_folder, tmp_path, **overrides):
    config = create_drafter_config(
        target.config,
        num_hidden_layers=2,
        block_size=BLOCK_SIZE,
        mask_token_id=95,
        num_target_features=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        **overrides,
    )
    drafter = DFlashForSpeculation(config).to(torch.bfloat16).float()
    folder = export_drafter(drafter, tmp_path / "serving", target=str(target_folder), engines=("vllm", "sglang"))
    peer_config = DFlashSpeculatorConfig.from_pretrained(folder)
    peer_config.transformer_layer_config._attn_implementation = "eager"
    return drafter, SpeculatorModel.from_pretrained(folder, config=peer_config, dtype=torch.float32).eval()


def hidden_states_of_both(drafter, peer, target, monkeypatch):
    context = torch.randn(1, CONTEXT, 2 * drafter.config.hidden_size)
    input_ids = torch.randint(3, 90, (1, CONTEXT))
    valid = torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(peer_core, "select_anchors", lambda *args: (ANCHORS, valid))
    documents = torch.zeros(CONTEXT, dtype=torch.long)
    with torch.no_grad():
        theirs, *_ = peer._backbone_forward(
            context,
            input_ids,
            torch.ones(1, CONTEXT),
            torch.randn(1, CONTEXT, drafter.config.hidden_size),
            documents[None],
            max_anchors=len(ANCHORS),
        )

        def create_mask(**kind):
            mask_mod, q_len, kv_len = create_anchor_block_mask_mod(documents, ANCHORS, valid, BLOCK_SIZE, **kind)
            return create_dense_mask(mask_mod, 1, q_len, kv_len, context.device)

        slots = torch.full((len(ANCHORS), BLOCK_SIZE), drafter.config.mask_token_id)
        slots[:, 0] = input_ids[0, ANCHORS]
        positions = torch.cat([torch.arange(CONTEXT), (ANCHORS[:, None] + torch.arange(BLOCK_SIZE)).flatten()])[None]
        ours = drafter(
            target.get_input_embeddings()(slots.view(1, -1)),
            context,
            positions,
            attention_mask=create_training_masks(drafter, create_mask),
        ).last_hidden_state
    return ours, theirs


def test_speculators_computes_what_we_compute_with_full_attention(tiny_qwen3, target_folder, tmp_path, monkeypatch):
    drafter, peer = export_and_load(tiny_qwen3, target_folder, tmp_path)
    assert peer.config.aux_hidden_state_layer_ids == [2, 4]
    assert peer.config.block_size == BLOCK_SIZE and peer.config.mask_token_id == 95
    assert peer.config.speculators_config.proposal_methods[0].speculative_tokens == BLOCK_SIZE - 1
    ours, theirs = hidden_states_of_both(drafter, peer, tiny_qwen3, monkeypatch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, None])
def test_speculators_window_differs_only_for_blocks_whose_context_exceeds_it(
    is_causal, tiny_qwen3, target_folder, tmp_path, monkeypatch
):
    """Its window starts at the anchor instead of at the slot: at anchor 3 both see everything, further on it sees more."""
    drafter, peer = export_and_load(tiny_qwen3, target_folder, tmp_path, **SLIDING, is_causal=is_causal)
    assert peer.config.sliding_window_non_causal is (is_causal is False)
    ours, theirs = (
        states.view(len(ANCHORS), BLOCK_SIZE, -1)
        for states in hidden_states_of_both(drafter, peer, tiny_qwen3, monkeypatch)
    )
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
    assert (ours[1:] - theirs[1:]).abs().max() > 1e-3


def test_what_speculators_saves_is_imported(tiny_qwen3, target_folder, tmp_path):
    drafter, peer = export_and_load(tiny_qwen3, target_folder, tmp_path)
    peer.save_pretrained(tmp_path / "speculators")
    imported = import_drafter(tmp_path / "speculators", tmp_path / "native")
    assert imported.config.target_layer_ids == drafter.config.target_layer_ids
    assert imported.config.is_causal is False
    assert imported.config.rope_parameters == drafter.config.rope_parameters
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(imported.state_dict()[name], tensor), name
