# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The options of a training run."""

import math
import os
from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from ..drafter.losses import LOSS_TYPES, WEIGHTINGS
from ..object_store import is_object_uri


# What the best checkpoint is the best in: not the loss, which may fall while acceptance does not rise.
BEST_METRIC = "eval_acceptance_length"

MATRIX_OPTIMIZERS = ("same", "muon")
SWITCHES = ("auto", "on", "off")
_ADAMW = ("adamw_torch_fused", "adamw_torch")

# Options of `Trainer` that nothing here would read, and what there is instead.
_WITHOUT_EFFECT = {
    "per_device_train_batch_size": "`--token_budget` is the size of a micro-batch",
    "per_device_eval_batch_size": "`--eval_token_budget` is the size of a micro-batch",
    "auto_find_batch_size": "`--token_budget` is the size of a micro-batch",
    "train_sampling_strategy": "rows of similar length are batched together in any case",
    "dataloader_drop_last": "no row of an epoch is left out",
    "label_smoothing_factor": "`--loss_type kl` learns more than one token of each slot",
    "include_num_input_tokens_seen": "`context_tokens` of the log counts them",
    "neftune_noise_alpha": "the embedding is the frozen target's",
    "bf16_full_eval": "evaluation computes as training does: with `--bf16`, in bf16",
    "fp16_full_eval": "evaluation computes as training does: with `--fp16`, in fp16",
}


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    r"""
    [`~transformers.TrainingArguments`] with the options of DFlash and the paper's defaults.

    > Parameters that control batches and blocks

    Args:
        token_budget (`int`, *optional*, defaults to 8192):
            Rows x longest row of a micro-batch. Takes the place of `per_device_train_batch_size`.
        eval_token_budget (`int`, *optional*):
            The same for evaluation; `token_budget` by default.
        num_anchors (`int` or `"auto"`, *optional*, defaults to 512):
            The most blocks of a document and epoch. `"auto"` measures target and drafter before the first step, and turns
            it and `anchor_ratio` so that neither waits for the other; checkpoints keep what was chosen.
        anchor_ratio (`float`, *optional*, defaults to 0.25):
            Blocks per supervised token, so that short chats are not drowned in slots. 0 for no such limit.
        eval_blocks_per_pass (`int`, *optional*, defaults to 2048):
            Blocks that evaluation computes at once; it visits every position of every reply.

        > Parameters that control the loss

        labels (`str`, *optional*, defaults to `"target"`):
            What a slot shall predict: the `"target"`'s own argmax, or the `"data"`'s token.
        loss_type (`str`, *optional*, defaults to `"ce"`):
            `"ce"`, or `"kl"`, `"tv"`, `"lk"` against the target's distribution.
        loss_weighting (`str`, *optional*, defaults to `"decay"`):
            `"decay"` or `"dpace"`.
        loss_gamma (`float`, *optional*, defaults to 4.0):
            Decay of the slot weights, in slots; the paper takes 7, 5, 4 for block sizes 16, 10, 8.
        dpace_alpha (`float`, *optional*, defaults to 0.5):
            Smoothing of D-PACE.

        > Parameters that control devices

        attention_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"`, `"dense"`, or flex attention on CUDA and dense masks elsewhere.
        compile_layers (`str`, *optional*, defaults to `"auto"`):
            Whether layers of target and drafter are compiled one by one: `"on"`, `"off"`, or on CUDA. `torch_compile` would
            compile whole models, which takes minutes and gains nothing.
        target_cuda_graphs (`str`, *optional*, defaults to `"auto"`):
            Whether the target's passes are recorded as CUDA graphs: `"on"`, `"off"`, or on CUDA where its parameters x
            `token_budget` are below 3e12, so that launching a pass takes longer than running it. Micro-batches are padded to
            a few shapes then.
        target_fp8 (`bool`, *optional*, defaults to `False`):
            Whether the target's large matrices are in FP8: faster, half the memory, and a few labels change. It takes compute
            capability 8.9.
        head_fp8 (`bool`, *optional*, defaults to `False`):
            Whether the drafter's cross-entropy multiplies by the target's head in FP8: gradients are a few per cent off, and
            two copies in FP8 take the memory of another head in bf16. Evaluation stays as it is. It takes `loss_type="ce"`
            and compute capability 8.9.
        target_devices (`str`, *optional*):
            `"same"`, or a comma-separated list; devices joined by `+` share one target. See [`place_targets`].
        targets_per_process (`int`, *optional*, defaults to 1):
            Targets that serve one drafter.
        pipeline (`str`, *optional*, defaults to `"auto"`):
            Whether targets compute ahead of the drafter: `"on"`, `"off"`, or where they have devices of their own.
        pipeline_depth (`int`, *optional*, defaults to 2):
            Micro-batches that each target may be ahead: one ready and one in the making, so that micro-batches of unequal
            cost even out. Each takes `token_budget` x layers x hidden size x 2 bytes on the drafter's device.

        > Parameters that control the optimizer

        matrix_optimizer (`str`, *optional*, defaults to `"same"`):
            `"muon"` for Muon on matrices, with AdamW on the rest; `"same"` for `optim` on all of them.

        > Parameters that control saving and measuring

        save_each_epoch (`bool`, *optional*, defaults to `False`):
            Also save at the end of each epoch, whatever `save_strategy` says.
        checkpoint_uri (`str`, *optional*):
            `s3://bucket/prefix` to which each checkpoint is copied in the background.
        acceptance_steps (`int`, *optional*, defaults to 0):
            Decode a few held-out prompts every so many steps, and compare with the simulated figure. 0 for never.

        > Parameters that control what is told about the run

        run_log (`bool`, *optional*, defaults to `True`):
            Write `run_log.jsonl` into `output_dir`, which `hf-dflash monitor` shows.
        alert_webhook (`str`, *optional*):
            `http://` or `https://` address to which alerts are POSTed as JSON, with a `text` as chat services want it. It is
            kept out of checkpoints and trackers.
        alert_grad_norm_factor (`float`, *optional*, defaults to 10):
            Warn of a gradient norm of so many times the median of the latest 50.
        alert_acceptance_drop (`float`, *optional*, defaults to 0.15):
            Warn when the tokens accepted beyond the bonus token fall by this share of the best evaluation.
        alert_wait_share (`float`, *optional*, defaults to 0.25):
            Warn when the drafter waits for more than this share of five logs in a row.
        alert_free_gib (`float`, *optional*, defaults to 10):
            Warn when less is free where the run is saved, in GiB; two checkpoints must fit in any case.
        alert_upload_minutes (`float`, *optional*, defaults to 60):
            Warn when a checkpoint has been on its way to S3 or the Hub for longer.

        > Parameters that control what a pushed drafter's card says

        target_hub_id (`str`, *optional*):
            The target's Hub id, where the target was loaded from a folder.
        hub_license (`str`, *optional*):
            Licence of the drafter, as the Hub spells it, for example `"apache-2.0"`.
        hub_datasets (`list[str]`, *optional*):
            Hub ids of the data.

    > [!NOTE]
    > These parameters have another default than in [`~transformers.TrainingArguments`]:
    > - `learning_rate`: 6e-4, `lr_scheduler_type`: `"cosine"`, `warmup_steps`: 0.04 of all steps, `num_train_epochs`: 6 (paper, A.1).
    > - `logging_nan_inf_filter`: `False`; it makes the host wait for the device at each step. Samples that come out
    >   non-finite are left out on the device.
    > - `ddp_find_unused_parameters`: `False`; every parameter takes part in every step.
    > - `logging_steps`: 10.
    > - `resume_from_checkpoint`: `hf-dflash train` goes on from the newest whole checkpoint of `output_dir` where it is `None`; for
    >   `DFlashTrainer` it means nothing, as for `Trainer`: `train` takes it.
    > - `metric_for_best_model`: `"eval_acceptance_length"`, greater is better.
    > - `project`: `"hf_dflash"`; `run_name`: the name of `output_dir`, so that a run that goes on is one run to a tracker.
    > - `trackio_static_space_id`: `False`; pushing a drafter publishes no page of its training unless this names one.
    """

    _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate (the paper's 6e-4)."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up, as a share of all steps below 1, else in steps."}
    )
    num_train_epochs: float = field(
        default=6.0, metadata={"help": "Passes over the data; anchors are drawn anew in each."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer steps."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Costs a wait for the device at each step."})
    metric_for_best_model: str | None = field(
        default=BEST_METRIC, metadata={"help": "Acceptance, not the loss, says which checkpoint is the best."}
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every parameter takes part in every step, so there is nothing to find."}
    )

    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "What to go on from: auto (if not given): the newest whole checkpoint of OUTPUT_DIR, if there is one; "
            "true: the same, and one must be there; false: a new run, and none may be there; or a checkpoint: a folder, "
            "s3://bucket/prefix/checkpoint-N, or s3://bucket/prefix for the latest one there."
        },
    )
    project: str = field(default="hf_dflash", metadata={"help": "Name of the project, for trackio."})

    token_budget: int = field(
        default=8192,
        metadata={
            "help": "Rows x longest row of a micro-batch, in tokens. Takes the place of per_device_train_batch_size."
        },
    )
    eval_token_budget: int | None = field(
        default=None, metadata={"help": "The same for evaluation; token_budget by default."}
    )
    # A `str` for the command line; a number becomes an `int`.
    num_anchors: str = field(
        default="512",
        metadata={
            "help": "The most blocks of a document and epoch (paper: 512); auto: measured once, so that neither target nor "
            "drafter waits, anchor_ratio with it."
        },
    )
    anchor_ratio: float = field(
        default=0.25,
        metadata={
            "help": "Blocks per supervised token, so that short chats are not drowned in slots; 0: no such limit."
        },
    )
    eval_blocks_per_pass: int = field(
        default=2048,
        metadata={"help": "Blocks that evaluation computes at once; it visits every position of a reply."},
    )
    labels: str = field(
        default="target",
        metadata={
            "help": "What a slot shall predict: the target's own argmax, or the data's token.",
            "choices": ["target", "data"],
        },
    )
    loss_type: str = field(
        default="ce",
        metadata={"help": "ce, or kl, tv, lk against the target's distribution.", "choices": list(LOSS_TYPES)},
    )
    loss_weighting: str = field(
        default="decay", metadata={"help": "How much each slot counts.", "choices": list(WEIGHTINGS)}
    )
    loss_gamma: float = field(
        default=4.0, metadata={"help": "Decay of the slot weights; the paper takes 7, 5, 4 for block sizes 16, 10, 8."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of D-PACE."})
    attention_backend: str = field(
        default="auto",
        metadata={
            "help": "flex, dense, or auto: flex on CUDA, dense elsewhere.",
            "choices": ["auto", "flex", "dense"],
        },
    )
    compile_layers: str = field(
        default="auto",
        metadata={
            "help": "Compile layers of target and drafter one by one: on, off, or auto: on CUDA.",
            "choices": list(SWITCHES),
        },
    )
    target_cuda_graphs: str = field(
        default="auto",
        metadata={
            "help": "Record the target's passes as CUDA graphs: on, off, or auto: on CUDA where its parameters x token_budget are "
            "below 3e12, so that launching takes longer than running.",
            "choices": list(SWITCHES),
        },
    )
    target_fp8: bool = field(
        default=False,
        metadata={"help": "The target's large matrices in FP8: faster, half the memory, and a few labels change."},
    )
    head_fp8: bool = field(
        default=False,
        metadata={
            "help": "The drafter's cross-entropy multiplies by the head in FP8 (ce only): gradients a few per cent off, the "
            "memory of another head."
        },
    )
    target_devices: str | None = field(
        default=None,
        metadata={"help": "'same' for the drafter's device, or a comma-separated list for all processes."},
    )
    targets_per_process: int = field(default=1, metadata={"help": "Targets that serve one drafter."})
    pipeline: str = field(
        default="auto",
        metadata={
            "help": "Targets compute ahead of the drafter: on, off, or auto: where they have devices of their own.",
            "choices": list(SWITCHES),
        },
    )
    pipeline_depth: int = field(
        default=2,
        metadata={"help": "Micro-batches that each target may be ahead: one ready, one in the making."},
    )
    matrix_optimizer: str = field(
        default="same",
        metadata={
            "help": "muon: Muon on matrices, AdamW on the rest; same: --optim on all of them.",
            "choices": list(MATRIX_OPTIMIZERS),
        },
    )
    save_each_epoch: bool = field(
        default=False, metadata={"help": "Also save at the end of each epoch, whatever save_strategy says."}
    )
    checkpoint_uri: str | None = field(
        default=None, metadata={"help": "s3://bucket/prefix to which each checkpoint is copied in the background."}
    )
    acceptance_steps: int = field(
        default=0,
        metadata={"help": "Decode a few held-out prompts every so many steps, beside the simulated figure; 0: never."},
    )
    run_log: bool = field(
        default=True, metadata={"help": "Write OUTPUT_DIR/run_log.jsonl, which hf-dflash monitor shows."}
    )
    alert_webhook: str | None = field(
        default=None, metadata={"help": "http(s):// address to which alerts are POSTed as JSON."}
    )
    alert_grad_norm_factor: float = field(
        default=10.0, metadata={"help": "Warn of a gradient norm of so many times the median of the latest 50."}
    )
    alert_acceptance_drop: float = field(
        default=0.15,
        metadata={"help": "Warn when the tokens accepted beyond the bonus token fall by this share of the best."},
    )
    alert_wait_share: float = field(
        default=0.25,
        metadata={"help": "Warn when the drafter waits for more than this share of five logs in a row."},
    )
    alert_free_gib: float = field(
        default=10.0,
        metadata={"help": "Warn when less is free where the run is saved, in GiB; two checkpoints must fit anyway."},
    )
    alert_upload_minutes: float = field(
        default=60.0, metadata={"help": "Warn when a checkpoint has been on its way to S3 or the Hub for longer."}
    )
    target_hub_id: str | None = field(
        default=None, metadata={"help": "The target's Hub id for the card, where the target is a folder."}
    )
    hub_license: str | None = field(default=None, metadata={"help": "Licence of the drafter, for its card."})
    hub_datasets: list[str] | None = field(default=None, metadata={"help": "Hub ids of the data, for the card."})

    def __post_init__(self):
        defaults = {f.name: f.default for f in fields(TrainingArguments)}
        for name, instead in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value not in (defaults[name], False, None):
                raise ValueError(f"`--{name} {value}` would have no effect: {instead}. Leave the option out.")
        for name, choices in (
            ("labels", ("target", "data")),
            ("loss_type", LOSS_TYPES),
            ("loss_weighting", WEIGHTINGS),
            ("attention_backend", ("auto", "flex", "dense")),
            ("matrix_optimizer", MATRIX_OPTIMIZERS),
            ("pipeline", SWITCHES),
            ("compile_layers", SWITCHES),
            ("target_cuda_graphs", SWITCHES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`--{name} {getattr(self, name)}`: choose one of {', '.join(choices)}.")
        if self.num_anchors != "auto":
            try:
                self.num_anchors = int(self.num_anchors)
            except (ValueError, OverflowError):
                raise ValueError(f"`--num_anchors {self.num_anchors}`: give a number, or auto.") from None
        for name in (
            "token_budget",
            "eval_token_budget",
            "eval_blocks_per_pass",
            "targets_per_process",
            "pipeline_depth",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`--{name}` is {getattr(self, name)}: it must be at least 1.")
        for name in (
            "alert_grad_norm_factor",
            "alert_acceptance_drop",
            "alert_wait_share",
            "alert_free_gib",
            "alert_upload_minutes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"`--{name}` is {getattr(self, name)}: it must not be negative.")
        if self.alert_webhook is not None and not self.alert_webhook.startswith(("http://", "https://")):
            raise ValueError("`--alert_webhook` must be an http:// or https:// address.")
        if self.run_name is None:
            self.run_name = os.path.basename(os.path.abspath(self.output_dir)) if self.output_dir else None
        if self.trackio_static_space_id is None:
            self.trackio_static_space_id = False
        if self.num_anchors != "auto" and self.num_anchors < 1:
            raise ValueError(f"`--num_anchors` is {self.num_anchors}: it must be at least 1, or auto.")
        self.anchor_ratio = 0.0 if self.anchor_ratio is None else self.anchor_ratio
        # Not `< 0`: NaN is neither, and would draw no anchor and report a loss of 0.
        if not self.anchor_ratio >= 0:
            raise ValueError(f"`--anchor_ratio` is {self.anchor_ratio}: it must be positive, or 0 for no limit.")
        # Of 0 epochs only the drafter is saved; below, `Trainer` counts backwards.
        if self.max_steps <= 0 and not 0 <= self.num_train_epochs < math.inf:
            raise ValueError(f"`--num_train_epochs` is {self.num_train_epochs}: how often the data is read.")
        if not self.weight_decay >= 0:
            raise ValueError(f"`--weight_decay` is {self.weight_decay}: it must not be negative.")
        if self.acceptance_steps < 0:
            raise ValueError(f"`--acceptance_steps` is {self.acceptance_steps}: a number of steps, or 0 for never.")
        if self.checkpoint_uri is not None and not is_object_uri(self.checkpoint_uri):
            raise ValueError(f"`--checkpoint_uri {self.checkpoint_uri}` is not of the form s3://bucket/prefix.")
        if not self.loss_gamma > 0:
            raise ValueError(f"`--loss_gamma` is {self.loss_gamma}: the decay must be a positive number of slots.")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"`--dpace_alpha` is {self.dpace_alpha}: it must be between 0 and 1.")
        if self.loss_weighting == "dpace" and self.loss_type != "ce":
            raise ValueError("`--loss_weighting dpace` is made of cross-entropies: use `--loss_type ce`.")
        if self.head_fp8 and self.loss_type != "ce":
            raise ValueError(
                f"`--head_fp8` is for `--loss_type ce`, not {self.loss_type}: `--head_fp8 false`, where a recipe sets it."
            )
        if self.labels == "data" and self.loss_type != "ce":
            raise ValueError(
                f"`--loss_type {self.loss_type}` learns the target's distribution, which `--labels data` has none of: "
                "use `--labels target`."
            )
        super().__post_init__()
        if self.matrix_optimizer == "muon" and (self.optim_args or self.optim.value not in _ADAMW):
            named = f"--optim_args {self.optim_args}" if self.optim_args else f"--optim {self.optim.value}"
            raise ValueError(
                f"`{named}` would have no effect: `--matrix_optimizer muon` is Muon on matrices and AdamW on the rest. Leave one out."
            )
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            # They follow the metric and take it for a loss, unless they are told.
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **(self.lr_scheduler_kwargs or {})}
        # One drafter a process: with several visible GPUs Trainer would wrap it in DataParallel, and the others hold targets.
        self._n_gpu = 1

    def to_dict(self) -> dict:
        """All options, without secrets: trackers and cards are given these."""
        options = super().to_dict()
        if options["alert_webhook"] is not None:
            options["alert_webhook"] = "<ALERT_WEBHOOK>"
        return options
