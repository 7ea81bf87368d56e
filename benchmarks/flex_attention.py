# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Flex attention against dense masks on CUDA: same values, same gradients, how often it is compiled, how fast.

    python benchmarks/flex_attention.py | tee benchmarks/results/flex_attention_h200.txt

Packed documents of random lengths, widths that change from batch to batch, every kind of layer (full, sliding window,
causal in the block), fp32 without TF32.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_dense_mask, create_flex_mask, pad_to_bucket
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, create_training_masks


def make_drafter(is_causal, block_size: int) -> DFlashForSpeculation:
    torch.manual_seed(0)
    config = DFlashConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=96,
        is_causal=is_causal,
        block_size=block_size,
        mask_token_id=1,
        target_layer_ids=[1, 3],
        num_target_layers=8,
    )
    return DFlashForSpeculation(config).cuda()


def draw_batch(config, generator):
    lengths = torch.randint(20, 700, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator)
    tokens = int(lengths.sum())
    context_length = pad_to_bucket(tokens, 128)
    document_ids = torch.full((1, context_length), -1)
    document_ids[0, :tokens] = torch.arange(len(lengths)).repeat_interleave(lengths)
    wanted = int(torch.randint(8, min(200, tokens), (), generator=generator))
    anchors = torch.randperm(tokens, generator=generator)[:wanted].sort().values
    width = pad_to_bucket(wanted, 16)
    valid = torch.arange(width)[None] < wanted
    anchors = torch.nn.functional.pad(anchors, (0, width - wanted))[None]
    features = torch.randn(1, context_length, 2 * config.hidden_size, generator=generator)
    noise = torch.randn(1, width * config.block_size, config.hidden_size, generator=generator)
    slots = (anchors[..., None] + torch.arange(config.block_size)).flatten(1)
    position_ids = torch.cat([torch.arange(context_length)[None], slots], dim=1)
    return [x.cuda() for x in (document_ids, anchors, valid, features, noise, position_ids)]


def run(drafter, batch, kind: str):
    document_ids, anchors, valid, features, noise, position_ids = batch
    block_size = drafter.config.block_size

    def create(**kinds):
        if kind == "flex":
            return create_flex_mask(document_ids, anchors, valid, block_size, **kinds)
        mask_mod, q_len, kv_len = create_anchor_block_mask_mod(document_ids, anchors, valid, block_size, **kinds)
        return create_dense_mask(mask_mod, 1, q_len, kv_len, anchors.device)

    torch.cuda.synchronize()
    start = time.perf_counter()
    out = drafter(
        noise, features, position_ids, attention_mask=create_training_masks(drafter, create)
    ).last_hidden_state
    blocks = out.view(-1, block_size, out.shape[-1])[valid.flatten()]
    blocks.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    torch.cuda.synchronize()
    return blocks.detach(), gradients, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    for is_causal, block_size in ((False, 16), (None, 8), (True, 10)):
        generator = torch.Generator().manual_seed(1)
        drafter = make_drafter(is_causal, block_size)
        torch.compiler.reset()
        counters.clear()
        case = {"is_causal": is_causal, "block_size": block_size, "batches": []}
        for _ in range(arguments.batches):
            batch = draw_batch(drafter.config, generator)
            dense, dense_gradients, dense_seconds = run(drafter, batch, "dense")
            flex, flex_gradients, flex_seconds = run(drafter, batch, "flex")
            scale = max(gradient.abs().max() for gradient in dense_gradients)
            difference = max((a - b).abs().max() for a, b in zip(flex_gradients, dense_gradients, strict=True))
            case["batches"].append(
                {
                    "context": batch[3].shape[1],
                    "anchors": batch[1].shape[1],
                    "max_difference": float((flex - dense).abs().max()),
                    "max_gradient_difference_over_max_gradient": float(difference / scale),
                    "flex_ms": flex_seconds * 1e3,
                    "dense_ms": dense_seconds * 1e3,
                    "graphs_compiled": counters["stats"]["unique_graphs"],
                }
            )
        results["cases"].append(case)
        last = case["batches"][-1]
        worst = max(entry["max_difference"] for entry in case["batches"])
        worst_gradient = max(entry["max_gradient_difference_over_max_gradient"] for entry in case["batches"])
        print(
            f"is_causal={is_causal} B={block_size}: max difference {worst:.1e}, gradients {worst_gradient:.1e} of the largest, "
            f"{last['graphs_compiled']} graphs over {arguments.batches} widths, last batch flex {last['flex_ms']:.1f} ms, "
            f"dense {last['dense_ms']:.1f} ms",
            flush=True,
        )
        assert worst < 1e-4 and worst_gradient < 1e-4
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
