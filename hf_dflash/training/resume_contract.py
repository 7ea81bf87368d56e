# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What must stay the same for a run to go on as if it had never stopped."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from ..object_store import ObjectStore, is_object_uri
from .checkpoint import CHECKPOINT_FILE


# Rows of a dataset whose tokens go into its fingerprint.
_SAMPLED_ROWS = 256
# Elements from either end of each of a target's tensors.
_SAMPLED_ELEMENTS = 8


def describe_run(drafter_config, target, dataset, args) -> dict:
    """The contract of a run: what decides blocks, batches and labels.

    Learning rate, schedule, loss, logging and saving are not in it: changing them half-way is a decision, not a mistake.

    Args:
        drafter_config ([`DFlashConfig`]): of the drafter.
        target ([`FrozenTarget`]): that it learns from.
        dataset (`datasets.Dataset`): that it is trained on.
        args ([`DFlashTrainingArguments`]): of the run.

    Returns:
        `dict`: ready for JSON.
    """
    names = ("block_size", "mask_token_id", "target_layer_ids", "is_causal", "layer_types", "sliding_window")
    return {
        **{name: getattr(drafter_config, name) for name in names},
        "target": fingerprint_target(target.model),
        "dataset": fingerprint_dataset(dataset),
        "seed": args.seed,
        "data_seed": args.data_seed,
        "token_budget": args.token_budget,
        "num_anchors": args.num_anchors,
        "anchor_ratio": args.anchor_ratio,
        "processes x gradient_accumulation_steps": args.world_size * args.gradient_accumulation_steps,
    }


def read_contract(checkpoint: str | os.PathLike) -> dict:
    """The contract of the run that saved a checkpoint, which may be on S3 still."""
    if is_object_uri(checkpoint):
        content = ObjectStore().read(f"{checkpoint}/{CHECKPOINT_FILE}")
    else:
        content = (Path(checkpoint) / CHECKPOINT_FILE).read_bytes()
    return json.loads(content)["contract"]


def check_contract(checkpoint: str | os.PathLike, contract: dict) -> None:
    """Refuses to go on under another contract.

    Raises:
        `ValueError`: naming each difference with both values.
    """
    stored = read_contract(checkpoint)
    differences = [
        f"{name} is {contract.get(name)}, the checkpoint has {stored.get(name)}"
        for name in dict.fromkeys([*stored, *contract])
        if stored.get(name) != contract.get(name)
    ]
    if differences:
        weights = "A_COPY_OF_IT" if is_object_uri(checkpoint) else checkpoint
        raise ValueError(
            f"{checkpoint} belongs to another run: {'; '.join(differences)}. Put the old value back, or start a new run from "
            f"these weights with `--drafter {weights}` and another `--output_dir`."
        )


@torch.no_grad()
def fingerprint_target(model) -> str:
    """A digest of a target: its text configuration and a few elements of each of its tensors."""
    config = model.config.get_text_config(decoder=True).to_dict()
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in ("dtype", "transformers_version")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.device.type == "meta":
            continue
        flat = parameter.detach().flatten()
        ends = torch.cat([flat[:_SAMPLED_ELEMENTS], flat[-_SAMPLED_ELEMENTS:]])
        digest.update(ends.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def fingerprint_dataset(dataset) -> str:
    """A digest of a dataset's content: lengths and ids of all rows, tokens and masks of some.

    Not `datasets`' own fingerprint, which changes when the same rows are written to another folder.
    """
    digest = hashlib.sha256(f"{len(dataset)} rows".encode())
    for column in ("length", "row_id"):
        digest.update(np.asarray(dataset[column], dtype=np.int64).tobytes())
    for index in np.linspace(0, len(dataset) - 1, min(_SAMPLED_ROWS, len(dataset)), dtype=np.int64).tolist():
        row = dataset[index]
        digest.update(np.asarray(row["input_ids"], dtype=np.int64).tobytes())
        digest.update(np.asarray(row["loss_mask"], dtype=bool).tobytes())
    return digest.hexdigest()[:16]
