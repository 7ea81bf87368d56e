# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Lossless speculative decoding with a trained drafter, and the roll-back of the target's caches."""
