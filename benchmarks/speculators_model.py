# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""speculators 0.9.0's DFlash model of the same shapes as a drafter of ours, ready to train: what two benchmarks compare with."""

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.attention import flex_attention_forward
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, Qwen3Config

from hf_dflash import DFlashConfig


_SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "rope_parameters layer_types sliding_window max_position_embeddings initializer_range"
).split()


def make_speculators_model(config: DFlashConfig, device_type: str) -> DFlashDraftModel:
    """
    Its model with random weights, of which the embedding and the heads are the target's to give.

    Args:
        config (`DFlashConfig`): of our drafter.
        device_type (`str`): `"cuda"`, where its layers are compiled one by one, or `"cpu"`. The model is made on torch's default
            device and may be moved.
    """
    is_cuda = device_type == "cuda"
    layers = Qwen3Config(
        **{name: getattr(config, name) for name in _SHARED}, use_sliding_window=config.sliding_window is not None
    )
    layers._attn_implementation = "simple_flex_attention" if is_cuda else "eager"
    AttentionInterface.register("simple_flex_attention", attend_in_one_dtype)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=config.vocab_size,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            aux_hidden_state_layer_ids=[layer_id + 1 for layer_id in config.target_layer_ids],
            sliding_window_non_causal=config.is_causal is False,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.block_size - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
    )
    if is_cuda:
        # Its whole-model compilation and its compiled mask did not finish in five minutes on an H200 (see train_step.py).
        model._create_mask_fn = create_block_mask
        for layer in model.layers:
            layer.compile()
    return model.train()


def attend_in_one_dtype(module, query, key, value, attention_mask, **kwargs):
    """Its flex attention; under autocast its norms leave queries and keys in fp32, beside values in bf16."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)
