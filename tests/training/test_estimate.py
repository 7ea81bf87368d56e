# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from transformers import AutoConfig

from hf_dflash.training.estimate import GIB, drafter_memory, measure_sizes, target_memory


pytestmark = pytest.mark.compat


def test_the_estimate_counts_what_is_really_there(job_file):
    target, drafter = make_target("qwen3"), make_drafter(make_target("qwen3"))
    config = AutoConfig.from_pretrained(job_file.parent / "target")
    sizes = measure_sizes(config, drafter.config, torch.float32)
    assert sizes.target_parameters == target.num_parameters()
    ends = target.get_input_embeddings().weight.numel() + (
        0 if config.tie_word_embeddings else target.get_output_embeddings().weight.numel()
    )
    assert sizes.target_body_parameters == target.num_parameters() - ends
    assert target_memory(sizes, 64)["weights"] == 4 * target.num_parameters()
    memory = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=False)
    # fp32 weights, gradients and two moments.
    assert sum(memory[name] for name in list(memory)[:3]) == 16 * drafter.num_parameters()
    fewer = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=True)
    assert fewer["activations"] < memory["activations"] and GIB == 1024**3
    fp8 = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=False, head_fp8=True)
    weight = target.get_output_embeddings().weight
    assert sum(fp8.values()) - sum(memory.values()) == 2 * weight.numel()
