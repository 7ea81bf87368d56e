# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Puts the decoding code into a drafter's folder, so that it decodes where this package is not installed."""

import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files


DECODING = Path(__file__).parent


def copy_custom_generate(folder: str | Path) -> list[Path]:
    """
    Writes `custom_generate/` with `generate.py` and, flat beside it, every module of this package that it needs.

    Args:
        folder (`str` or `Path`): a saved drafter.

    Returns:
        `list[Path]`: the files written.
    """
    target_folder = Path(folder) / "custom_generate"
    target_folder.mkdir(parents=True, exist_ok=True)
    entry = DECODING / "speculative.py"
    sources = [DECODING / "custom_generate" / "generate.py", entry, *map(Path, get_relative_import_files(entry))]
    return [Path(shutil.copyfile(source, target_folder / source.name)) for source in sources]
