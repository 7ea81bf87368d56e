# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a trainer trains on: micro-batches with their blocks drawn, handed to the targets ahead of time."""

import numpy as np
import torch

from ..data.batching import TokenBudgetBatchSampler, TokenBudgetDataLoader
from ..target.frozen_target import TargetFeatures
from ..target.pipeline import FeatureRequest, TargetForwardError
from .block_batch import BlockBatch, draw_blocks
from .checks import check_supervision


class MicroBatches:
    """The part of [`DFlashTrainer`] that reads rows, draws blocks and gets their features."""

    def _token_budget_loader(self, dataset, token_budget: int, gradient_accumulation_steps: int, shuffle: bool):
        sampler = TokenBudgetBatchSampler(
            np.asarray(dataset["length"]),
            token_budget,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            shuffle=shuffle,
        )
        return TokenBudgetDataLoader(
            dataset,
            sampler,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def get_train_dataloader(self):
        if self.train_dataset is None:
            raise ValueError("Training needs a `train_dataset`.")
        loader = self._token_budget_loader(
            self.train_dataset, self.args.token_budget, self.args.gradient_accumulation_steps, shuffle=True
        )
        self._train_sampler = loader.batch_sampler
        return loader

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("Evaluation needs an `eval_dataset`.")
        check_supervision(dataset, "eval_dataset")
        return self._token_budget_loader(
            dataset, self.args.eval_token_budget or self.args.token_budget, 1, shuffle=False
        )

    def get_test_dataloader(self, test_dataset):
        # `predict` measures what `evaluate` does; there is one kind of held-out data.
        return self.get_eval_dataloader(test_dataset)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Draws the blocks of all micro-batches of an optimizer step, and with them the denominator of its loss.

        Micro-batches of the steps to come are drawn too, as many as the pipeline can hold, and handed to the targets.
        Between two steps is also where all ranks learn that one of them was asked to stop; then there is no next step.
        """
        if self.state.global_step >= self.state.max_steps:
            # A finished run that is started again: `Trainer` would take one step more.
            self.control.should_training_stop = True
            return [], None
        if self._drawn_from is not epoch_iterator:
            if self._drawn or self.pipeline.num_waiting:
                # The last epoch was left before its end.
                self._drawn.clear()
                self.pipeline.restart()
            self._drawn_from = epoch_iterator
        ahead = self.pipeline.capacity if self.pipeline.is_asynchronous else 0
        remaining = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps
        num_missing = min(num_batches + ahead, max(num_batches, remaining)) - len(self._drawn)
        rows, num_items = super().get_batch_samples(epoch_iterator, max(0, num_missing), device)
        for micro_batch in rows:
            batch = self.draw(micro_batch, self._train_sampler.epoch)
            self.pipeline.submit(self.request_of(batch))
            self._drawn.append(batch)
        batches = [self._drawn.popleft() for _ in range(min(num_batches, len(self._drawn)))]

        share = sum(batch.denominator(self.args.loss_weighting, self.args.loss_gamma) for batch in batches)
        denominator, stop_wishes = self._host_group.sum(share, self._stop_signals.requested)
        if stop_wishes:
            self._stop_callback.stop(self.control)
            return [], num_items
        # Filled in by a kernel: a copy from the host would make it wait for the device.
        self._step_denominator = torch.full((), denominator, dtype=torch.float64, device=self.args.device)
        # Whatever a stopped step has summed is forgotten, as its gradients are.
        self._step_sums = self._new_sums()
        return batches, num_items

    def draw(self, rows: dict[str, torch.Tensor], epoch: int) -> BlockBatch:
        """Draws the blocks of a micro-batch that [`collate_rows`] made, for training in that epoch."""
        return draw_blocks(
            rows,
            block_size=self.drafter_config.block_size,
            mask_token_id=self.drafter_config.mask_token_id,
            num_anchors=self.args.num_anchors,
            anchor_ratio=self.args.anchor_ratio or None,
            seed=self.args.seed,
            epoch=epoch,
            packed=self.uses_flex,
        )

    def request_of(self, batch: BlockBatch) -> FeatureRequest:
        """What the target shall read for a micro-batch."""
        wants_labels = self.args.labels == "target" or self.args.loss_type != "ce"
        return FeatureRequest(
            batch.input_ids,
            batch.lengths,
            batch.label_positions if wants_labels else None,
            return_label_hidden_states=self.args.loss_type != "ce",
            row_ids=batch.row_ids.tolist(),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, known once training has begun."""
        return self._train_sampler.num_steps

    def _take_features(self, batch: BlockBatch) -> TargetFeatures:
        try:
            features, times = self.pipeline.take()
        except TargetForwardError as error:
            if self.args.world_size == 1:
                raise
            # The others are on their way into a collective: this rank goes along without the micro-batch, and before the
            # optimizer takes its step all of them stop.
            self._target_failure = self._target_failure or error
            return self._no_features(batch)
        self._step_times.begin_micro_step(batch, times)
        return features

    def _no_features(self, batch: BlockBatch) -> TargetFeatures:
        """Not finite, so no block is kept."""
        where = {"device": self.target.output_device, "dtype": self.target.output_dtype}
        tokens, labels, hidden_size = batch.num_tokens, len(batch.label_positions), self.drafter_config.hidden_size
        return TargetFeatures(
            torch.full((tokens, len(self.target.layer_ids) * hidden_size), torch.nan, **where),
            torch.zeros(labels, dtype=torch.long, device=self.target.output_device),
            torch.full((labels, hidden_size), torch.nan, **where),
        )
