# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""speculators 0.9.0's DFlash model, loss and optimizer on exactly the batches and features of a [`DFlashTrainer`].

Its model is built by its own code and given the very parameters of our drafter (names and shapes are the same), so the
weights that its forward and backward passes and its optimizer train are at each moment also those of a
`DFlashForSpeculation`, which is evaluated and decoded as any other. What is speculators' own: anchors, masks, layers, target
logits, loss, optimizer and schedule. What is ours: rows, their order, the target's features.
"""

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import core
from speculators.models.dflash.metrics import compute_metrics
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from speculators_model import make_speculators_model

from hf_dflash import DFlashForSpeculation, DFlashTrainer
from hf_dflash.target.frozen_target import FrozenTarget, upload
from hf_dflash.target.pipeline import FeatureRequest
from hf_dflash.training.block_batch import BlockBatch
from hf_dflash.training.muon import MuonWithAdamW


def make_peer(drafter: DFlashForSpeculation, target: FrozenTarget) -> core.DFlashDraftModel:
    """speculators' model around the parameters of `drafter`, with the target's embedding and head, frozen."""
    device = target.output_device
    peer = make_speculators_model(drafter.config, device.type).requires_grad_(False).to(device)
    for name, parameter in drafter.named_parameters():
        module, _, leaf = name.rpartition(".")
        setattr(peer.get_submodule(module), leaf, parameter)
    peer.embed_tokens.weight.data = target.embedding.weight.detach().to(device)
    for head in (peer.lm_head, peer.verifier_lm_head):
        head.weight.data = target.head.weight
    # Ours hands out hidden states behind the target's final norm.
    peer.verifier_norm = torch.nn.Identity()
    return peer


class TheirOptimizers(MuonWithAdamW):
    """One optimizer whose parts are replaced by speculators'."""

    def pass_over(self, is_lost: torch.Tensor) -> None:
        """Theirs take every step."""


class SpeculatorsTrainer(DFlashTrainer):
    """
    Args:
        peer_options (`dict`): `loss_fn`, `per_position_loss_weight`, `optimizer`, `max_anchors` (per 8,192 tokens).
    """

    def __init__(self, *args, peer_options: dict, **kwargs):
        super().__init__(*args, **kwargs)
        self.peer_options = peer_options
        self.peer = make_peer(self.model, self.target)
        self.loss_config = resolve_loss_config(
            peer_options["loss_fn"], "fused" if self.args.device.type == "cuda" else "eager"
        )
        self.loss_masks = {row["row_id"]: torch.as_tensor(row["loss_mask"]).bool() for row in self.train_dataset}

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            config = TrainerConfig(
                lr=self.args.learning_rate,
                muon_lr=self.args.learning_rate,
                num_epochs=1,
                save_path="",
                optimizer=self.peer_options["optimizer"],
            )
            # One optimizer for the Trainer; the parts are theirs.
            self.optimizer = TheirOptimizers(self.model, self.args.learning_rate, 0.0, (0.9, 0.999), 1e-8)
            self.optimizer.parts = build_optimizers(self.peer, config)
            self.optimizer._share_groups()
        return super().create_optimizer(model)

    def request_of(self, batch: BlockBatch) -> FeatureRequest:
        """Hidden states at all positions: speculators makes the target's logits at its slots by itself."""
        return FeatureRequest(
            batch.input_ids,
            batch.lengths,
            torch.arange(batch.num_tokens),
            return_label_hidden_states=True,
            row_ids=batch.row_ids.tolist(),
        )

    def pack(self, batch: BlockBatch, features) -> dict[str, torch.Tensor]:
        """One row of documents behind one another, padded to the token budget: shapes that never change."""
        lengths = batch.lengths
        width = max(self.args.token_budget, batch.num_tokens)
        padding = width - batch.num_tokens
        real = torch.arange(batch.input_ids.shape[1])[None] < lengths[:, None]
        columns = {
            "input_ids": (batch.input_ids[real], 0),
            "loss_mask": (torch.cat([self.loss_masks[row_id] for row_id in batch.row_ids.tolist()]).long(), 0),
            "document_ids": (torch.arange(len(lengths)).repeat_interleave(lengths), -1),
            "position_ids": (torch.cat([torch.arange(length) for length in lengths.tolist()]), 0),
        }
        packed = {
            name: upload(torch.nn.functional.pad(column, (0, padding), value=value)[None], self.args.device)
            for name, (column, value) in columns.items()
        }
        for name, states in (
            ("hidden_states", features.context_hidden_states),
            ("verifier_last_hidden_states", features.label_hidden_states),
        ):
            packed[name] = torch.nn.functional.pad(states, (0, 0, 0, padding))[None]
        return packed

    def compute_loss(self, model, inputs: BlockBatch, return_outputs=False, num_items_in_batch=None):
        features = self._take_features(inputs)
        packed = self.pack(inputs, features)
        max_anchors = self.peer_options["max_anchors"] * packed["input_ids"].shape[1] // 8192
        block_size = self.drafter_config.block_size
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.bf16):
            _, logits, targets, aligned, _ = self.peer._backbone_forward(**packed, max_anchors=max(1, max_anchors))
            loss, metrics = compute_metrics(
                logits,
                targets,
                aligned,
                block_size,
                gamma=4.0,
                loss_config=self.loss_config,
                per_position_loss_weight=self.peer_options["per_position_loss_weight"],
                dpace_alpha=0.5,
            )
        sums = self._step_sums
        sums["loss"] += loss.detach()
        for name, metric in (("correct", "sum"), ("supervised", "total")):
            sums[name] += torch.stack([metrics[f"position_{slot}_acc_{metric}"] for slot in range(1, block_size)])
        sums["blocks"] += aligned.view(-1, block_size).any(1).sum()
        sums["tokens"] += inputs.num_tokens
        sums["padded_tokens"] += inputs.input_ids.numel()
        return loss
