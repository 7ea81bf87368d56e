# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Small drafters, random documents for them, and a forward pass over the blocks of a micro-batch."""

import torch
from tiny_models import VOCAB_SIZE

from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_dense_mask, create_flex_mask
from hf_dflash.drafter.configuration_dflash import create_drafter_config
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, create_training_masks


MASK_TOKEN_ID = 5
BLOCK_SIZE = 4
TARGET_LAYER_IDS = [1, 3]


def make_drafter(
    target, dtype: torch.dtype = torch.float32, seed: int = 0, initializer_range: float = 0.2, **overrides
) -> DFlashForSpeculation:
    """A random drafter of two layers for a tiny target, with norms that are not all ones."""
    options = {
        "num_hidden_layers": 2,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TARGET_LAYER_IDS,
        "initializer_range": initializer_range,
        **overrides,
    }
    config = create_drafter_config(target.config, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DFlashForSpeculation(config)
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter.to(dtype)


def make_rows(masks: list[str], seed: int = 0, first_row_id: int = 0) -> list[dict]:
    """Dataset rows of random tokens; a mask is written as in `"001101"`, a 1 for each supervised token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(6, VOCAB_SIZE, (len(mask),), generator=generator).tolist(),
            "loss_mask": [int(bit) for bit in mask],
            "row_id": first_row_id + i,
            "length": len(mask),
        }
        for i, mask in enumerate(masks)
    ]


def run_drafter(drafter, embedding, batch, features: torch.Tensor, *, flex: bool = False) -> torch.Tensor:
    """Hidden states `[N, B, H]` of the blocks of a `BlockBatch`, from packed features `[T, K * H]`."""
    blocks = (batch.document_ids, batch.anchors, batch.valid, batch.block_size)

    def create_mask(**kind):
        if flex:
            return create_flex_mask(*blocks, **kind)
        mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*blocks, **kind)
        return create_dense_mask(mask_mod, batch.anchors.shape[0], q_len, kv_len, features.device, features.dtype)

    hidden_states = drafter(
        embedding(batch.slot_ids).to(features.dtype),
        features[batch.context_index],
        batch.position_ids,
        attention_mask=create_training_masks(drafter, create_mask),
    ).last_hidden_state
    return hidden_states.reshape(-1, batch.block_size, hidden_states.shape[-1])
