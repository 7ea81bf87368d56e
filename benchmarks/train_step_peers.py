# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The sides that train_step.py compares ours with: one step of speculators 0.9.0 and of NVIDIA Model-Optimizer.

Each imports its package when it is made, so that a side whose package is not there is left out of the comparison.
"""

import torch
from train_step_inputs import GAMMA, Inputs


class Speculators:
    def __init__(self, inputs: Inputs, parameter_dtype):
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.models.dflash.metrics import compute_metrics
        from speculators_model import make_speculators_model

        config, device = inputs.config, inputs.device
        self.inputs, self.compute_metrics = inputs, compute_metrics
        self.loss_config = resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")
        with torch.device(device):
            self.model = make_speculators_model(config, device.type).to(parameter_dtype)
        for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
            getattr(self.model, name).to(inputs.dtype)
        self.model.load_state_dict(
            {
                "embed_tokens.weight": inputs.embedding,
                "lm_head.weight": inputs.head_weight,
                "verifier_lm_head.weight": inputs.head_weight,
                "verifier_norm.weight": torch.ones(config.hidden_size),
            },
            strict=False,
        )
        core.select_anchors = lambda *args, **kwargs: (inputs.anchors, inputs.valid)
        self.loss_mask = torch.ones_like(inputs.input_ids)
        self._build_mask = self.model._build_attention_mask

    def make_mask(self):
        return self._build_mask(
            self.loss_mask, self.inputs.num_anchors, self.inputs.document_ids, self.loss_mask.device
        )

    def forward(self, mask):
        self.model._build_attention_mask = lambda *args: mask
        return self.model._backbone_forward(
            self.inputs.features,
            self.inputs.input_ids,
            self.loss_mask,
            self.inputs.last_hidden_states,
            self.inputs.document_ids,
            max_anchors=self.inputs.num_anchors,
        )

    def loss(self, outputs):
        _, logits, targets, aligned, _ = outputs
        return self.compute_metrics(
            logits, targets, aligned, self.inputs.block_size, gamma=GAMMA, loss_config=self.loss_config
        )[0]


class ModelOptimizer:
    def __init__(self, inputs: Inputs, parameter_dtype):
        import modelopt.torch.speculative as mtsp
        from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseConfig, FakeBaseModel

        config, device = inputs.config, inputs.device
        shared = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size".split()
        base_config = FakeBaseConfig(
            num_hidden_layers=config.num_target_layers,
            max_position_embeddings=32768,
            rope_theta=config.rope_parameters["rope_theta"],
            dtype=inputs.dtype,
            **{name: getattr(config, name) for name in shared},
        )
        with torch.device(device):
            model = FakeBaseModel(base_config)
        architecture = {
            "num_hidden_layers": config.num_hidden_layers,
            "head_dim": config.head_dim,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "intermediate_size": config.intermediate_size,
            "target_layer_ids": config.target_layer_ids,
        }
        options = {
            "dflash_offline": True,
            "dflash_block_size": config.block_size,
            "dflash_num_anchors": inputs.num_anchors,
            "dflash_mask_token_id": config.mask_token_id,
            "dflash_self_logit_distillation": False,
            "dflash_loss_objective": "decay",
            "dflash_loss_decay_factor": GAMMA,
            "dflash_architecture_config": architecture,
        }
        whole = mtsp.convert(model, [("dflash", options)])
        whole._base_model_embeddings.weight.data.copy_(inputs.embedding)
        whole._base_model_lm_head.weight.data.copy_(inputs.head_weight)
        self.inputs, self.whole = inputs, whole
        self.model = whole.dflash_module.to(device, parameter_dtype).train()
        if device.type == "cuda":
            for layer in self.model.layers:
                layer.compile()
        self.loss_mask = torch.ones_like(inputs.input_ids, dtype=torch.float32)

    def make_mask(self):
        inputs = self.inputs
        return self.whole._build_draft_attention_mask(
            inputs.context_length,
            inputs.anchors[None],
            inputs.valid[None],
            inputs.num_anchors,
            inputs.dtype,
            inputs.device,
        )

    def forward(self, mask):
        inputs, anchors = self.inputs, self.inputs.anchors[None]
        hidden = self.model(
            noise_embedding=self.whole._build_noise_embedding(
                inputs.input_ids, anchors, inputs.valid[None], inputs.num_anchors
            ),
            target_hidden=inputs.features,
            position_ids=self.whole._build_position_ids(inputs.context_length, anchors, inputs.device),
            attention_mask=mask,
        )
        return self.whole._base_model_lm_head(hidden.to(inputs.dtype))

    def loss(self, logits):
        inputs = self.inputs
        return self.whole._compute_loss(
            logits, inputs.input_ids, inputs.anchors[None], inputs.valid[None], self.loss_mask
        )[0]
