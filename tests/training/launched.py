# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a launcher starts in test_plan.py and test_accelerate_configs.py."""

from hf_dflash import DFlashTrainingArguments
from hf_dflash.training.plan import check_launch


check_launch(DFlashTrainingArguments("out", use_cpu=True).world_size)
print("went on")
