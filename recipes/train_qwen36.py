# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Train the drafter of Qwen3.6-27B with the reference hyper-parameters of qwen36.yaml.

    accelerate launch --num_processes 2 recipes/train_qwen36.py --completions completions/*.jsonl

Any option of `hf-dflash train --help` can be given and beats the file. A try-out on any machine, CPU included, with 100
samples, one epoch and a tiny random model of the same architecture:

    accelerate launch --num_processes 1 recipes/train_qwen36.py --test
"""

import gzip
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hf_dflash.atomic_files import replacing
from hf_dflash.cli import explain_mistakes
from hf_dflash.command_line import CommandParser
from hf_dflash.training.run import parse_job, run_job


RECIPES = os.path.dirname(os.path.abspath(__file__))


@dataclass
class RecipeArguments:
    """The recipe's own option."""

    test: bool = field(
        default=False,
        metadata={
            "help": "A try-out on any machine: 100 samples, one epoch, a tiny random model of the same architecture."
        },
    )


def test_flags(output_dir: str) -> list[str]:
    """Makes the inputs of `--test` below `output_dir`, and says which options differ from the reference job."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from hf_dflash.drafter.configuration_dflash import find_mask_token_id

    pocket = os.path.join(RECIPES, "pocket")
    target, completions = os.path.join(output_dir, "tiny_target"), os.path.join(output_dir, "completions.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(pocket)
    config = Qwen3_5TextConfig(
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    # Each process of a launch makes them, while another may be reading already: so each file is whole or not there.
    with tempfile.TemporaryDirectory(dir=output_dir) as fresh:
        for saved in (Qwen3_5ForCausalLM(config), tokenizer):
            saved.save_pretrained(fresh)
        os.makedirs(target, exist_ok=True)
        for name in os.listdir(fresh):
            os.replace(os.path.join(fresh, name), os.path.join(target, name))
    with gzip.open(os.path.join(pocket, "completions_train.jsonl.gz"), "rt", encoding="utf-8") as source:
        rows = [line for line, _ in zip(source, range(100), strict=False)]
    with replacing(Path(completions)) as file:
        file.writelines(rows)

    # Layers 1, 2, 3, 4, 5 of 8; a mask token of this vocabulary; sizes of a tiny drafter.
    flags = (
        f"--target {target} --completions {completions} --output_dir {output_dir} --num_train_epochs 1 --block_size 8"
    )
    flags += " --target_layer_ids 1 2 3 4 5 --intermediate_size 128 --num_attention_heads 4 --num_key_value_heads 2"
    flags += f" --head_dim 16 --mask_token_id {find_mask_token_id(tokenizer, len(tokenizer))} --token_budget 1024 --target_dtype float32 --logging_steps 1"
    # Minutes of compiling for seconds of training.
    flags += " --compile_layers off"
    if not torch.cuda.is_available():
        flags += " --use_cpu true --bf16 false"
    return flags.split()


def main(argv: list[str]) -> None:
    flags = ["--config", os.path.join(RECIPES, "qwen36.yaml")]
    # The inputs of a try-out are options of the job, so they are made before it is read.
    own = CommandParser(add_help=False, allow_abbrev=False)
    own.add_argument("--test", action="store_true")
    own.add_argument("--output_dir", default="qwen36-dflash-test")
    chosen, _ = own.parse_known_args(argv)
    if chosen.test and not {"-h", "--help"} & set(argv):
        os.makedirs(chosen.output_dir, exist_ok=True)
        flags += test_flags(chosen.output_dir)
    job, args, _ = parse_job([*flags, *argv], RecipeArguments, prog="train_qwen36.py")
    run_job(job, args)


if __name__ == "__main__":
    sys.exit(explain_mistakes("train_qwen36.py", main, sys.argv[1:]))
