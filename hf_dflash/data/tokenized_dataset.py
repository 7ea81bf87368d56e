# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A tokenized dataset that lies on disk or was made elsewhere: its manifest, and the statistics of its rows."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from datasets import Dataset


def is_tokenized_dataset(path: str | Path) -> bool:
    """Whether a folder holds a finished dataset; one that is being made, or was stopped, is none."""
    return Path(path, "state.json").is_file()


def load_tokenized_dataset(path: str | Path) -> "Dataset":
    """
    Loads a dataset that [`~data.tokenization.tokenize_completions`] has finished.

    Raises:
        `FileNotFoundError`: there is none.
        `ImportError`: the package datasets is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("Datasets on disk need the package datasets: pip install 'hf-dflash[data]'") from None
    if not is_tokenized_dataset(path):
        raise FileNotFoundError(f"{path} is not a finished dataset: make it with `hf-dflash tokenize`.")
    return datasets.load_from_disk(str(path))


def find_manifest(dataset: "Dataset") -> dict | None:
    """The manifest beside the files of a dataset, if it is about as many rows as the dataset has."""
    folders = {Path(file["filename"]).parent for file in dataset.cache_files}
    if len(folders) != 1:
        return None
    path = folders.pop() / "manifest.json"
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text())
    return manifest if manifest.get("counts", {}).get("samples") == len(dataset) else None


@dataclass
class DatasetStatistics:
    """
    What the gates and the report know of each row, as arrays [rows].

    Args:
        length (`np.ndarray`): tokens, int64.
        num_supervised (`np.ndarray`): supervised tokens, int64.
        reply_hash (`np.ndarray`): hash of the supervised tokens, int64.
    """

    length: np.ndarray
    num_supervised: np.ndarray
    reply_hash: np.ndarray


def read_statistics(dataset: "Dataset") -> DatasetStatistics:
    """
    Reads the statistics of a dataset: from its columns, or from the tokens of one that was made elsewhere.

    Raises:
        `ValueError`: there are no columns `input_ids` and `loss_mask`, or they do not fit together.
    """
    names = ("length", "num_supervised", "reply_hash")
    if len(dataset) and set(names) <= set(dataset.column_names):
        columns = dataset.select_columns(list(names)).with_format("numpy")[:]
        return DatasetStatistics(*(np.asarray(columns[name], dtype=np.int64) for name in names))
    missing = {"input_ids", "loss_mask"} - set(dataset.column_names)
    if missing:
        raise ValueError(
            f"The dataset has no column {' and no column '.join(sorted(missing))}: make it with `hf-dflash tokenize`."
        )
    length, supervised, hashes = [], [], []
    for batch in dataset.select_columns(["input_ids", "loss_mask"]).with_format(None).iter(1000):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            if len(ids) != len(mask):
                raise ValueError(f"Row {len(length)} has {len(ids)} input_ids but {len(mask)} values in loss_mask.")
            mask = np.asarray(mask, dtype=bool)
            length.append(len(ids))
            supervised.append(int(mask.sum()))
            hashes.append(hash_reply(np.asarray(ids, dtype=np.int32)[mask]))
    return DatasetStatistics(*(np.asarray(values, dtype=np.int64) for values in (length, supervised, hashes)))


def hash_reply(supervised_ids: np.ndarray) -> int:
    """A 64-bit hash of token ids (int32), for finding equal replies."""
    digest = hashlib.blake2b(np.ascontiguousarray(supervised_ids, dtype="<i4"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
