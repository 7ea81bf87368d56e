# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: compiled decoder layers with flex attention: the same numbers, nothing compiled anew, no wait of the host."""

import pytest
import torch
from tiny_drafters import MASK_TOKEN_ID, make_rows
from torch._dynamo.utils import counters

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter.blocks import create_flex_mask
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, create_training_masks
from hf_dflash.target.language_head import LanguageHead
from hf_dflash.training.block_batch import draw_blocks


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HIDDEN, VOCABULARY = 128, 512


def make_drafter():
    config = DFlashConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        block_size=16,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=[1, 3],
        num_target_layers=6,
        sliding_window=150,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    return DFlashForSpeculation(config).cuda().train()


def make_inputs(index: int):
    generator = torch.Generator().manual_seed(index)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    masks = ["0" * draw(1, 200) + "1" * draw(50, 400) for _ in range(draw(2, 6))]
    rows = [{**row, "input_ids": [t % VOCABULARY for t in row["input_ids"]]} for row in make_rows(masks)]
    batch = draw_blocks(
        collate_rows(rows),
        block_size=16,
        mask_token_id=MASK_TOKEN_ID,
        num_anchors=draw(10, 60),
        anchor_ratio=None,
        seed=index,
        epoch=0,
        packed=True,
    ).to(torch.device("cuda"))
    return batch, torch.randn(1, batch.context_index.shape[1], 2 * HIDDEN, device="cuda")


def step(drafter, batch, context, head, dtype=None):
    def create(**kind):
        return create_flex_mask(batch.document_ids, batch.anchors, batch.valid, batch.block_size, **kind)

    noise = head.weight[batch.slot_ids.flatten()].view(1, -1, HIDDEN)
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        states = drafter(
            noise, context, batch.position_ids, attention_mask=create_training_masks(drafter, create)
        ).last_hidden_state
    states = states.float().view(-1, batch.block_size, HIDDEN)[:, 1:]
    loss, _ = compute_dflash_loss(
        states, head, batch.data_labels, batch.supervised, slot_indices=batch.slot_indices, denominator=100.0
    )
    loss.backward()
    return loss.detach()


@pytest.fixture
def head():
    torch.manual_seed(1)
    return LanguageHead(0.1 * torch.randn(VOCABULARY, HIDDEN, device="cuda"))


def test_values_and_gradients_are_those_of_uncompiled_layers(head):
    plain, compiled = make_drafter(), make_drafter().compile_layers()
    for index in range(3):
        inputs = make_inputs(index)
        for drafter in (plain, compiled):
            drafter.zero_grad()
        torch.testing.assert_close(step(compiled, *inputs, head), step(plain, *inputs, head), rtol=1e-4, atol=0)
        for one, two in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-3 * float(two.grad.abs().max()))


def test_nothing_is_compiled_anew_over_50_varied_batches_in_the_precision_of_training(head):
    drafter = make_drafter().compile_layers()
    batches = [make_inputs(index) for index in range(60)]
    for batch, context in batches[:10]:
        step(drafter, batch, context, head, torch.bfloat16)
    known = counters["stats"]["unique_graphs"]
    widths = set()
    for batch, context in batches[10:]:
        step(drafter, batch, context, head, torch.bfloat16)
        widths.add((context.shape[1], batch.anchors.shape[1]))
    assert len(widths) > 10
    assert counters["stats"]["unique_graphs"] == known


def test_the_host_never_waits_in_a_step(head):
    drafter = make_drafter().compile_layers()
    inputs = make_inputs(0)
    for _ in range(2):
        step(drafter, *inputs, head, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(drafter, *inputs, head, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
