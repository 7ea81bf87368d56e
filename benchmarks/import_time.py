# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
What `import hf_dflash` costs beyond importing transformers' own `PreTrainedModel` and `AutoModel`.

A fresh process times one import after the other; the best of several processes counts for each.

    python benchmarks/import_time.py | tee benchmarks/results/import_time.txt
"""

import argparse
import subprocess
import sys

import torch
import transformers


BASELINE = "from transformers import AutoModel, PreTrainedModel"
PACKAGE = "import hf_dflash"
CLAIM_S = 1.0

TIMED = f"""
import time
start = time.perf_counter()
{BASELINE}
middle = time.perf_counter()
{PACKAGE}
print(middle - start, time.perf_counter() - middle)
"""


def measure() -> tuple[float, float]:
    """Seconds of the baseline, and seconds that the package adds."""
    result = subprocess.run([sys.executable, "-c", TIMED], check=True, capture_output=True, text=True)
    baseline, added = result.stdout.split()
    return float(baseline), float(added)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions

    measure()  # fills the file cache and writes byte code, for both sides
    baseline, added = (min(times) for times in zip(*(measure() for _ in range(repetitions)), strict=True))

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, best of {repetitions}")
    print(f"{BASELINE:<56}{baseline:6.2f} s")
    print(f"{PACKAGE + ', after it':<56}{added:6.2f} s  (claim: below {CLAIM_S:.0f} s)")
    print(f"{'ratio':<56}{added / baseline:6.2f}")
    return 0 if added < CLAIM_S else 1


if __name__ == "__main__":
    sys.exit(main())
