# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import dataclasses

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments, get_scheduler
from transformers.training_args import ParallelMode

from hf_dflash.training.arguments import DFlashTrainingArguments


pytestmark = pytest.mark.compat


def test_defaults_are_those_of_the_paper(tmp_path):
    args = DFlashTrainingArguments(str(tmp_path))
    assert (args.learning_rate, args.num_train_epochs, args.max_grad_norm) == (6e-4, 6, 1.0)
    assert args.lr_scheduler_type == "cosine" and args.get_warmup_steps(1000) == 40
    assert (args.num_anchors, args.anchor_ratio, args.loss_gamma, args.token_budget) == (512, 0.25, 4.0, 8192)
    assert (args.labels, args.loss_type, args.loss_weighting) == ("target", "ce", "decay")
    assert args.ddp_find_unused_parameters is False and args.logging_nan_inf_filter is False


def test_every_option_of_ours_can_be_given_on_the_command_line_and_is_documented(tmp_path):
    own = [f for f in dataclasses.fields(DFlashTrainingArguments) if f not in dataclasses.fields(TrainingArguments)]
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    for field in own:
        assert field.metadata.get("help"), field.name
        if field.name not in inherited:
            assert f"{field.name} (" in DFlashTrainingArguments.__doc__
    flags = {
        "token_budget": 100,
        "eval_token_budget": 50,
        "num_anchors": 3,
        "anchor_ratio": 0.0,
        "eval_blocks_per_pass": 7,
        "labels": "target",
        "loss_type": "lk",
        "loss_weighting": "decay",
        "loss_gamma": 7.0,
        "dpace_alpha": 0.25,
        "attention_backend": "dense",
        "target_devices": "same",
        "targets_per_process": 2,
        "matrix_optimizer": "muon",
        "save_each_epoch": True,
        "checkpoint_uri": "s3://bucket/run",
        "acceptance_steps": 100,
    }
    assert set(flags) <= {f.name for f in own} - inherited
    argv = [f"--{name}={value}" for name, value in flags.items()]
    (args,) = HfArgumentParser(DFlashTrainingArguments).parse_args_into_dataclasses(
        [f"--output_dir={tmp_path}", *argv]
    )
    assert {name: getattr(args, name) for name in flags} == flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "teacher"}, "--labels teacher"),
        ({"loss_type": "mse"}, "choose one of ce, kl, tv, lk"),
        ({"loss_weighting": "flat"}, "choose one of decay, dpace"),
        ({"attention_backend": "eager"}, "choose one of auto, flex, dense"),
        ({"token_budget": 0}, "--token_budget"),
        ({"eval_token_budget": 0}, "--eval_token_budget"),
        ({"num_anchors": 0}, "--num_anchors"),
        ({"num_anchors": float("inf")}, "--num_anchors"),
        ({"eval_blocks_per_pass": 0}, "--eval_blocks_per_pass"),
        ({"targets_per_process": 0}, "--targets_per_process"),
        ({"anchor_ratio": -0.1}, "--anchor_ratio"),
        ({"anchor_ratio": float("nan")}, "--anchor_ratio"),
        ({"loss_gamma": 0.0}, "--loss_gamma"),
        ({"loss_gamma": float("nan")}, "--loss_gamma"),
        ({"dpace_alpha": 1.5}, "--dpace_alpha"),
        ({"loss_weighting": "dpace", "loss_type": "kl"}, "--loss_type ce"),
        ({"labels": "data", "loss_type": "kl"}, "--labels target"),
        ({"head_fp8": True, "loss_type": "lk"}, "--head_fp8 false"),
        ({"per_device_train_batch_size": 4}, "--per_device_train_batch_size 4.*--token_budget"),
        ({"per_device_eval_batch_size": 4}, "--eval_token_budget"),
        ({"auto_find_batch_size": True}, "--auto_find_batch_size"),
        ({"train_sampling_strategy": "group_by_length"}, "--train_sampling_strategy"),
        ({"dataloader_drop_last": True}, "--dataloader_drop_last"),
        ({"label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
        ({"include_num_input_tokens_seen": "all"}, "context_tokens"),
        ({"neftune_noise_alpha": 5.0}, "--neftune_noise_alpha"),
        ({"bf16_full_eval": True}, "--bf16_full_eval True.*--bf16"),
        ({"num_train_epochs": -1.0}, "--num_train_epochs"),
        ({"num_train_epochs": float("inf")}, "--num_train_epochs"),
        ({"weight_decay": float("nan")}, "--weight_decay"),
        ({"matrix_optimizer": "muon", "optim": "adafactor"}, "--optim adafactor.*--matrix_optimizer muon"),
        ({"matrix_optimizer": "muon", "optim_args": "eps=1e-3"}, "--optim_args eps=1e-3.*--matrix_optimizer muon"),
    ],
)
def test_unusable_options_are_refused_by_their_flag(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DFlashTrainingArguments(str(tmp_path), **options)


def test_no_limit_of_anchors_is_0_or_none(tmp_path):
    assert DFlashTrainingArguments(str(tmp_path), anchor_ratio=None).anchor_ratio == 0


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_a_metric_knows_whether_more_of_it_is_better(schedule, tmp_path):
    def mode_of(**options):
        args = DFlashTrainingArguments(
            str(tmp_path), use_cpu=True, eval_strategy="steps", lr_scheduler_type=schedule, **options
        )
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return get_scheduler(schedule, optimizer, scheduler_specific_kwargs=args.lr_scheduler_kwargs).mode

    assert mode_of() == "max"
    assert mode_of(metric_for_best_model="eval_loss") == "min"
    assert mode_of(lr_scheduler_kwargs={"mode": "min"}) == "min"


def test_several_visible_gpus_in_one_process_are_not_for_data_parallel(tmp_path, monkeypatch):
    """Trainer wraps a model in DataParallel iff `args.n_gpu > 1`; this is what it reads with four GPUs in sight."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    plain, ours = TrainingArguments(str(tmp_path)), DFlashTrainingArguments(str(tmp_path))
    for args in (plain, ours):
        # The device of a plain process with GPUs, whose set-up counts them.
        args.__dict__["_setup_devices"] = torch.device("cuda:0")
    plain._n_gpu = 4
    assert plain.parallel_mode == ParallelMode.NOT_DISTRIBUTED and plain.train_batch_size == 32
    assert ours.n_gpu == 1
    assert ours.parallel_mode == ParallelMode.NOT_PARALLEL
    assert ours.train_batch_size == 8


def test_arguments_survive_a_round_trip_through_a_dict(tmp_path):
    args = DFlashTrainingArguments(str(tmp_path), loss_type="kl", token_budget=77)
    saved = args.to_dict()
    assert (saved["loss_type"], saved["token_budget"]) == ("kl", 77)
    assert dataclasses.replace(args, seed=5).n_gpu == 1
    assert dataclasses.replace(args, seed=5).token_budget == 77


def test_the_best_checkpoint_is_one_of_acceptance(tmp_path):
    args = DFlashTrainingArguments(str(tmp_path))
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_acceptance_length", True)
