# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
Completions -> a loss-masked dataset, in one command. The same as `hf-dflash tokenize`; here is what to run it with.

The reference job: 902K completions with thinking in 1,805 objects, on a machine with 128 cores. Stop it and start it again
as you like; a second start goes on where the first one was.

    python recipes/tokenize_completions.py s3://BUCKET/completions/ \\
        --target Qwen/Qwen3.6-27B --enable-thinking --max-length 4096 \\
        --output dataset --num-workers 128 --upload-to s3://BUCKET/dataset
    hf-dflash check dataset

The completions that ship with the pocket target:

    python recipes/tokenize_completions.py recipes/pocket/completions_train.jsonl.gz --target recipes/pocket --block-size 8 \\
        --output pocket_dataset
"""

import sys

from hf_dflash.cli import explain_mistakes
from hf_dflash.data.tokenize_command import main


if __name__ == "__main__":
    sys.exit(explain_mistakes("tokenize_completions.py", main, sys.argv[1:]))
