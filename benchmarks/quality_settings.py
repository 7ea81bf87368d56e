# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The settings that benchmarks/quality.py compares, and in which order they are run."""

from pathlib import Path

import yaml


RECIPES = Path(__file__).parents[1] / "recipes"

# The reference hyper-parameters of recipes/qwen36.yaml, scaled to this target.
BASE = {
    "num_hidden_layers": 3,
    "block_size": 8,
    "mask_token_id": 4,  # <reponame>, which no chat contains
    "num_anchors": 32,
    "anchor_ratio": 0,
    "labels": "target",
    "loss_type": "ce",
    "loss_weighting": "decay",
    "loss_gamma": 4.0,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.04,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "token_budget": 16384,
}
MUON = {"matrix_optimizer": "muon", "learning_rate": 5e-3}
DPACE = {"loss_weighting": "dpace"}
LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 0.01}
# What the recipe takes.
LINEAR_8K = LINEAR | {"token_budget": 8192}
# Of `speculators` 0.9.0's training command; layers, block and the target's layers are those of BASE on both sides.
SPECULATORS = {
    "peer": {"loss_fn": "ce", "per_position_loss_weight": "dpace", "optimizer": "muon", "max_anchors": 512},
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.01,
    "sliding_window": 2048,
    "is_causal": None,
}
# Of its trainer and its loss, called without options: what its command did before 0.9.
SPECULATORS_ADAMW = {
    **SPECULATORS,
    "peer": {
        "loss_fn": "kl_div",
        "per_position_loss_weight": "fixed-exp-decay",
        "optimizer": "adamw",
        "max_anchors": 512,
    },
}
SETTINGS = {
    "base": {},
    "dpace": DPACE,
    "muon": MUON,
    "muon_dpace": MUON | DPACE,
    "speculators": SPECULATORS,
    "speculators_adamw": SPECULATORS_ADAMW,
    # In its favour: our learning rate, slots that see each other, about as many blocks as we train.
    "speculators_tuned": {
        **SPECULATORS,
        "peer": {**SPECULATORS["peer"], "max_anchors": 800},
        "learning_rate": 5e-3,
        "sliding_window": None,
        "is_causal": False,
    },
    "speculators_lr3": {**SPECULATORS, "learning_rate": 3e-3},
    "speculators_budget8k": {**SPECULATORS, "token_budget": 8192},
    "speculators_lr3_budget8k": {**SPECULATORS, "learning_rate": 3e-3, "token_budget": 8192},
    # AdamW with more of a learning rate, so that Muon is not compared with an untuned one.
    "dpace_lr3": DPACE | {"learning_rate": 3e-3},
    "dpace_lr6": DPACE | {"learning_rate": 6e-3},
    # The weights of the slots' losses.
    "muon_gamma2": MUON | {"loss_gamma": 2.0},
    "muon_gamma7": MUON | {"loss_gamma": 7.0},
    "muon_kl": MUON | {"loss_type": "kl"},
    "muon_lk": MUON | {"loss_type": "lk"},
    # One change each from muon_dpace: at AdamW's 1e-3 a drafter has hardly begun to learn after 6M tokens.
    "layers2_muon_dpace": MUON | DPACE | {"num_hidden_layers": 2},
    "layers5_muon_dpace": MUON | DPACE | {"num_hidden_layers": 5},
    "block16_muon_dpace": MUON | DPACE | {"block_size": 16},
    "late_layers_muon_dpace": MUON | DPACE | {"target_layer_ids": [8, 15, 21, 26, 28]},
    "from_target_muon_dpace": MUON | DPACE | {"init_from_target": True},
    "muon_dpace_data": MUON | DPACE | {"labels": "data"},
    "muon_dpace_causal": MUON | DPACE | {"is_causal": True},
    "muon_dpace_lr10": MUON | DPACE | {"learning_rate": 1e-2},
    "muon_dpace_lr2": MUON | DPACE | {"learning_rate": 2e-3},
    "muon_dpace_anchors16": MUON | DPACE | {"num_anchors": 16},
    "muon_dpace_anchors64": MUON | DPACE | {"num_anchors": 64},
    "muon_dpace_budget8k": MUON | DPACE | {"token_budget": 8192},
    # As many blocks, but each supervised token is as likely an anchor as any other: 32 a reply favour short replies.
    "muon_dpace_even": MUON | DPACE | {"num_anchors": 512, "anchor_ratio": 0.25},
    # Further ways in which speculators' recipe differs.
    "muon_dpace_wd": MUON | DPACE | {"weight_decay": 0.1},
    "muon_dpace_linear": MUON | DPACE | LINEAR,
    # A step of more blocks takes a small target's host no longer.
    "muon_dpace_linear_anchors64": MUON | DPACE | LINEAR | {"num_anchors": 64},
    # What the recipe takes, with the layers of all others; and one change each from that.
    "muon_dpace_linear_budget8k": MUON | DPACE | LINEAR_8K,
    "muon_dpace_linear_budget8k_anchors64": MUON | DPACE | LINEAR_8K | {"num_anchors": 64},
    "muon_dpace_linear_budget4k": MUON | DPACE | LINEAR_8K | {"token_budget": 4096},
    "muon_dpace_linear_budget8k_lr3": MUON | DPACE | LINEAR_8K | {"learning_rate": 3e-3},
    "late_layers_muon_dpace_linear_budget8k": MUON | DPACE | LINEAR_8K | {"target_layer_ids": [8, 15, 21, 26, 28]},
    # The loss's products in FP8.
    "muon_dpace_fp8": MUON | DPACE | {"head_fp8": True},
}
PRIORITY = [
    *[("base", 0), ("speculators", 0), ("muon_dpace", 0), ("dpace", 0), ("muon", 0), ("speculators_tuned", 0)],
    *[("speculators", 1), ("muon_dpace", 1)],
    *[("muon_dpace_even", 0), ("muon_dpace_wd", 0), ("muon_dpace_linear", 0), ("muon_dpace_fp8", 0)],
    *[("speculators_tuned", 1), ("muon_dpace_even", 1), ("muon_dpace_lr10", 0), ("muon_dpace_lr2", 0)],
    *[("muon_dpace_anchors64", 0), ("muon_dpace_anchors16", 0), ("muon_dpace_budget8k", 0), ("muon_dpace_fp8", 1)],
    *[("layers5_muon_dpace", 0), ("layers2_muon_dpace", 0), ("block16_muon_dpace", 0), ("muon_kl", 0)],
    *[("muon_lk", 0), ("from_target_muon_dpace", 0), ("late_layers_muon_dpace", 0), ("muon_dpace_data", 0)],
    *[("dpace_lr3", 0), ("muon_gamma7", 0), ("muon_gamma2", 0), ("muon_dpace_causal", 0), ("dpace_lr6", 0)],
    *[("speculators_adamw", 0), ("speculators_lr3", 0), ("muon_dpace", 2), ("speculators", 2), ("base", 1)],
    *[("muon_dpace_linear", 1), ("muon_dpace_budget8k", 1), ("speculators_budget8k", 0)],
    *[("muon_dpace_linear_budget8k", 0), ("speculators_lr3_budget8k", 0), ("speculators_budget8k", 1)],
    *[("muon_dpace_linear_budget8k", 1), ("muon_dpace_linear_budget4k", 0), ("muon_dpace_linear_budget8k_lr3", 0)],
    *[("late_layers_muon_dpace_linear_budget8k", 0), ("speculators_lr3", 1), ("speculators_lr3_budget8k", 1)],
    *[("speculators_tuned", 2), ("muon_dpace_even", 2), ("muon", 1), ("dpace", 1)],
    *[("muon_dpace_linear_anchors64", 0), ("muon_dpace_linear_budget8k_anchors64", 0)],
]


def options_of(setting: str) -> dict:
    """`recipe` is recipes/smollm2.yaml without what it says about logs and checkpoints."""
    if setting == "recipe":
        options = yaml.safe_load((RECIPES / "smollm2.yaml").read_text())
        of_the_run = {"report_to", "seed", "bf16", "num_train_epochs"}
        return {
            name: value
            for name, value in options.items()
            if name not in of_the_run and not name.startswith(("logging_", "eval_", "save_"))
        }
    return BASE | SETTINGS[setting]


def name_of(setting: str, seed: int, tokens: float) -> str:
    return f"{setting}-{tokens / 1e6:g}M-seed{seed}"
