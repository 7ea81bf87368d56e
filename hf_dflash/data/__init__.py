# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""From prompts to batches: completions, chat templates and loss masks, tokenization, checks, batching."""
