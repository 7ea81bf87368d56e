# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The drafter as a serving checkpoint offers it: `AutoModel.from_pretrained(folder, trust_remote_code=True)`.

No module of the hf_dflash package: the export lays this file beside copies of the drafter's and the decoding's code, and it
imports torch, transformers and those siblings only.
"""

import torch
from transformers import Qwen3Config

from .modeling_dflash import DFlashForSpeculation
from .speculative import speculative_generate


class DFlashDraftModel(DFlashForSpeculation):
    """
    A DFlash drafter whose `config.json` has `model_type: "qwen3"`, which is what serving engines know.

    Args:
        config (`Qwen3Config`): with `block_size`, `mask_token_id` and `target_layer_ids`.
    """

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config):
        # Left out by checkpoints whose slots are causal in sliding layers only.
        if not hasattr(config, "is_causal"):
            config.is_causal = None
        super().__init__(config)

    @torch.inference_mode()
    def spec_generate(
        self,
        input_ids: torch.LongTensor,
        target,
        max_new_tokens: int,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
    ) -> torch.LongTensor:
        """
        Generates what the target generates alone: the same tokens at temperature 0, else the same distribution.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, length]`): prompts, several of them padded on the left with the target's
                pad token. A single one is taken whole, whatever tokens are in it.
            target (`PreTrainedModel`): the causal language model that this drafter was trained for.
            max_new_tokens (`int`): tokens to generate at most.
            stop_token_ids (`list[int]`, *optional*): tokens that end the text; those of the target's generation config by
                default.
            temperature (`float`, *optional*, defaults to 0.0): 0 is greedy, otherwise tokens are drawn from the whole
                vocabulary.

        Returns:
            `torch.LongTensor` of shape `[B, length + generated]`.
        """
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        return speculative_generate(
            target,
            self,
            input_ids,
            torch.ones_like(input_ids) if len(input_ids) == 1 else None,
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_token_ids,
            return_stats=False,
            **sampling,
        )
