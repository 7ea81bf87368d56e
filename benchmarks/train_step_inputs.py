# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What every side of train_step.py is given: the shapes of Qwen3.6-27B, and one document with random weights and features."""

import torch

from hf_dflash.drafter.configuration_dflash import DFlashConfig


QWEN36 = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "target_layer_ids": [1, 16, 31, 46, 61],
    "num_target_layers": 64,
    "mask_token_id": 248070,
    "block_size": 16,
}
TINY = {
    **QWEN36,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "target_layer_ids": [1, 61],
    "mask_token_id": 500,
}
GAMMA = 7.0


class Inputs:
    def __init__(self, config: DFlashConfig, context_length: int, num_anchors: int, device, dtype):
        torch.manual_seed(0)
        where = {"device": device, "dtype": dtype}
        self.config, self.device, self.dtype = config, device, dtype
        self.context_length, self.num_anchors, self.block_size = context_length, num_anchors, config.block_size
        self.features = torch.randn(1, context_length, len(config.target_layer_ids) * config.hidden_size, **where)
        self.last_hidden_states = torch.randn(1, context_length, config.hidden_size, **where)
        self.embedding = torch.randn(config.vocab_size, config.hidden_size, **where) * 0.02
        self.head_weight = torch.randn(config.vocab_size, config.hidden_size, **where) * 0.02
        self.input_ids = torch.randint(0, config.mask_token_id, (1, context_length), device=device)
        self.document_ids = torch.zeros(1, context_length, dtype=torch.long, device=device)
        last = context_length - config.block_size - 1
        self.anchors = torch.randperm(last, device=device)[:num_anchors].sort().values
        self.valid = torch.ones_like(self.anchors, dtype=torch.bool)
        self.labels = torch.randint(0, config.vocab_size, (num_anchors, config.block_size - 1), device=device)
        predicted_from = self.anchors[:, None] + torch.arange(config.block_size - 1, device=device)
        self.label_positions = predicted_from.unique()
        self.supervised = torch.ones_like(self.labels, dtype=torch.bool)
        self.slot_indices = torch.arange(self.labels.numel(), device=device)
