# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""hf_dflash: train a DFlash speculative-decoding drafter with Transformers and Accelerate.

Importing the package registers [`DFlashConfig`] and [`DFlashForSpeculation`] with the auto classes; everything else is
imported when it is first asked for.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING


__version__ = "0.1.0"

# Public names and where they live, in the order in which the data walks through them.
_LAZY_NAMES = {
    "DFlashConfig": "drafter.configuration_dflash",
    "DFlashForSpeculation": "drafter.modeling_dflash",
    "create_drafter_config": "drafter.configuration_dflash",
    "tokenize_completions": "data.tokenization",
    "load_dataset_report": "data.dataset_report",
    "HookCapture": "target.hook_capture",
    "FrozenTarget": "target.frozen_target",
    "TargetFeatures": "target.frozen_target",
    "select_anchors": "drafter.blocks",
    "create_anchor_block_mask_mod": "drafter.blocks",
    "compute_dflash_loss": "drafter.losses",
    "position_weights": "drafter.losses",
    "DFlashTrainingArguments": "training.arguments",
    "DFlashTrainer": "training.trainer",
    "speculative_generate": "decoding.speculative",
    "SpeculativeOutput": "decoding.speculative",
}

if TYPE_CHECKING:
    from .data.dataset_report import load_dataset_report
    from .data.tokenization import tokenize_completions
    from .decoding.speculative import SpeculativeOutput, speculative_generate
    from .drafter.blocks import create_anchor_block_mask_mod, select_anchors
    from .drafter.configuration_dflash import DFlashConfig, create_drafter_config
    from .drafter.losses import compute_dflash_loss, position_weights
    from .drafter.modeling_dflash import DFlashForSpeculation
    from .target.frozen_target import FrozenTarget, TargetFeatures
    from .target.hook_capture import HookCapture
    from .training.arguments import DFlashTrainingArguments
    from .training.trainer import DFlashTrainer


def register_auto_classes() -> None:
    """Tells `AutoConfig` and `AutoModel` what a drafter is. Imports torch."""
    from transformers import AutoConfig, AutoModel

    from .drafter.configuration_dflash import DFlashConfig
    from .drafter.modeling_dflash import DFlashForSpeculation

    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DFlashForSpeculation, exist_ok=True)


def _is_the_command() -> bool:
    """Whether this process is `hf-dflash` or `python -m hf_dflash.cli` (at this time, the name of its script is still "-m")."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.basename(script) == "hf-dflash" or (script == "-m" and "hf_dflash.cli" in sys.orig_argv)


# The command line registers them before the commands that read drafters: torch takes seconds, and `--help` and the monitor
# need none.
if not _is_the_command():
    register_auto_classes()


def __getattr__(name: str):
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_LAZY_NAMES])


__all__ = [*_LAZY_NAMES]  # noqa: PLE0604
