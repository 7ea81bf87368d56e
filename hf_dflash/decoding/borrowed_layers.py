# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a drafter has no layers of its own for: the target's embeddings of its slots, and the target's head on their states.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch only.
"""

import torch
from torch import nn


def embed_slots(target, token_ids: torch.LongTensor) -> torch.Tensor:
    """The target's embeddings of slots. A norm inside the embedding layer is bypassed, as transformers' DFlash path does."""
    embedding = target.get_input_embeddings()
    norm = getattr(embedding, "embed_norm", None)
    if norm is None:
        return embedding(token_ids)
    embedding.embed_norm = nn.Identity()
    try:
        return embedding(token_ids)
    finally:
        embedding.embed_norm = norm


def compute_draft_logits(target, hidden_states: torch.Tensor) -> torch.Tensor:
    """The target's head on the drafter's hidden states, with the scale and soft-cap that the target's config states."""
    head = target.get_output_embeddings()
    logits = head(hidden_states.to(head.weight.device, head.weight.dtype))
    config = target.config.get_text_config(decoder=True)
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
