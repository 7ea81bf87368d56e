# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The whole job in minutes on a laptop: tokenize, train, save, reload, decode losslessly.

    accelerate launch --num_processes 1 recipes/quickstart.py
    accelerate launch --num_processes 1 recipes/quickstart.py --target FOLDER_OR_HUB_ID --completions FILE.jsonl

Without arguments: the pocket target of recipes/pocket and the completions that it wrote. Every option of
`hf-dflash train --help` can be given. A second start goes on where the first one stopped, and reuses what is done.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

from hf_dflash.atomic_files import replacing, write_json
from hf_dflash.cli import explain_mistakes
from hf_dflash.data.sources import open_jsonl
from hf_dflash.evaluation.benchmark import measure_acceptance
from hf_dflash.training.curves import plot_curves
from hf_dflash.training.run import make_trainer, parse_job, train_and_save


RECIPES = os.path.dirname(os.path.abspath(__file__))
POCKET = os.path.join(RECIPES, "pocket")
OUTPUT_DIR = "quickstart_output"
NUM_PROMPTS = 16
NUM_PROMPTS_BEFORE = 4  # an untrained drafter is right about nothing: a few prompts say so
MAX_NEW_TOKENS = 128
MAX_EVAL_ROWS = 60


def hold_out(path: str, output_dir: str) -> tuple[str, str]:
    """Splits completions: every twentieth row (200 at most) is held out.

    Returns:
        `(train, heldout)`: two JSONL files in `output_dir`.
    """
    os.makedirs(output_dir, exist_ok=True)
    with open_jsonl(path) as file:
        lines = [line for line in file if line.strip()]
    heldout = set(range(0, len(lines), 20)[:200])
    paths = []
    for name, chosen in (("train", False), ("heldout", True)):
        paths.append(os.path.join(output_dir, f"completions_{name}.jsonl"))
        with replacing(Path(paths[-1]), "wb") as file:
            file.writelines(line for i, line in enumerate(lines) if (i in heldout) == chosen)
    return paths[0], paths[1]


def read_prompts(path: str, limit: int) -> list[dict]:
    """The conversations of held-out completions up to their last user turn, spread over the file."""
    with open_jsonl(path) as file:
        rows = [json.loads(line) for line in file if line.strip()]
    prompts = []
    for row in rows[:: max(1, len(rows) // limit)][:limit]:
        messages = list(row["messages"])
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        prompts.append({"id": row.get("id", len(prompts)), "messages": messages})
    return prompts


def print_table(results: dict) -> None:
    before, after = results["before"], results["after"]
    lines = [
        ("held-out loss", "loss", "{:.3f}"),
        ("acceptance length, simulated", "simulated_acceptance_length", "{:.2f}"),
        ("acceptance length, decoded", "acceptance_length", "{:.2f}"),
        ("target passes per token", "target_passes_per_token", "{:.3f}"),
        ("wall-clock speed-up", "speedup", "{:.2f}x"),
        ("identical to greedy", "identical", "{}"),
    ]
    print(f"\n{'':32}{'before':>12}{'after':>12}")
    for label, name, form in lines:
        print(f"{label:32}{form.format(before[name]):>12}{form.format(after[name]):>12}")
    print(f"\n4-grams that repeat within a decoded completion: {after['repeated_4gram_share']:.1%}")
    print(f"trained on {results['context_tokens']:,} tokens in {results['training_seconds']:.0f} s")
    print(f"drafter: {results['drafter']}   curves: {results['curves']}")


def main(argv: list[str]) -> None:
    given = {argument.split("=")[0] for argument in argv if argument.startswith("--")}
    flags = ["--config", os.path.join(RECIPES, "quickstart.yaml")]
    if "--output_dir" not in given:
        flags += ["--output_dir", OUTPUT_DIR]
    if "--target" not in given:
        # Of eight layers the seventh is the last one that can be read, and says most of what comes next.
        flags += ["--target", POCKET, "--target_dtype", "float32", "--target_layer_ids", "2", "4", "6"]
    if "--completions" not in given:
        flags += ["--completions", os.path.join(POCKET, "completions_train.jsonl.gz")]
        flags += ["--eval_completions", os.path.join(POCKET, "completions_heldout.jsonl.gz")]
    if not torch.cuda.is_available():
        flags += ["--use_cpu", "true"]
        # `accelerate launch` leaves a process one thread.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    job, args = parse_job([*flags, *argv], prog="quickstart.py")
    if job.eval_completions is None:
        train, heldout = hold_out(job.completions[0], args.output_dir)
        job.completions, job.eval_completions = [train, *job.completions[1:]], [heldout]

    # What is done is done: the same options give the same drafter.
    asked = {"job": vars(job), "args": {k: v for k, v in args.to_dict().items() if not k.endswith("_dir")}}
    fingerprint = json.loads(json.dumps(asked, default=str, sort_keys=True))
    results_path = os.path.join(args.output_dir, "results.json")
    if os.path.exists(results_path):
        with open(results_path, encoding="utf-8") as file:
            results = json.load(file)
        if results["asked"] == fingerprint:
            print(f"Already done, see {results_path} (delete it to do it again).")
            return print_table(results)

    # 1. Tokenize, make the drafter, load the target.
    trainer = make_trainer(job, args)
    # Every position of a held-out reply becomes a block: a part of them says enough.
    rows = range(0, len(trainer.eval_dataset), -(-len(trainer.eval_dataset) // MAX_EVAL_ROWS))
    trainer.eval_dataset = trainer.eval_dataset.select(rows)
    target, drafter = trainer.target.model, trainer.model
    tokenizer = AutoTokenizer.from_pretrained(job.target)
    prompts = read_prompts(job.eval_completions[0], NUM_PROMPTS)

    def measure(drafter, metrics, prompts):
        report = measure_acceptance(
            target,
            drafter.eval(),
            prompts,
            tokenizer,
            max_new_tokens=MAX_NEW_TOKENS,
            enable_thinking=job.enable_thinking,
        )
        summary = report.summary()
        return {
            "loss": metrics["eval_loss"],
            "simulated_acceptance_length": metrics["eval_acceptance_length"],
            "acceptance_length": summary["acceptance_length_micro"],
            "target_passes_per_token": summary["target_passes_per_token"],
            "speedup": summary["speedup"],
            "identical": f"{summary['num_identical']}/{summary['num_compared']}",
            "repeated_4gram_share": summary["repeated_4gram_share"],
        }

    # 2. The untrained drafter, 3. training, 4. the trained one as a user loads it.
    before = measure(drafter, trainer.evaluate(), prompts[:NUM_PROMPTS_BEFORE])
    metrics = train_and_save(trainer)
    reloaded = AutoModel.from_pretrained(args.output_dir, dtype=torch.float32).to(target.device)
    after = measure(reloaded, metrics, prompts)

    if not trainer.is_world_process_zero():
        return
    curves = os.path.join(args.output_dir, "quickstart.png")
    plot_curves(trainer.state.log_history, curves)
    history = trainer.state.log_history
    results = {
        "asked": fingerprint,
        "before": before,
        "after": after,
        "context_tokens": sum(entry.get("context_tokens", 0) for entry in history),
        "training_seconds": next((e["train_runtime"] for e in reversed(history) if "train_runtime" in e), 0.0),
        "drafter": args.output_dir,
        "curves": curves,
    }
    write_json(Path(results_path), results)
    print_table(results)


if __name__ == "__main__":
    sys.exit(explain_mistakes("quickstart.py", main, sys.argv[1:]))
