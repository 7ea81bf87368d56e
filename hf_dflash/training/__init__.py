# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The training run: arguments, placement, blocks of a micro-batch, the trainer and its callbacks."""
