# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Train the drafter of SmolLM2-135M-Instruct with the settings of smollm2.yaml, on the completions that are shipped.

    python recipes/smollm2/build_smollm2.py SmolLM2-135M-Instruct
    accelerate launch --num_processes 1 recipes/train_smollm2.py --target SmolLM2-135M-Instruct

Any option of `hf-dflash train --help` can be given and beats the file. Every 40th of the shipped completions is held out and
evaluated.
"""

import os
import sys
from pathlib import Path

import torch

from hf_dflash.atomic_files import replacing
from hf_dflash.cli import explain_mistakes
from hf_dflash.data.sources import open_jsonl
from hf_dflash.training.run import parse_job, run_job


RECIPES = os.path.dirname(os.path.abspath(__file__))
COMPLETIONS = os.path.join(RECIPES, "smollm2", "completions.jsonl.gz")
HELD_OUT_EVERY = 40


def hold_out(path: str, output_dir: str) -> tuple[str, str]:
    """Splits completions; the first row and every 40th from there are held out.

    Returns:
        `(train, heldout)`: two JSONL files in `output_dir`.
    """
    os.makedirs(output_dir, exist_ok=True)
    train, heldout = (Path(output_dir, f"completions_{name}.jsonl") for name in ("train", "heldout"))
    # Each process of a launch writes them, and the first one reads.
    with open_jsonl(path) as source, replacing(train, "wb") as train_file, replacing(heldout, "wb") as heldout_file:
        for number, line in enumerate(source):
            (train_file if number % HELD_OUT_EVERY else heldout_file).write(line)
    return str(train), str(heldout)


def main(argv: list[str]) -> None:
    given = {argument.split("=")[0] for argument in argv if argument.startswith("--")}
    flags = ["--config", os.path.join(RECIPES, "smollm2.yaml")]
    for name, default in (("--output_dir", "smollm2-dflash"), ("--completions", COMPLETIONS)):
        flags += [name, default] if name not in given else []
    if not torch.cuda.is_available():
        flags += ["--use_cpu", "true", "--bf16", "false"]
    job, args = parse_job([*flags, *argv], prog="train_smollm2.py")
    if job.completions == [COMPLETIONS] and not job.dry_run:
        train, heldout = hold_out(COMPLETIONS, args.output_dir)
        job.completions, job.eval_completions = [train], [heldout]
    run_job(job, args)


if __name__ == "__main__":
    sys.exit(explain_mistakes("train_smollm2.py", main, sys.argv[1:]))
