# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Configurations of `fla`'s kernels that were measured already, for the reference job: a folder for each GPU.

`fla` compiles and times a dozen configurations of each kernel when it first meets a kind of heads: 39 s of the first step of
Qwen3.6-27B on an H200. These are what it found there, in the form in which it keeps such results itself. Another process takes
the same ones, too: two that time for themselves may choose differently, and then their last bits differ.
"""

import os
from pathlib import Path


FOLDER = Path(__file__).parent


def use_measured_kernels() -> bool:
    """Lets `fla` look here before it measures. Kinds of heads and GPUs that are not here it measures as before.

    Returns:
        `bool`: whether there is something for this GPU, and nobody has set `FLA_CACHE_MODE` or `FLA_CONFIG_DIR`.
    """
    try:
        from fla.ops.utils import cache

        folder, exact = FOLDER / cache.get_gpu_info(), cache.FlaCacheMode.STRICT
    except (ImportError, AttributeError):
        # Releases before 0.6 keep none.
        return False
    if not folder.is_dir() or {"FLA_CACHE_MODE", "FLA_CONFIG_DIR"} & os.environ.keys():
        return False
    # The one is read whenever a kind is met, the other was when `fla` was imported, by transformers.
    os.environ["FLA_CONFIG_DIR"] = str(folder)
    cache.FLA_CACHE_MODE = exact
    return True
