# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a run will need, from configurations alone: memory of each device, and whether targets or drafters wait.

Estimates, to be right within a quarter or so: allocator waste and compiler buffers are not modelled.
"""

import re
from dataclasses import dataclass, replace

import torch

from ..drafter.modeling_dflash import DFlashForSpeculation


GIB = 2**30

# FLOP/s of dense bf16 matrix products, from data sheets; the first name that a device's own begins with counts.
_PEAK_TFLOPS = {
    "NVIDIA B200": 2250,
    "NVIDIA GH200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100": 989,
    "NVIDIA H20": 148,
    "NVIDIA A100": 312,
    "NVIDIA L40S": 362,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 4090": 165,
}

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

# Logits that stand in memory at once, see `compute_dflash_loss` and `LanguageHead.predict`.
_CHUNK_ELEMENTS = 1 << 28


@dataclass
class Sizes:
    """
    Args:
        target_parameters (`int`), target_body_parameters (`int`): with and without embedding and head.
        target_bytes (`int`): of one parameter.
        drafter_parameters (`int`), trainable_parameters (`int`): all, and those that are optimized.
        context_parameters (`int`): of the drafter's matrices that read context positions (`fc`, keys, values).
        hidden_size, target_intermediate_size, intermediate_size, num_layers, num_features, vocab_size, block_size (`int`).
        is_dense (`bool`): whether every token meets every parameter of the target (it has no experts).
    """

    target_parameters: int
    target_body_parameters: int
    target_bytes: int
    drafter_parameters: int
    trainable_parameters: int
    context_parameters: int
    hidden_size: int
    target_intermediate_size: int
    intermediate_size: int
    num_layers: int
    num_features: int
    vocab_size: int
    block_size: int
    is_dense: bool


def measure_sizes(target_config, drafter_config, target_dtype: torch.dtype) -> Sizes:
    """Counts parameters on the meta device: nothing is read or allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config)
        drafter = DFlashForSpeculation(drafter_config)
    return replace(sizes_of(target, drafter), target_bytes=target_dtype.itemsize)


def sizes_of(target, drafter) -> Sizes:
    """Counts the parameters of a target and a drafter (with or without an adapter)."""
    target_config, drafter_config = target.config.get_text_config(decoder=True), drafter.config
    ends = [target.get_input_embeddings().weight, target.get_output_embeddings().weight]
    num_target = sum(parameter.numel() for parameter in target.parameters())
    context = [drafter.fc, *(m for layer in drafter.layers for m in (layer.self_attn.k_proj, layer.self_attn.v_proj))]
    return Sizes(
        target_parameters=num_target,
        target_body_parameters=num_target - sum(weight.numel() for weight in {id(w): w for w in ends}.values()),
        target_bytes=ends[1].element_size(),
        drafter_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        trainable_parameters=sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad),
        context_parameters=sum(module.weight.numel() for module in context),
        hidden_size=drafter_config.hidden_size,
        target_intermediate_size=getattr(target_config, "intermediate_size", None) or 4 * drafter_config.hidden_size,
        intermediate_size=drafter_config.intermediate_size,
        num_layers=drafter_config.num_hidden_layers,
        num_features=len(drafter_config.target_layer_ids),
        vocab_size=drafter_config.vocab_size,
        block_size=drafter_config.block_size,
        is_dense=not any(getattr(target_config, name, None) for name in _EXPERT_COUNTS),
    )


def count_blocks(lengths, supervised, token_budget: int, num_anchors: int, anchor_ratio: float) -> float:
    """Blocks of an average micro-batch: documents that fit, times what one of them gets (see [`select_anchors`])."""
    of_document = [min(num_anchors, n, -(-anchor_ratio * n // 1) if anchor_ratio else n) for n in map(int, supervised)]
    return token_budget * sum(of_document) / max(1, sum(map(int, lengths)))


def target_memory(sizes: Sizes, token_budget: int) -> dict[str, float]:
    """Bytes on a target's device, by what they are for."""
    width = sizes.hidden_size * (8 + sizes.num_features) + 3 * sizes.target_intermediate_size
    return {
        "weights": sizes.target_parameters * sizes.target_bytes,
        "forward pass": token_budget * width * sizes.target_bytes,
        "label logits": min(_CHUNK_ELEMENTS, token_budget * sizes.vocab_size) * (4 + sizes.target_bytes),
    }


def drafter_memory(
    sizes: Sizes,
    token_budget: int,
    num_blocks: float,
    *,
    compute_bytes: int,
    is_distributed: bool,
    checkpointing: bool,
    head_fp8: bool = False,
) -> dict[str, float]:
    """Bytes on a drafter's device, by what they are for."""
    slots = num_blocks * sizes.block_size
    hidden, features = sizes.hidden_size, sizes.num_features * sizes.hidden_size
    of_layer = slots * (10 * hidden + 3 * sizes.intermediate_size) + token_budget * 2 * hidden
    layers = of_layer + sizes.num_layers * slots * hidden if checkpointing else sizes.num_layers * of_layer
    return {
        "weights, fp32": 4 * sizes.drafter_parameters,
        "gradients, fp32": 4 * sizes.trainable_parameters * (2 if is_distributed else 1),
        "optimizer, fp32": 8 * sizes.trainable_parameters,
        "the target's embedding and head": 2 * sizes.vocab_size * hidden * sizes.target_bytes,
        **({"the head in FP8, twice": 2 * sizes.vocab_size * hidden} if head_fp8 else {}),
        "activations": (layers + token_budget * features) * compute_bytes,
        "logits": min(_CHUNK_ELEMENTS, slots * sizes.vocab_size) * (8 + compute_bytes),
    }


def target_flops(sizes: Sizes, num_tokens: float, num_labels: float = 0) -> float:
    """Forward pass of the target over so many tokens, and its head at so many positions; matrices only."""
    return 2.0 * sizes.target_body_parameters * num_tokens + 2.0 * sizes.vocab_size * sizes.hidden_size * num_labels


def drafter_flops(sizes: Sizes, num_tokens: float, num_blocks: float) -> float:
    """Forward and backward pass of the drafter; the head needs no gradient of its own. Matrices only."""
    slots = num_blocks * sizes.block_size
    of_slot = sizes.drafter_parameters - sizes.num_features * sizes.hidden_size**2  # `fc` reads the context only
    body = 6.0 * (of_slot * slots + sizes.context_parameters * num_tokens)
    return body + 4.0 * sizes.vocab_size * sizes.hidden_size * num_blocks * (sizes.block_size - 1)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of a device's bf16 matrix products by its data sheet, `None` if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * tflops for known, tflops in _PEAK_TFLOPS.items() if re.match(rf"{known}\b", name)), None)
