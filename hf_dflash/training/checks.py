# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a trainer refuses at once: datasets that teach nothing, drafters that were made for another target."""

import numpy as np

from ..target.frozen_target import FrozenTarget


def check_supervision(dataset, name: str) -> None:
    """Refuses a dataset in which no block could be trained.

    Raises:
        `ValueError`: naming the dataset and the missing columns or supervision.
    """
    missing = {"input_ids", "loss_mask", "length", "row_id"} - set(dataset.column_names)
    if missing:
        raise ValueError(f"`{name}` has no column {', '.join(sorted(missing))}: make it with `hf-dflash tokenize`.")
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty.")
    if "num_supervised" in dataset.column_names:
        most = max(dataset["num_supervised"])
    else:
        most = max(int(np.sum(mask)) for mask in dataset["loss_mask"])
    if most < 2:
        raise ValueError(
            f"Nothing in `{name}` is supervised ({len(dataset)} rows, at most {most} supervised token(s) in one): a block needs "
            "two. Look at the loss masks with `hf-dflash check`."
        )


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
