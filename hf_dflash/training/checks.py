# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a trainer refuses at once: datasets that teach nothing, drafters that were made for another target."""

import torch
from torch import nn

from ..drafter.blocks import find_eligible_anchors
from ..target.frozen_target import FrozenTarget


# Arguments of `Trainer` that nothing here would call, and what there is instead.
_WITHOUT_EFFECT = {
    "data_collator": "rows are padded by `collate_rows`: change the rows of the dataset",
    "compute_loss_func": "override `compute_loss` in a subclass",
    "compute_metrics": "evaluation keeps no predictions: read its figures in a callback's `on_evaluate`, or override `evaluate`",
    "preprocess_logits_for_metrics": "evaluation keeps no logits",
    "model_init": "pass the drafter as `model`",
}


def check_arguments(arguments: dict) -> None:
    """Refuses arguments of `Trainer` that would be ignored.

    Raises:
        `ValueError`: naming the argument, and what there is instead.
    """
    for name, instead in _WITHOUT_EFFECT.items():
        if arguments.get(name) is not None:
            raise ValueError(f"`{name}` would have no effect on a `DFlashTrainer`: {instead}.")


def check_supervision(dataset, name: str) -> None:
    """Refuses a dataset in which no block could be trained.

    Raises:
        `ValueError`: naming the dataset and the missing columns or supervision.
    """
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"`{name}` is of type {type(dataset).__name__}, and a `datasets.Dataset` is needed: batches are planned from the "
            "lengths of all rows. `datasets.Dataset.from_generator` and `from_list` make one."
        )
    missing = {"input_ids", "loss_mask", "length", "row_id"} - set(dataset.column_names)
    if missing:
        raise ValueError(f"`{name}` has no column {', '.join(sorted(missing))}: make it with `hf-dflash tokenize`.")
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty.")
    # A block needs a supervised anchor and a supervised token behind it. The first row usually has them.
    if not any(find_eligible_anchors(torch.as_tensor(row["loss_mask"])).any() for row in dataset):
        raise ValueError(
            f"Nothing in `{name}` is supervised ({len(dataset)} rows, none with two supervised tokens behind one another): a "
            "block needs two. Look at the loss masks with `hf-dflash check`."
        )


def check_can_train(model: nn.Module, args) -> None:
    """Refuses weights that would lose small updates, and what a CPU cannot compute.

    Raises:
        `ValueError`: saying how to load the drafter, or which option to take.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if dtypes & {torch.bfloat16, torch.float16}:
        raise ValueError(
            f"The drafter's weights are {', '.join(map(str, dtypes))}, in which small updates are lost: load it with "
            "`from_pretrained(..., dtype=torch.float32)` and use `--bf16` for the arithmetic."
        )
    if args.attention_backend == "flex" and args.device.type == "cpu":
        raise ValueError("`--attention_backend flex` has no backward pass on a CPU: use `dense` or `auto`.")
    if args.target_cuda_graphs == "on" and args.device.type == "cpu":
        raise ValueError("`--target_cuda_graphs on` takes a GPU: use `auto` or `off`.")
    if args.fp16 and args.device.type == "cpu":
        # Accelerate leaves autocast out there, and says nothing.
        raise ValueError("`--fp16` takes a GPU: use `--bf16`, or neither.")


def check_fit(config, target: FrozenTarget) -> None:
    """Refuses a drafter that was made for another target.

    Raises:
        `ValueError`: naming both values.
    """
    for name, theirs in (
        ("hidden_size", target.config.hidden_size),
        ("num_target_layers", target.config.num_hidden_layers),
    ):
        if getattr(config, name) != theirs:
            raise ValueError(
                f"The drafter's `{name}` is {getattr(config, name)}, the target's is {theirs}: make the drafter's config with "
                "`create_drafter_config(target.config)`."
            )
    rows = target.embedding.weight.shape[0]
    if config.mask_token_id is None or config.mask_token_id >= rows:
        raise ValueError(
            f"`mask_token_id` {config.mask_token_id} is no row of the target's embedding ({rows} rows): choose an unused one."
        )
    if config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"The drafter's `vocab_size` is {config.vocab_size}, the target's is {target.config.vocab_size}: they must be equal."
        )
    if list(config.target_layer_ids) != target.layer_ids:
        raise ValueError(
            f"The drafter reads layers {list(config.target_layer_ids)}, this target captures {target.layer_ids}."
        )
