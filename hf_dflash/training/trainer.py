# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The trainer: a frozen target reads a micro-batch, the drafter learns to predict its blocks.

Shapes as in block_batch.py: R rows, C context positions, A anchors of a row, B slots, N = R * A blocks, H hidden size.
"""

import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from .._compat import mark_loss_as_scaled, restore_onto_numbered_cpus
from ..decoding.custom_generate_files import copy_custom_generate
from ..drafter.blocks import create_anchor_block_mask_mod, create_dense_mask, create_flex_mask
from ..drafter.fp8_head import Fp8Head
from ..drafter.losses import compute_dflash_loss
from ..drafter.modeling_dflash import DFlashForSpeculation, create_training_masks
from ..evaluation.acceptance import count_accepted
from ..hub.layouts import write_native_form
from ..object_store import is_object_uri
from ..target.frozen_target import FrozenTarget, TargetFeatures, upload
from ..target.graphed_decoder import launches_outweigh
from ..target.pipeline import FeaturePipeline, TargetForwardError
from .adapters import add_adapter
from .arguments import BEST_METRIC, DFlashTrainingArguments
from .balance import balance_anchors
from .block_batch import BlockBatch
from .bucket_order import BucketOrderCallback
from .callbacks import AcceptanceCallback, EpochCheckpointCallback
from .checkpoint import (
    TRAINER_STATE,
    check_whole,
    find_last_checkpoint,
    mark_whole,
    rotate_checkpoints,
)
from .checks import check_arguments, check_can_train, check_fit, check_supervision
from .evaluation import HeldOutEvaluation
from .host_group import HostGroup
from .interruption import CatchUpCallback, StopCallback, StopSignals
from .metric_sums import Sums, add_sums, begin_window, load_sums, mean, new_sums, ratio, reduce_sums, save_sums
from .micro_batches import MicroBatches
from .muon import MuonWithAdamW
from .plan import check_launch, place_targets_of_this_process
from .publishing import HubPublishing
from .resume_contract import check_contract, describe_run, read_contract
from .resumed_options import keep_options
from .run_lock import only_run_in
from .run_watch import RunLogCallback, watch_run
from .s3_checkpoints import S3Callback, check_can_upload, fetch_checkpoint, locate_checkpoint
from .step_times import StepTimes, StepTimesCallback
from .target_loading import load_targets
from .uploads import Uploads


class DFlashTrainer(MicroBatches, HeldOutEvaluation, HubPublishing, Trainer):
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
            Rows with `input_ids`, `loss_mask`, `length` and `row_id`, of [`tokenize_completions`].
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
        check_arguments(kwargs)

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
        # For the loss that is trained on; evaluations take the head as it is.
        self.training_head = Fp8Head.from_head(self.target.head) if args.head_fp8 else self.target.head
        if args.target_fp8:
            for one in self.targets:
                one.quantize_to_fp8()
        compiles = args.compile_layers == "on" or (args.compile_layers == "auto" and args.device.type == "cuda")
        if compiles:
            getattr(model, "get_base_model", lambda: model)().compile_layers()
            for one in self.targets:
                one.compile_layers()
        for one in self.targets:
            outweighs = args.target_cuda_graphs == "auto" and launches_outweigh(one.model, args.token_budget)
            if outweighs or args.target_cuda_graphs == "on":
                one.record_graphs()
        self.pipeline = FeaturePipeline(
            self.targets,
            depth=args.pipeline_depth,
            asynchronous={"auto": None, "on": True, "off": False}[args.pipeline],
            # One optimizer step, in which each target runs, compiles nearly all there is.
            in_turn=max(args.gradient_accumulation_steps, len(self.targets)) if compiles else 0,
        )
        # Micro-batches that are drawn and not trained on yet, and where they come from.
        self._drawn: deque[BlockBatch] = deque()
        self._drawn_from = None
        self._target_failure: TargetForwardError | None = None

        # 5. Metrics: sums since the last log, on the device, so that no step waits for them.
        self.uses_flex = args.attention_backend == "flex" or (
            args.attention_backend == "auto" and args.device.type == "cuda"
        )
        self._train_sums = self._new_sums()
        self._step_sums = self._new_sums()
        self._eval_sums = self._new_sums()
        self._step_times = StepTimes(args, self.targets, self.model)
        self.add_callback(StepTimesCallback(self._step_times))
        self.model.add_model_tags(self._tag_names)

        # 6. Stopping and saving
        self.run_log = RunLogCallback(self)
        self.add_callback(self.run_log)
        self.uploads = Uploads(self.run_log.add_event)
        self._host_group = HostGroup(args.world_size)
        self._stop_signals = StopSignals()
        self._stop_callback = StopCallback()
        self.add_callback(self._stop_callback)
        self.add_callback(CatchUpCallback(self))
        self.add_callback(BucketOrderCallback(self))
        if args.save_each_epoch:
            self.add_callback(EpochCheckpointCallback())
        if args.acceptance_steps:
            if eval_dataset is None:
                raise ValueError("`--acceptance_steps` decodes held-out prompts: give an `eval_dataset`.")
            self.add_callback(AcceptanceCallback(self, args.acceptance_steps))
        if args.checkpoint_uri:
            self.add_callback(S3Callback(args.checkpoint_uri, uploads=self.uploads))
        watch_run(self)
        if isinstance(eval_dataset, dict) and args.metric_for_best_model == BEST_METRIC:
            args.metric_for_best_model = f"eval_{next(iter(eval_dataset))}_acceptance_length"
        if args.push_to_hub:
            # Known now, or a run of a week ends without a repository.
            _ = self.target_hub_id
        self._contract = None
        self._saved_step = None

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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.is_deepspeed_enabled:
            # DeepSpeed has loaded both already.
            return super()._load_optimizer_and_scheduler(checkpoint)
        with keep_options(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)

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
            label_positions = upload(batch.label_positions, context.device)
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

    def _loss(
        self,
        batch: BlockBatch,
        features: TargetFeatures,
        hidden_states,
        kept_blocks,
        denominator,
        weighting,
        head=None,
    ):
        labels = batch.data_labels
        if self.args.labels == "target" and len(batch.label_positions):
            labels = features.label_ids[batch.label_index]
        target_hidden_states = None
        if self.args.loss_type != "ce":
            target_hidden_states = features.label_hidden_states[batch.label_index.flatten()[batch.slot_indices]]
        return compute_dflash_loss(
            hidden_states,
            self.training_head if head is None else head,
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
        """This micro-batch's part of the loss of the optimizer step: parts add up over micro-batches and ranks.

        With `return_outputs` a pair of it and a `dict`: `hidden_states` `[N, B - 1, H]` of the drafter, `kept_blocks` `[N]` and
        the target's `features`.
        """
        features = self._take_features(inputs)
        hidden_states, kept_blocks = self.draft(model, inputs, features)
        loss, correct = self._loss(
            inputs, features, hidden_states, kept_blocks, self._step_denominator, self.args.loss_weighting
        )
        self._add_train_metrics(inputs, loss, correct, kept_blocks)
        # DDP takes the mean over ranks; the sum is wanted.
        loss = loss * self.args.world_size
        if not return_outputs:
            return loss
        return loss, {"hidden_states": hidden_states, "kept_blocks": kept_blocks, "features": features}

    # ---- Metrics ----

    def _new_sums(self) -> Sums:
        return new_sums(self.drafter_config.block_size, self.args.device)

    @torch.no_grad()
    def _add_train_metrics(self, batch: BlockBatch, loss, correct: torch.Tensor, kept_blocks: torch.Tensor) -> None:
        sums = self._step_sums
        sums["loss"] += _finite_or_zero(loss.detach())
        counted = batch.supervised & kept_blocks[:, None]
        sums["correct"] += (correct & counted).sum(0)
        sums["supervised"] += counted.sum(0)
        valid = batch.valid.flatten()
        sums["accepted"] += (count_accepted(correct) * (valid & kept_blocks)).sum()
        sums["blocks"] += (valid & kept_blocks).sum()
        sums["skipped_blocks"] += (valid & ~kept_blocks).sum()
        sums["tokens"] += batch.num_tokens
        sums["padded_tokens"] += batch.input_ids.numel()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.pipeline.release()
        if not self.accelerator.sync_gradients:
            self._step_times.end_micro_step()
        else:
            # Only a whole optimizer step counts.
            (failures,) = self._host_group.sum(self._target_failure is not None)
            if failures:
                raise self._target_failure or TargetForwardError(
                    "The target of another process failed: see its error."
                )
            # Counted by one rank, so that the figure survives another number of processes.
            self._step_sums["steps"] += self.args.process_index == 0
            add_sums(self._train_sums, self._step_sums)
        return _finite_or_zero(loss)

    def _get_grad_norm(self, model, grad_norm=None):
        """Lets the optimizer pass over a step whose gradients are not finite; the host does not learn of it with Muon and with fused
        optimizers, AdamW among them by default."""
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if isinstance(grad_norm, torch.Tensor) and self.accelerator.scaler is None:
            norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
            is_lost = ~torch.isfinite(norm)
            counted = (is_lost & (self.args.process_index == 0)).double()
            self._train_sums["skipped_steps"] += counted
            # The mean loss is that of the steps that were taken.
            self._train_sums["steps"] -= counted
            self._train_sums["loss"] -= torch.where(is_lost, self._step_sums["loss"], 0)
            if isinstance(optimizer, MuonWithAdamW):
                optimizer.pass_over(is_lost)
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                # Fused optimizers read on the device what a gradient scaler would tell them.
                optimizer.found_inf = is_lost.to(torch.float32)
            elif bool(is_lost):
                # Others would go on by momentum and weight decay with gradients of zero, so the host has to wait and see.
                for parameter in model.parameters():
                    parameter.grad = None
        return grad_norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what was summed since the last log: accuracy, the mean over anchors, tokens.

        The loss is of these sums too, and at the end that of the whole run: `Trainer` forgets its own at a stop, so a run that
        goes on would log another one.
        """
        if self._stop_callback.is_stopping and "eval_runtime" in logs:
            return
        if "loss" in logs and "learning_rate" in logs:
            sums = reduce_sums(self._train_sums | self._step_times.collect(), self.accelerator)
            self._train_sums = begin_window(self._train_sums)
            logs["loss"] = mean(sums["loss"], sums["steps"])
            logs["accuracy"] = ratio(sums["correct"].sum(), sums["supervised"].sum())
            logs["anchor_acceptance_length"] = 1 + ratio(sums["accepted"], sums["blocks"])
            logs["blocks"] = int(sums["blocks"])
            logs["context_tokens"] = int(sums["tokens"])
            logs["padding_waste"] = 1 - ratio(sums["tokens"], sums["padded_tokens"]) if sums["padded_tokens"] else 0.0
            if sums["skipped_blocks"] > 0:
                logs["skipped_nonfinite_blocks"] = int(sums["skipped_blocks"])
            if sums["skipped_steps"] > 0:
                logs["skipped_nonfinite_steps"] = int(sums["skipped_steps"])
            logs |= self._step_times.figures(sums)
        if "train_runtime" in logs:
            # What `Trainer` has put there counts lost steps as 0, and knows nothing of the steps before a stop.
            sums = reduce_sums(begin_window(self._train_sums), self.accelerator)
            logs["train_loss"] = mean(sums["run_loss"], sums["run_steps"])
        super().log(logs, start_time)

    # ---- Training, going on, stopping ----

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """As in [`~transformers.Trainer`], with two differences.

        A run goes on only from a whole checkpoint of the same blocks, batches, target and data, and then as if it had never
        stopped. SIGTERM or SIGINT on any rank makes all ranks save a checkpoint after the running step and leave with an
        error status; a second signal ends the process at once.

        Raises:
            `ValueError`: if the checkpoint is not whole or belongs to another run, naming both values; if another run is under
                way in `output_dir`, naming its process.
            `FileNotFoundError`, `PermissionError`: if nothing can be copied to `--checkpoint_uri`.
            `KeyboardInterrupt`, `SystemExit`: after a signal, once the checkpoint is saved.
            `TargetForwardError`: if a target failed, naming the rows, once the last whole step is saved.
        """
        with only_run_in(self.args.output_dir, self._host_group):
            if self.args.checkpoint_uri:
                self._host_group.on_first_rank(lambda: check_can_upload(self.args.checkpoint_uri))
            return self._train_alone(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train_alone(self, resume_from_checkpoint, trial, ignore_keys_for_eval):
        """What [`~DFlashTrainer.train`] does in a folder that is this run's only."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no whole checkpoint in {self.args.output_dir} to go on from.")
        elif isinstance(resume_from_checkpoint, str) and is_object_uri(resume_from_checkpoint):
            resume_from_checkpoint = locate_checkpoint(resume_from_checkpoint)
        elif resume_from_checkpoint:
            check_whole(resume_from_checkpoint)
        if self.args.num_anchors == "auto":
            if resume_from_checkpoint:
                contract = read_contract(resume_from_checkpoint)
                chosen = contract["num_anchors"], contract["anchor_ratio"]
            else:
                chosen = balance_anchors(self)
            self.args.num_anchors, self.args.anchor_ratio = chosen
        self._contract = describe_run(
            self.accelerator.unwrap_model(self.model), self.drafter_config, self.target, self.train_dataset, self.args
        )
        self._train_sums, self._saved_step = self._new_sums(), None
        if resume_from_checkpoint:
            check_contract(resume_from_checkpoint, self._contract)
            if is_object_uri(resume_from_checkpoint):
                # Not before: a run that is refused leaves its folder as it is.
                resume_from_checkpoint = self._fetch_checkpoint(resume_from_checkpoint)
            load_sums(self._train_sums, resume_from_checkpoint, self.args.process_index, self.args.world_size)

        self._stop_callback.is_stopping = False
        self._drawn, self._drawn_from, self._target_failure = deque(), None, None
        with self._stop_signals, self.pipeline:
            try:
                output = super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)
            except TargetForwardError:
                # The weights are those of the last whole step; what this one has accumulated is lost, as at a stop.
                self._save_last_step(trial)
                raise
            (stop_wishes,) = self._host_group.sum(self._stop_signals.requested)
            if stop_wishes:
                self._save_last_step(trial)
        if stop_wishes:
            self._stop_signals.leave()
        return output

    def _save_last_step(self, trial) -> None:
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, trial)

    def _fetch_checkpoint(self, uri: str) -> str:
        """Downloaded once a machine."""
        folder = fetch_checkpoint(uri, self.args.output_dir) if self.args.local_process_index == 0 else None
        self._host_group.wait()
        return folder or fetch_checkpoint(uri, self.args.output_dir)

    # ---- Saving ----

    def _save_checkpoint(self, model, trial) -> None:
        with self._step_times.excluded():
            self._save_step(model, trial)

    def _save_step(self, model, trial) -> None:
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
        with self._without_save_total_limit():
            super()._save_checkpoint(model, trial)
        save_sums(self._train_sums, folder, self.args.process_index)
        self._host_group.wait()
        if self.args.should_save:
            mark_whole(folder, self._contract)
            rotate_checkpoints(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        self._saved_step = self.state.global_step
        self.publish_checkpoint(folder)

    @contextmanager
    def _without_save_total_limit(self) -> Iterator[None]:
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _finalize_training(self, *args, **kwargs):
        # With a limit of 1 Trainer would delete the last step for the best one, from which a run that goes on, or is started again
        # behind its end, would repeat all steps since.
        with self._without_save_total_limit():
            output = super()._finalize_training(*args, **kwargs)
        # As it was logged.
        return output._replace(training_loss=output.metrics["train_loss"])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the drafter: fp32 masters inside checkpoints, bf16 when called by a user."""
        # `push_to_hub` saves into `output_dir` by an internal call; only checkpoints have a folder of their own.
        self._saves_bf16 = not _internal_call or output_dir is None
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._saves_bf16 = False

    _saves_bf16 = False

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # The options are saved too, and checkpoints go to places where secrets must not.
        token, self.args.hub_token = self.args.hub_token, None
        webhook, self.args.alert_webhook = self.args.alert_webhook, None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token, self.args.alert_webhook = token, webhook
        drafter = self.accelerator.unwrap_model(self.model)
        if self.args.should_save and isinstance(drafter, PreTrainedModel):
            folder = Path(output_dir or self.args.output_dir)
            if self._saves_bf16:
                weights = state_dict if state_dict is not None else drafter.state_dict()
                write_native_form(folder, drafter.config, weights)
            else:
                copy_custom_generate(folder)


def _finite_or_zero(loss: torch.Tensor) -> torch.Tensor:
    """One bad step must not make the mean of a window NaN; it is counted apart."""
    return torch.where(torch.isfinite(loss), loss, 0)
