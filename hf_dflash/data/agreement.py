# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Are these completions the target's own? The share of reply tokens that are the target's argmax.

Greedy completions of the target give a share near 1 (numerics of another engine cost a little), sampled ones less, those
of another model much less. A drafter learns what the target says, so completions of another model teach it at positions
that the target would never reach.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel


@torch.no_grad()
def measure_target_agreement(
    dataset: "Dataset",
    target: "str | PreTrainedModel",
    *,
    num_rows: int = 32,
    device: str | None = None,
) -> dict:
    """
    Runs the target over some rows and counts the supervised tokens that it would have chosen itself.

    Args:
        dataset (`datasets.Dataset`):
            Rows with `input_ids` and `loss_mask`.
        target (`str` or `PreTrainedModel`):
            The target, or its folder or Hub id.
        num_rows (`int`, *optional*, defaults to 32):
            Rows to measure on, evenly spread over the dataset.
        device (`str`, *optional*):
            Where to load the target; by default a GPU if there is one.

    Returns:
        `dict`: `share` (`float`), `num_tokens`, `num_rows`.

    Raises:
        `ValueError`: none of the rows has a supervised token behind its first one, or ids are out of the vocabulary.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(target, str):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto").to(device)
    target.eval()
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(num_rows, len(dataset))).astype(int))
    vocabulary = target.get_input_embeddings().num_embeddings
    agreeing = total = 0
    for row in rows:
        row = dataset[int(row)]
        input_ids = torch.as_tensor(row["input_ids"], dtype=torch.int64, device=target.device)
        if int(input_ids.max()) >= vocabulary:
            raise ValueError(
                f"The dataset has token id {int(input_ids.max())}, but the target has {vocabulary}: it is another target."
            )
        supervised = torch.as_tensor(row["loss_mask"], dtype=torch.bool).nonzero().flatten()
        positions = supervised[supervised > 0].to(target.device)
        if len(positions) == 0:
            continue
        # A token is predicted one position before it stands.
        logits = target(input_ids[None], use_cache=False, logits_to_keep=positions - 1).logits[0]
        agreeing += int((logits.argmax(-1) == input_ids[positions]).sum())
        total += len(positions)
    if total == 0:
        raise ValueError("None of the rows has a supervised token.")
    return {"share": agreeing / total, "num_tokens": total, "num_rows": len(rows)}
