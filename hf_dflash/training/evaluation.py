# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a trainer measures on held-out replies: loss, accuracy, and the acceptance length of a simulated decoding."""

from functools import partial

import torch

from ..data.batching import collate_rows
from ..drafter.losses import position_weights
from ..evaluation.acceptance import count_accepted, find_replies, walk_reply
from ..target.frozen_target import TargetFeatures
from .block_batch import BlockBatch, PackedDocuments, lay_out_blocks
from .metric_sums import mean, ratio, reduce_sums


# Of an evaluation, beside `accuracy_slot_1` and so on.
METRICS = ("loss", "acceptance_length", "anchor_acceptance_length", "accuracy", "target_agreement")


class HeldOutEvaluation:
    """The part of [`DFlashTrainer`] that evaluates. Every position of every reply is an anchor."""

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """As in [`~transformers.Trainer`], with figures that are exact over batches and ranks."""
        self._eval_sums = self._new_sums()
        with self.pipeline.exclusive(), self._step_times.excluded():
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        # One rank's data may be slower than the time limit of device collectives.
        self._host_group.wait()
        sums = reduce_sums(self._eval_sums, self.accelerator)
        values = (
            mean(sums["loss"], sums["weight"]),
            mean(sums["walk_tokens"], sums["walk_blocks"]),
            1 + mean(sums["accepted"], sums["blocks"]),
            mean(sums["correct"].sum(), sums["supervised"].sum()),
            mean(sums["agreeing"], sums["replied"]),
        )
        metrics = dict(zip(METRICS, values, strict=True))
        for slot, (correct, supervised) in enumerate(zip(sums["correct"], sums["supervised"], strict=True), start=1):
            metrics[f"accuracy_slot_{slot}"] = ratio(correct, supervised)
        if sums["skipped_blocks"] > 0:
            metrics["skipped_nonfinite_blocks"] = int(sums["skipped_blocks"])
        if self._stop_callback.is_stopping:
            # Cut short, so it says nothing; it is made up for when the run goes on.
            metrics = dict.fromkeys(metrics, float("nan"))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Takes every position of every reply as an anchor, then walks the replies. Sums up; returns nothing."""
        if self.is_in_train and self._host_group.sum(self._stop_signals.requested)[0]:
            self._stop_callback.stop(self.control)
            return None, None, None
        self._evaluate_rows(model, inputs)
        return None, None, None

    @torch.no_grad()
    def simulate_acceptance(self, sequence: torch.Tensor, reply_start: int) -> list[int]:
        """Walks one reply with the drafter as it is now, apart from any evaluation.

        Args:
            sequence (`torch.Tensor` of shape `[L]`, int64): prompt and reply.
            reply_start (`int`): where the reply begins.

        Returns:
            `list[int]`: tokens that each block brings, bonus token included.
        """
        loss_mask = torch.arange(len(sequence)) >= reply_start
        rows = collate_rows([{"input_ids": sequence.cpu(), "loss_mask": loss_mask, "row_id": 0}])
        kept, self._eval_sums = self._eval_sums, self._new_sums()
        try:
            return self._evaluate_rows(self.accelerator.unwrap_model(self.model), rows)
        finally:
            self._eval_sums = kept

    def _evaluate_rows(self, model, inputs: dict[str, torch.Tensor]) -> list[int]:
        """Sums up a micro-batch; returns the lengths of all walks."""
        documents = PackedDocuments.from_rows(inputs)
        label_positions, anchors = documents.label_positions(), documents.all_anchors()
        lay_out = partial(
            lay_out_blocks,
            inputs,
            documents,
            block_size=self.drafter_config.block_size,
            mask_token_id=self.drafter_config.mask_token_id,
            packed=self.uses_flex,
            label_positions=label_positions,
        )
        features = self.target(
            inputs["input_ids"],
            inputs["lengths"],
            label_positions,
            return_label_hidden_states=self.args.loss_type != "ce",
        )
        accepted: dict[int, int] = {}
        for some_anchors in anchors.split(self.args.eval_blocks_per_pass):
            batch = lay_out(some_anchors).to(self.args.device)
            accepted |= self._evaluate_blocks(model, batch, features)

        sums = self._eval_sums
        walked: list[int] = []
        for first, end in find_replies(documents.loss_mask.numpy(), documents.document_ids.numpy()):
            if end - first > 1 and first not in accepted:
                # Of a document whose features are not finite.
                continue
            lengths = walk_reply(first, end, accepted)
            sums["walk_tokens"] += sum(lengths)
            sums["walk_blocks"] += len(lengths)
            walked += lengths
        data_ids = documents.token_ids[label_positions + 1].to(self.args.device)
        is_lost = ~torch.isin(anchors, torch.tensor(list(accepted), dtype=torch.long))
        lost_documents = documents.document_ids[anchors[is_lost]].unique()
        is_kept = ~torch.isin(documents.document_ids[label_positions], lost_documents)
        sums["agreeing"] += ((features.label_ids == data_ids) & is_kept.to(self.args.device)).sum()
        sums["replied"] += int(is_kept.sum())
        return walked

    def _evaluate_blocks(self, model, batch: BlockBatch, features: TargetFeatures) -> dict[int, int]:
        """Sums loss and accuracy, and returns the accepted drafts of the block at each anchor's packed position, without blocks of
        documents whose features are not finite."""
        hidden_states, kept_blocks = self.draft(model, batch, features)
        sums = self._eval_sums
        # The decay weights make evaluations comparable, whatever the weighting of training.
        weights = position_weights(
            batch.block_size, self.args.loss_gamma, device=self.args.device, dtype=torch.float64
        )
        loss, correct = self._loss(batch, features, hidden_states, kept_blocks, 1.0, "decay", head=self.target.head)
        counted = batch.supervised & kept_blocks[:, None]
        sums["loss"] += loss
        sums["weight"] += (counted.sum(0) * weights).sum()
        sums["correct"] += (correct & counted).sum(0)
        sums["supervised"] += counted.sum(0)

        # Whatever the drafter was trained on, a draft is accepted iff it is the token that the reply really has.
        predictions = torch.zeros_like(batch.data_labels.flatten())
        slots = hidden_states.reshape(-1, hidden_states.shape[-1])[batch.slot_indices]
        predictions[batch.slot_indices] = self.target.head.predict(slots)
        right = (predictions.view_as(batch.data_labels) == batch.data_labels) & batch.supervised
        accepted = count_accepted(right)
        valid = batch.valid.flatten()
        measured = valid & kept_blocks
        sums["accepted"] += (accepted * measured).sum()
        sums["blocks"] += measured.sum()
        sums["skipped_blocks"] += (valid & ~kept_blocks).sum()
        return dict(zip(batch.anchor_positions[measured].tolist(), accepted[measured].tolist(), strict=True))
