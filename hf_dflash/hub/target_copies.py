# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Copies of the target's embedding and head in another project's drafter: left out, so they have to be copies."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from .drafter_files import WEIGHTS_FILE


_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Training changes all rows that it reads or scores: a few show it.
_NUM_ROWS = 64


def check_target_copies(tensors: dict[str, torch.Tensor], target: str | Path, mask_token_id: int, source: str) -> None:
    """
    Compares a few rows, and that of the mask token, which some trainers learn. Not compared: a target that is no folder, and
    quantized tensors, whose numbers mean something with their scales only.

    Args:
        tensors (`dict[str, torch.Tensor]`): of the whole foreign checkpoint.
        target (`str` or `Path`): the target.
        mask_token_id (`int`): the drafter's.
        source (`str`): named in the error.

    Raises:
        `ValueError`: if an embedding or head is not the target's.
    """
    files = _find_files(Path(target))
    for name, copy in tensors.items():
        kind = next((kind for kind in (_EMBEDDING, _HEAD) if name.endswith(kind)), None)
        if kind not in files or copy.dim() != 2:
            continue
        file, own_name = files[kind]
        with safe_open(file, framework="pt") as opened:
            own = opened.get_slice(own_name)
            num_rows, width = own.get_shape()
            if width != copy.shape[1] or min(copy.dtype.itemsize, own[0].dtype.itemsize) < 2:
                continue
            last = min(num_rows, copy.shape[0]) - 1
            rows = {min(mask_token_id, last), *torch.linspace(0, last, _NUM_ROWS).long().tolist()}
            # In the coarsest type of both: rounding is no training.
            differ = [row for row in rows if not torch.equal(own[row].bfloat16(), copy[row].bfloat16())]
        if differ:
            raise ValueError(
                f"{source}: `{name}` is not a copy of the target's (row {min(differ)} differs from {target}): it was trained, or is "
                "another target's. hf_dflash's drafters use the target's own."
            )


def _find_files(target: Path) -> dict[str, tuple[Path, str]]:
    """Where the target's embedding and head are: kind -> (file, name of the tensor)."""
    index, single = target / f"{WEIGHTS_FILE}.index.json", target / WEIGHTS_FILE
    if single.is_file():
        with safe_open(single, framework="pt") as opened:
            names = dict.fromkeys(opened.keys(), WEIGHTS_FILE)
    elif index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        return {}
    found = {}
    for kind in (_EMBEDDING, _HEAD):
        matches = [name for name in names if name == kind or name.endswith(f".{kind}")]
        # Of several, nobody here knows which one is the language model's.
        if len(matches) == 1 and (target / names[matches[0]]).is_file():
            found[kind] = (target / names[matches[0]], matches[0])
    if _EMBEDDING in found and not any("lm_head." in name for name in names):
        # Tied: the head is the embedding.
        found[_HEAD] = found[_EMBEDDING]
    return found
