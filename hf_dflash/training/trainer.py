# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The trainer: a frozen target reads a micro-batch, the drafter learns to predict its blocks.

Shapes as in block_batch.py: R rows, C context positions, A anchors of a row, B slots, N = R * A blocks, H hidden size.
"""

import itertools
import os
import shutil
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from .._compat import mark_loss_as_scaled, restore_onto_numbered_cpus
from ..data.batching import TokenBudgetBatchSampler, TokenBudgetDataLoader, collate_rows
from ..decoding.custom_generate_files import copy_custom_generate
from ..drafter.blocks import create_anchor_block_mask_mod, create_dense_mask, create_flex_mask
from ..drafter.losses import compute_dflash_loss, position_weights
from ..drafter.modeling_dflash import DFlashForSpeculation, create_training_masks
from ..evaluation.acceptance import count_accepted, find_replies, walk_reply
from ..hub.layouts import write_native_form
from ..object_store import is_object_uri
from ..target.frozen_target import FrozenTarget, TargetFeatures
from .adapters import add_adapter
from .arguments import BEST_METRIC, DFlashTrainingArguments
from .block_batch import BlockBatch, PackedDocuments, draw_blocks, lay_out_blocks
from .callbacks import AcceptanceCallback, EpochCheckpointCallback
from .checkpoint import (
    TRAINER_STATE,
    check_whole,
    find_last_checkpoint,
    mark_whole,
    rotate_checkpoints,
)
from .checks import check_can_train, check_fit, check_supervision
from .host_group import HostGroup
from .interruption import CatchUpCallback, StopCallback, StopSignals
from .metric_sums import Sums, add_sums, load_sums, new_sums, ratio, reduce_sums, save_sums
from .muon import MuonWithAdamW
from .plan import check_launch, place_targets_of_this_process
from .publishing import HubPublishing
from .resume_contract import check_contract, describe_run
from .s3_checkpoints import S3Callback, fetch_checkpoint
from .target_loading import load_targets


class DFlashTrainer(HubPublishing, Trainer):
    """
    A [`~transformers.Trainer`] for DFlash drafters (arXiv 2602.06036).

    Args:
        model ([`DFlashForSpeculation`] or `str`):
            The drafter, or where it is loaded from (in fp32: masters in bf16 lose small updates).
        target ([`FrozenTarget`], `PreTrainedModel` or `str`):
            The target. It is only read: nothing of it is saved, optimized or wrapped. A list of them takes turns.
        args ([`DFlashTrainingArguments`], *optional*):
            Options.
        train_dataset (`datasets.Dataset`, *optional*), eval_dataset (`datasets.Dataset` or a `dict` of them, *optional*):
            Rows with `input_ids`, `loss_mask` and `row_id`, of [`tokenize_completions`].
        peft_config (`peft.PeftConfig`, *optional*):
            Trains an adapter on the drafter instead of the drafter itself.
        kwargs:
            Further arguments of [`~transformers.Trainer`].

    Raises:
        `ValueError`: if drafter and target do not fit, or nothing in a dataset is supervised.

    Example:

    ```python
    trainer = DFlashTrainer(model=drafter, target="Qwen/Qwen3-8B", args=DFlashTrainingArguments("out"), train_dataset=dataset)
    trainer.train()
    trainer.save_model()
    ```
    """

    _tag_names = ["hf_dflash", "dflash", "speculative-decoding"]
    # Released after 5.18; for earlier releases see `mark_loss_as_scaled`.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: DFlashForSpeculation | str,
        target,
        args: DFlashTrainingArguments | None = None,
        train_dataset=None,
        eval_dataset=None,
        *,
        peft_config=None,
        **kwargs,
    ):
        # 1. Arguments
        args = args if args is not None else DFlashTrainingArguments("trainer_output")
        check_launch(args.world_size)

        # 2. Drafter
        if isinstance(model, str):
            model = DFlashForSpeculation.from_pretrained(model, dtype=torch.float32)
        self.drafter_config = model.config
        if peft_config is not None:
            model = add_adapter(model, peft_config, args.seed)
        check_can_train(model, args)

        # 3. Datasets
        eval_datasets = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}
        datasets = {"train_dataset": train_dataset}
        datasets |= {
            "eval_dataset" if key is None else f"eval_dataset[{key!r}]": d for key, d in eval_datasets.items()
        }
        for name, dataset in datasets.items():
            if dataset is not None:
                check_supervision(dataset, name)

        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        mark_loss_as_scaled(self)
        restore_onto_numbered_cpus()

        # 4. Target
        feature_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else next(model.parameters()).dtype
        if not isinstance(target, FrozenTarget | list):
            places = place_targets_of_this_process(
                args.target_devices, args.targets_per_process, args.device.type == "cpu"
            )
            target = load_targets(target, model.config.target_layer_ids, places)
        self.targets: list[FrozenTarget] = target if isinstance(target, list) else [target]
        for one in self.targets:
            check_fit(model.config, one)
        # Embedding and head come from the first one only.
        self.target = self.targets[0].serve(args.device, feature_dtype)
        for one in self.targets[1:]:
            one.output_device, one.output_dtype = self.target.output_device, self.target.output_dtype

        # 5. Metrics: sums since the last log, on the device, so that no step waits for them.
        self.uses_flex = args.attention_backend == "flex" or (
            args.attention_backend == "auto" and args.device.type == "cuda"
        )
        self._train_sums = self._new_sums()
        self._step_sums = self._new_sums()
        self._eval_sums = self._new_sums()
        self.model.add_model_tags(self._tag_names)

        # 6. Stopping and saving
        self._host_group = HostGroup(args.world_size)
        self._stop_signals = StopSignals()
        self._stop_callback = StopCallback()
        self.add_callback(self._stop_callback)
        self.add_callback(CatchUpCallback(self))
        if args.save_each_epoch:
            self.add_callback(EpochCheckpointCallback())
        if args.acceptance_steps:
            if eval_dataset is None:
                raise ValueError("`--acceptance_steps` decodes held-out prompts: give an `eval_dataset`.")
            self.add_callback(AcceptanceCallback(self, args.acceptance_steps))
        if args.checkpoint_uri:
            self.add_callback(S3Callback(args.checkpoint_uri))
        if isinstance(eval_dataset, dict) and args.metric_for_best_model == BEST_METRIC:
            args.metric_for_best_model = f"eval_{next(iter(eval_dataset))}_acceptance_length"
        if args.push_to_hub:
            # Known now, or a run of a week ends without a repository.
            _ = self.target_hub_id
        self._contract = None
        self._saved_step = None

    # ---- Batches ----

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

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Draws the blocks of all micro-batches of an optimizer step, and with them the denominator of its loss.

        Between two steps is also where all ranks learn that one of them was asked to stop; then there is no next step.
        """
        rows, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [
            draw_blocks(
                micro_batch,
                block_size=self.drafter_config.block_size,
                mask_token_id=self.drafter_config.mask_token_id,
                num_anchors=self.args.num_anchors,
                anchor_ratio=self.args.anchor_ratio or None,
                seed=self.args.seed,
                epoch=self._train_sampler.epoch,
                packed=self.uses_flex,
            )
            for micro_batch in rows
        ]
        share = sum(batch.denominator(self.args.loss_weighting, self.args.loss_gamma) for batch in batches)
        denominator, stop_wishes = self._host_group.sum(share, self._stop_signals.requested)
        if stop_wishes:
            self._stop_callback.stop(self.control)
            return [], num_items
        if self.state.global_step >= self.state.max_steps:
            # A finished run that is started again: `Trainer` would take one step more.
            self.control.should_training_stop = True
            return [], num_items
        # Filled in by a kernel: a copy from the host would make it wait for the device.
        self._step_denominator = torch.full((), denominator, dtype=torch.float64, device=self.args.device)
        # Whatever a stopped step has summed is forgotten, as its gradients are.
        self._step_sums = self._new_sums()
        self._next_target = itertools.cycle(self.targets)
        return batches, num_items

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch, known once training has begun."""
        return self._train_sampler.num_steps

    def _prepare_inputs(self, inputs: BlockBatch) -> BlockBatch:
        return inputs.to(self.args.device)

    def floating_point_ops(self, inputs: BlockBatch) -> int:
        """Forward and backward of the drafter's matrices over slots; the context only passes keys, values and `fc`."""
        return 6 * self._num_parameters * inputs.slot_ids.numel()

    @cached_property
    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.args.matrix_optimizer == "muon":
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("`--matrix_optimizer muon` needs whole matrices: use DDP, or `same` with FSDP.")
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = MuonWithAdamW(
                self.model, self.args.learning_rate, self.args.weight_decay, betas, self.args.adam_epsilon
            )
        return super().create_optimizer(model)

    # ---- Forward ----

    def draft(
        self, model: nn.Module, batch: BlockBatch, features: TargetFeatures
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the drafter over all blocks of a micro-batch.

        Args:
            model (`nn.Module`): the drafter as it is wrapped for training.
            batch ([`BlockBatch`]): on the drafter's device.
            features ([`TargetFeatures`]): of its documents.

        Returns:
            `(hidden_states, kept_blocks)`: `[N, B - 1, H]` for slots 1 .. B - 1, and `[N]` bool: blocks whose document has
            finite features. Features of others are replaced by zeros, for 0 * NaN would reach the weights.
        """
        context = features.context_hidden_states
        if context.shape[0] == 0:
            context = context.new_zeros(1, context.shape[1])
        finite = torch.isfinite(context).all(dim=-1)
        if features.label_hidden_states is not None:
            # Layers behind the captured ones can overflow by themselves.
            label_positions = batch.label_positions.to(context.device, non_blocking=True)
            finite[label_positions] &= torch.isfinite(features.label_hidden_states).all(dim=-1)
        context = torch.where(finite[:, None], context, 0)[batch.context_index]
        row_documents = batch.document_ids.clamp(min=0)
        document_is_finite = torch.ones(
            len(batch.lengths) + 1, dtype=torch.int32, device=context.device
        ).scatter_reduce_(0, row_documents.flatten(), finite[batch.context_index].flatten().int(), "amin")
        kept_blocks = document_is_finite[row_documents.gather(1, batch.anchors)].bool().flatten()

        def create_mask(**kinds):
            blocks = (batch.document_ids, batch.anchors, batch.valid, batch.block_size)
            if self.uses_flex:
                return create_flex_mask(*blocks, **kinds)
            mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*blocks, **kinds)
            return create_dense_mask(mask_mod, batch.anchors.shape[0], q_len, kv_len, context.device, context.dtype)

        hidden_states = model(
            self.target.embed(batch.slot_ids),
            context,
            batch.position_ids,
            attention_mask=create_training_masks(self.accelerator.unwrap_model(model), create_mask),
        ).last_hidden_state
        blocks = hidden_states.reshape(-1, batch.block_size, hidden_states.shape[-1])
        return blocks[:, 1:], kept_blocks

    def _run_target(self, batch: BlockBatch, label_positions: torch.Tensor | None) -> TargetFeatures:
        return next(self._next_target)(
            batch.input_ids, batch.lengths, label_positions, return_label_hidden_states=self.args.loss_type != "ce"
        )

    def _loss(self, batch: BlockBatch, features: TargetFeatures, hidden_states, kept_blocks, denominator, weighting):
        labels = batch.data_labels
        if self.args.labels == "target" and len(batch.label_positions):
            labels = features.label_ids[batch.label_index]
        target_hidden_states = None
        if self.args.loss_type != "ce":
            target_hidden_states = features.label_hidden_states[batch.label_index.flatten()[batch.slot_indices]]
        return compute_dflash_loss(
            hidden_states,
            self.target.head,
            labels,
            batch.supervised,
            loss_type=self.args.loss_type,
            weighting=weighting,
            gamma=self.args.loss_gamma,
            dpace_alpha=self.args.dpace_alpha,
            denominator=denominator,
            target_hidden_states=target_hidden_states,
            slot_indices=batch.slot_indices,
            kept_blocks=kept_blocks,
        )

    def compute_loss(self, model, inputs: BlockBatch, return_outputs=False, num_items_in_batch=None):
        """This micro-batch's part of the loss of the optimizer step: parts add up over micro-batches and ranks."""
        wants_labels = self.args.labels == "target" or self.args.loss_type != "ce"
        features = self._run_target(inputs, inputs.label_positions if wants_labels else None)
        hidden_states, kept_blocks = self.draft(model, inputs, features)
        loss, correct = self._loss(
            inputs, features, hidden_states, kept_blocks, self._step_denominator, self.args.loss_weighting
        )
        self._add_train_metrics(inputs, loss, correct, kept_blocks)
        # DDP takes the mean over ranks; the sum is wanted.
        return loss * self.args.world_size

    # ---- Metrics ----

    def _new_sums(self) -> Sums:
        return new_sums(self.drafter_config.block_size, self.args.device)

    @torch.no_grad()
    def _add_train_metrics(self, batch: BlockBatch, loss, correct: torch.Tensor, kept_blocks: torch.Tensor) -> None:
        sums = self._step_sums
        sums["loss"] += loss.detach()
        counted = batch.supervised & kept_blocks[:, None]
        sums["correct"] += (correct & counted).sum(0)
        sums["supervised"] += counted.sum(0)
        valid = batch.valid.flatten()
        sums["accepted"] += (count_accepted(correct) * (valid & kept_blocks)).sum()
        sums["blocks"] += (valid & kept_blocks).sum()
        sums["skipped_blocks"] += (valid & ~kept_blocks).sum()
        sums["tokens"] += batch.num_tokens

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        # Only a whole optimizer step counts.
        if self.accelerator.sync_gradients:
            # Counted by one rank, so that the figure survives another number of processes.
            self._step_sums["steps"] += self.args.process_index == 0
            add_sums(self._train_sums, self._step_sums)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was summed since the last log: accuracy, the mean over anchors, tokens.

        The loss is of these sums too: `Trainer` forgets its own at a stop, so a run that goes on would log another one.
        """
        if self._stop_callback.is_stopping and "eval_runtime" in logs:
            return
        if "loss" in logs and "learning_rate" in logs:
            sums = reduce_sums(self._train_sums, self.accelerator)
            self._train_sums = self._new_sums()
            logs["loss"] = ratio(sums["loss"], sums["steps"])
            logs["accuracy"] = ratio(sums["correct"].sum(), sums["supervised"].sum())
            logs["anchor_acceptance_length"] = 1 + ratio(sums["accepted"], sums["blocks"])
            logs["blocks"] = int(sums["blocks"])
            logs["context_tokens"] = int(sums["tokens"])
            if sums["skipped_blocks"] > 0:
                logs["skipped_nonfinite_blocks"] = int(sums["skipped_blocks"])
        super().log(logs, start_time)

    # ---- Evaluation ----

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """As in [`~transformers.Trainer`], with figures that are exact over batches and ranks (DESIGN 3.7)."""
        self._eval_sums = self._new_sums()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        # One rank's data may be slower than the time limit of device collectives.
        self._host_group.wait()
        sums = reduce_sums(self._eval_sums, self.accelerator)
        metrics = {
            "loss": ratio(sums["loss"], sums["weight"]),
            "acceptance_length": ratio(sums["walk_tokens"], sums["walk_blocks"]),
            "anchor_acceptance_length": 1 + ratio(sums["accepted"], sums["blocks"]),
            "accuracy": ratio(sums["correct"].sum(), sums["supervised"].sum()),
            "target_agreement": ratio(sums["agreeing"], sums["replied"]),
        }
        for slot, (correct, supervised) in enumerate(zip(sums["correct"], sums["supervised"], strict=True), start=1):
            metrics[f"accuracy_slot_{slot}"] = ratio(correct, supervised)
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
        """Walks one reply with the drafter as it is now (DESIGN 3.7), apart from any evaluation.

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
            lengths = walk_reply(first, end, accepted)
            sums["walk_tokens"] += sum(lengths)
            sums["walk_blocks"] += len(lengths)
            walked += lengths
        data_ids = documents.token_ids[label_positions + 1].to(self.args.device)
        sums["agreeing"] += (features.label_ids == data_ids).sum()
        sums["replied"] += len(label_positions)
        return walked

    def _evaluate_blocks(self, model, batch: BlockBatch, features: TargetFeatures) -> dict[int, int]:
        """Sums loss and accuracy, and returns the accepted drafts of the block at each anchor's packed position."""
        hidden_states, kept_blocks = self.draft(model, batch, features)
        sums = self._eval_sums
        # The decay weights make evaluations comparable, whatever the weighting of training.
        weights = position_weights(
            batch.block_size, self.args.loss_gamma, device=self.args.device, dtype=torch.float64
        )
        loss, correct = self._loss(batch, features, hidden_states, kept_blocks, 1.0, "decay")
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
        sums["accepted"] += (accepted * valid).sum()
        sums["blocks"] += valid.sum()
        return dict(zip(batch.anchor_positions[valid].tolist(), accepted[valid].tolist(), strict=True))

    # ---- Training, going on, stopping ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """As in [`~transformers.Trainer`], with two differences.

        A run goes on only from a whole checkpoint of the same blocks, batches, target and data, and then as if it had never
        stopped. SIGTERM or SIGINT on any rank makes all ranks save a checkpoint after the running step and leave with an
        error status; a second signal ends the process at once.

        Raises:
            `ValueError`: if the checkpoint is not whole or belongs to another run, naming both values.
            `KeyboardInterrupt`, `SystemExit`: after a signal, once the checkpoint is saved.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no whole checkpoint in {self.args.output_dir} to go on from.")
        elif isinstance(resume_from_checkpoint, str) and is_object_uri(resume_from_checkpoint):
            resume_from_checkpoint = self._fetch_checkpoint(resume_from_checkpoint)
        self._contract = describe_run(self.drafter_config, self.target, self.train_dataset, self.args)
        self._train_sums, self._saved_step = self._new_sums(), None
        if resume_from_checkpoint:
            check_whole(resume_from_checkpoint)
            check_contract(resume_from_checkpoint, self._contract)
            load_sums(self._train_sums, resume_from_checkpoint, self.args.process_index, self.args.world_size)

        self._stop_callback.is_stopping = False
        with self._stop_signals:
            output = super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)
            (stop_wishes,) = self._host_group.sum(self._stop_signals.requested)
            if stop_wishes and self._saved_step != self.state.global_step:
                self._save_checkpoint(self.model, trial)
        if stop_wishes:
            self._stop_signals.leave()
        return output

    def _fetch_checkpoint(self, uri: str) -> str:
        """Downloaded once a machine."""
        folder = fetch_checkpoint(uri, self.args.output_dir) if self.args.local_process_index == 0 else None
        self._host_group.wait()
        return folder or fetch_checkpoint(uri, self.args.output_dir)

    # ---- Saving ----

    def _save_checkpoint(self, model, trial) -> None:
        folder = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        if self._saved_step == self.state.global_step:
            # At the end of an epoch, behind the save of its last step: only a log or an evaluation can have come in between.
            save_sums(self._train_sums, folder, self.args.process_index)
            if self.args.should_save:
                self.state.save_to_json(os.path.join(folder, f"{TRAINER_STATE}.partial"))
                os.replace(os.path.join(folder, f"{TRAINER_STATE}.partial"), os.path.join(folder, TRAINER_STATE))
            return
        if self.args.should_save and os.path.isdir(folder):
            shutil.rmtree(folder)
        self._host_group.wait()

        # Trainer would delete an older checkpoint before this one is declared whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        save_sums(self._train_sums, folder, self.args.process_index)
        self._host_group.wait()
        if self.args.should_save:
            mark_whole(folder, self._contract)
            rotate_checkpoints(os.path.dirname(folder), limit, self.state.best_model_checkpoint)
        self._saved_step = self.state.global_step
        self.publish_checkpoint(folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the drafter: fp32 masters inside checkpoints, bf16 when called by a user (DESIGN 4)."""
        # `push_to_hub` saves into `output_dir` by an internal call; only checkpoints have a folder of their own.
        self._saves_bf16 = not _internal_call or output_dir is None
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._saves_bf16 = False

    _saves_bf16 = False

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # The options are saved too, and checkpoints go to places where a token must not.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token
        drafter = self.accelerator.unwrap_model(self.model)
        if self.args.should_save and isinstance(drafter, PreTrainedModel):
            folder = Path(output_dir or self.args.output_dir)
            if self._saves_bf16:
                weights = state_dict if state_dict is not None else drafter.state_dict()
                write_native_form(folder, drafter.config, weights)
            else:
                copy_custom_generate(folder)
