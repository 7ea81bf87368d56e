# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: flex attention, which trains there, against dense masks, which every other test checks on the CPU.

python3 -m pytest -m gpu tests/gpu
"""

from functools import partial

import pytest
import torch
from tiny_drafters import MASK_TOKEN_ID, make_rows, run_drafter

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter.blocks import anchor_hash, select_anchors
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation
from hf_dflash.target.language_head import LanguageHead
from hf_dflash.training.block_batch import draw_blocks


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, VOCABULARY = 128, 512

# Reply lengths around tiles of 128 and gaps; the second layout has many short documents, the third a single block.
LAYOUTS = {
    "long and short": ["0" * 200 + "1" * 333, "0" * 5 + "1" * 40, "1" * 128, "0" * 100],
    "many short": ["0" * (1 + i % 7) + "1" * (3 + i % 11) + "00" + "1" * (i % 5) for i in range(60)],
    "one block": ["0" * 3 + "1" * 2],
}
KINDS = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding": {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
    "mixed": {"sliding_window": 150, "layer_types": ["sliding_attention", "full_attention"], "is_causal": None},
}


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_drafter(block_size, **kind):
    config = DFlashConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=[1, 3],
        num_target_layers=6,
        initializer_range=0.1,
        **kind,
    )
    torch.manual_seed(0)
    return DFlashForSpeculation(config).cuda()


def run(drafter, batch, features, embedding, head, *, flex, autocast=False):
    """`(loss, hidden states of real blocks, gradients)`."""
    drafter.zero_grad()
    features = features.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        states = run_drafter(drafter, embedding, batch, features, flex=flex).float()
    loss, _ = compute_dflash_loss(states[:, 1:], head, batch.data_labels, batch.supervised)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()} | {"features": features.grad}
    return loss.detach(), states[batch.valid.flatten()].detach(), gradients


def make_inputs(masks, block_size, packed, num_anchors=40):
    rows = [{**row, "input_ids": [t % VOCABULARY for t in row["input_ids"]]} for row in make_rows(masks)]
    batch = draw_blocks(
        collate_rows(rows),
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        num_anchors=num_anchors,
        anchor_ratio=None,
        seed=1,
        epoch=0,
        packed=packed,
    ).to(torch.device("cuda"))
    torch.manual_seed(1)
    features = torch.randn(sum(map(len, masks)), 2 * HIDDEN, device="cuda")
    embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, device="cuda").requires_grad_(False)
    return batch, features, embedding, LanguageHead(0.1 * torch.randn(VOCABULARY, HIDDEN, device="cuda"))


def assert_close(ours, reference, tolerance):
    for name, value in reference.items():
        assert torch.isfinite(ours[name]).all(), name
        scale = max(1e-3, float(value.abs().max()))
        assert float((ours[name] - value).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize(("kind", "block_size"), [*((kind, 16) for kind in KINDS), ("mixed", 5)])
def test_flex_attention_equals_dense_masks_in_values_and_gradients(kind, block_size):
    drafter = make_drafter(block_size, **KINDS[kind])
    for masks in LAYOUTS.values():
        inputs = make_inputs(masks, block_size, packed=True)
        loss, states, gradients = run(drafter, *inputs, flex=True)
        expected_loss, expected_states, expected_gradients = run(drafter, *inputs, flex=False)
        torch.testing.assert_close(states, expected_states, rtol=0, atol=1e-4)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert_close(gradients, expected_gradients, 1e-4)


def test_packed_flex_attention_equals_dense_masks_with_a_row_for_each_document():
    drafter = make_drafter(16, **KINDS["mixed"])
    masks = LAYOUTS["long and short"]
    loss, states, gradients = run(drafter, *make_inputs(masks, 16, packed=True), flex=True)
    by_row = run(drafter, *make_inputs(masks, 16, packed=False), flex=False)
    torch.testing.assert_close(states, by_row[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(loss, by_row[0], rtol=1e-5, atol=0)
    assert_close(gradients, by_row[2], 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_with_several_rows_and_padding_blocks_equals_dense_masks(kind):
    drafter = make_drafter(16, **KINDS[kind])
    inputs = make_inputs(LAYOUTS["long and short"], 16, packed=False)
    loss, states, gradients = run(drafter, *inputs, flex=True)
    expected = run(drafter, *inputs, flex=False)
    torch.testing.assert_close(states, expected[1], rtol=0, atol=1e-4)
    assert_close(gradients, expected[2], 1e-4)


def test_autocast_to_bfloat16_with_fp32_masters_is_close_to_float32_in_both_forms():
    """What `--bf16` runs: queries and keys leave their fp32 norms, values do not."""
    drafter = make_drafter(16, **KINDS["mixed"])
    batch, features, embedding, head = make_inputs(LAYOUTS["long and short"], 16, packed=True)
    exact = run(drafter, batch, features, embedding, head, flex=True)
    for flex in (True, False):
        loss, states, gradients = run(drafter, batch, features.bfloat16(), embedding, head, flex=flex, autocast=True)
        assert all(gradient.dtype == torch.float32 for name, gradient in gradients.items() if name != "features")
        torch.testing.assert_close(loss, exact[0], rtol=0.02, atol=0)
        norm = torch.cat([g.flatten() for name, g in gradients.items() if name != "features"]).norm()
        expected = torch.cat([g.flatten() for name, g in exact[2].items() if name != "features"]).norm()
        torch.testing.assert_close(norm, expected, rtol=0.1, atol=0)


def test_no_gradient_reaches_features_at_or_after_the_last_anchor():
    drafter = make_drafter(16)
    masks = ["0" * 150 + "1" * 30, "0" * 10 + "1" * 60]
    inputs = make_inputs(masks, 16, packed=True)
    batch = inputs[0]
    _, _, gradients = run(drafter, *inputs, flex=True)
    seen = gradients["features"].abs().sum(-1) > 0
    positions = batch.anchor_positions[batch.valid.flatten()].cpu()
    for start, end in ((0, 180), (180, 250)):
        last = int(positions[(positions >= start) & (positions < end)].max())
        assert seen[start:last].all() and not seen[last:end].any()


def test_many_widths_stay_compiled():
    """Uncompiled flex attention holds every score."""
    drafter = make_drafter(16)
    for length in range(300, 4000, 400):
        inputs = make_inputs(["0" * 4 + "1" * length], 16, packed=True, num_anchors=200)
        batch = inputs[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(drafter, *inputs, flex=True)
    # One copy of the scores of one layer: 4 heads x 3,328 slots x 7,300 keys in fp32, 390 MB.
    scores = 4 * batch.slot_ids.numel() * (batch.slot_ids.numel() + batch.context_index.numel()) * 4
    assert torch.cuda.max_memory_allocated() - before < scores


@pytest.mark.parametrize("num_documents", [1, 5])
def test_anchors_on_cuda_are_those_on_the_cpu(num_documents):
    lengths = torch.tensor([700 + 31 * i for i in range(num_documents)])
    document_ids = torch.arange(num_documents).repeat_interleave(lengths)
    loss_mask = torch.rand(len(document_ids), generator=torch.Generator().manual_seed(0)) < 0.9
    keys = document_ids * 1_000_003 + 17
    positions = torch.arange(len(document_ids))
    assert torch.equal(anchor_hash(7, 3, keys, positions), anchor_hash(7, 3, keys.cuda(), positions.cuda()).cpu())
    options = partial(select_anchors, num_anchors=100, block_size=16, anchor_ratio=0.25, seed=7, epoch=3)
    on_cpu = options(loss_mask, document_ids=document_ids, document_keys=keys)
    on_cuda = options(loss_mask.cuda(), document_ids=document_ids.cuda(), document_keys=keys.cuda())
    for one, two in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(one, two.cpu())
