# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which engine would run a drafter otherwise than it was trained, and why.

Each rule names what was read in that engine's code: vLLM 0.33.0, SGLang 0.5.23, llama.cpp's converter (with pull request
22105), speculators 0.9.0, z-lab's MLX code. `docs/engines/` tells the whole story.
"""

from dataclasses import dataclass


# Engines that people serve with: an export is for all of them unless it is told otherwise.
SERVING_ENGINES = ("vllm", "sglang", "llama.cpp")
ENGINES = (*SERVING_ENGINES, "transformers", "speculators", "z-lab MLX")


@dataclass(frozen=True)
class Problem:
    """
    Args:
        engine (`str`): one of `ENGINES`.
        reason (`str`): what that engine would do.
        fix (`str`): what the user can do.
    """

    engine: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.reason} {self.fix}"


def find_problems(config) -> list[Problem]:
    """
    What each engine would get wrong with a drafter, judged by its config alone.

    Args:
        config ([`DFlashConfig`]): the drafter's.

    Returns:
        `list[Problem]`: empty where every engine computes what was trained.
    """
    problems = []
    is_sliding = "sliding_attention" in config.layer_types
    retrain_bidirectional = "Train with `is_causal=False`, or export for the other engines only (--for)."

    if is_sliding and config.is_causal is None:
        problems.append(
            Problem(
                "llama.cpp",
                "slots of sliding layers would see later slots: it has one causality for all layers, and none is set here.",
                retrain_bidirectional,
            )
        )
    if config.attention_bias:
        problems.append(
            Problem(
                "llama.cpp",
                "its DFlash architecture has no bias in the attention projections, and conversion stops there.",
                "Train with `attention_bias=False`, or export for the other engines only (--for).",
            )
        )
    if config.hidden_act != "silu":
        problems += [
            Problem(engine, f"its drafter MLP is SiLU-gated, not {config.hidden_act!r}.", "Train with `silu`.")
            for engine in SERVING_ENGINES
        ]
    if is_sliding:
        problems.append(
            Problem(
                "speculators",
                f"its window does not move with the slot: slot k sees up to k keys more than the {config.sliding_window} of "
                "training.",
                "Only full attention is the same in both.",
            )
        )
    if config.is_causal:
        problems.append(
            Problem(
                "speculators",
                "slots see later slots of their block in full-attention layers, whatever the config says.",
                retrain_bidirectional,
            )
        )
    if is_sliding or config.is_causal:
        problems.append(
            Problem(
                "z-lab MLX",
                "it reads neither windows nor causality: every slot sees the whole context and block.",
                "Only bidirectional full attention is the same in both.",
            )
        )
    return problems
