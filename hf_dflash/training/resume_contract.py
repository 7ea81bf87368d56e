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
# What the same adapter weights mean depends on these; its modules and rank show in the shapes.
_OF_AN_ADAPTER = ("peft_type", "lora_alpha", "use_rslora", "use_dora")


def describe_run(drafter, drafter_config, target, dataset, args) -> dict:
    """The contract of a run: what decides blocks, batches and labels, and what states and adapters are of.

    Learning rate, schedule, loss, logging and saving are not in it: changing them half-way is a decision, not a mistake, and
    holds from there (see [`keep_options`]).

    Args:
        drafter ([`DFlashForSpeculation`] or `peft.PeftModel`), drafter_config ([`DFlashConfig`]): what is trained.
        target ([`FrozenTarget`]): that it learns from.
        dataset (`datasets.Dataset`): that it is trained on.
        args ([`DFlashTrainingArguments`]): of the run.

    Returns:
        `dict`: ready for JSON.
    """
    names = ("block_size", "mask_token_id", "target_layer_ids", "is_causal", "layer_types", "sliding_window")
    return {
        **{name: getattr(drafter_config, name) for name in names},
        "adapter": fingerprint_adapter(drafter),
        # Fused or not, they have the same state.
        "optimizer": "muon" if args.matrix_optimizer == "muon" else str(args.optim.value).removesuffix("_fused"),
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
    return _read(checkpoint)["contract"]


def _read(checkpoint: str | os.PathLike) -> dict:
    if is_object_uri(checkpoint):
        content = ObjectStore().read(f"{checkpoint}/{CHECKPOINT_FILE}")
    else:
        content = (Path(checkpoint) / CHECKPOINT_FILE).read_bytes()
    return json.loads(content)


def check_contract(checkpoint: str | os.PathLike, contract: dict) -> None:
    """Refuses to go on under another contract, or from weights alone.

    Raises:
        `ValueError`: naming each difference with both values.
    """
    content = _read(checkpoint)
    # A checkpoint of an earlier release may say less.
    stored = content["contract"]
    differences = [
        f"{name} is {contract.get(name)}, the checkpoint has {stored.get(name)}"
        for name in stored
        if stored[name] != contract.get(name)
    ]
    weights = "A_COPY_OF_IT" if is_object_uri(checkpoint) else checkpoint
    new_run = f"start a new run from these weights with `--drafter {weights}` and another `--output_dir`."
    if differences:
        raise ValueError(
            f"{checkpoint} belongs to another run: {'; '.join(differences)}. Put the old value back, or {new_run}"
        )
    # Saved with all states there are, and by every backend.
    if not any(name.startswith("rng_state") for name in content["files"]):
        raise ValueError(
            f"{checkpoint} holds weights alone (`--save_only_model true`), from which optimizer and schedule would begin anew: "
            f"{new_run}"
        )


@torch.no_grad()
def fingerprint_adapter(drafter) -> str | None:
    """A digest of an adapter's kind and shapes and of the drafter below it, which is in no checkpoint; `None` without one."""
    configs = getattr(drafter, "peft_config", None)
    if not configs:
        return None
    digest = hashlib.sha256()
    for name, config in sorted(configs.items()):
        kept = {option: getattr(config, option, None) for option in _OF_AN_ADAPTER}
        digest.update(f"{name}{json.dumps(kept, default=str)}".encode())
    trainable = [f"{name}{tuple(p.shape)}" for name, p in drafter.named_parameters() if p.requires_grad]
    digest.update("".join(sorted(trainable)).encode())
    _update_with_tensors(digest, ((name, p) for name, p in drafter.named_parameters() if not p.requires_grad))
    return digest.hexdigest()[:16]


@torch.no_grad()
def fingerprint_target(model) -> str:
    """A digest of a target: its text configuration and a few elements of each of its tensors."""
    config = model.config.get_text_config(decoder=True).to_dict()
    kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in ("dtype", "transformers_version")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    _update_with_tensors(digest, model.named_parameters())
    return digest.hexdigest()[:16]


def _update_with_tensors(digest, named_tensors) -> None:
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if tensor.device.type == "meta":
            continue
        flat = tensor.detach().flatten()
        ends = torch.cat([flat[:_SAMPLED_ELEMENTS], flat[-_SAMPLED_ELEMENTS:]])
        digest.update(ends.float().cpu().numpy().tobytes())


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
