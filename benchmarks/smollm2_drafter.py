# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Train a drafter for SmolLM2-135M-Instruct on one GPU from completions that it wrote itself, and say how fast and how good.

    python recipes/smollm2/build_smollm2.py SmolLM2-135M-Instruct
    python benchmarks/generate_smollm2.py SmolLM2-135M-Instruct prompts.jsonl.gz completions/
    python benchmarks/smollm2_drafter.py --target SmolLM2-135M-Instruct --completions completions/ --output drafter/ --seconds 180

Needs no `datasets` package: rows are tokenized into memory. Every 40th row is held out.
"""

import argparse
import gzip
import json
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, TrainerCallback

from hf_dflash import DFlashForSpeculation, DFlashTrainer, DFlashTrainingArguments, FrozenTarget, create_drafter_config
from hf_dflash.data.chat import render_conversation


class RowsInMemory(list):
    """As much of `datasets.Dataset` as the trainer asks for."""

    column_names = ("input_ids", "loss_mask", "length", "num_supervised", "row_id")

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


class StopAfter(TrainerCallback):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_train_begin(self, args, state, control, **kwargs):
        self.end = time.perf_counter() + self.seconds

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or time.perf_counter() > self.end


def read_rows(folder: Path):
    files = sorted(folder.glob("**/*.jsonl*")) if folder.is_dir() else [folder]
    for path in files:
        if "failed" in path.name:
            continue
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())


def tokenize(rows: list[dict], tokenizer, max_length: int) -> tuple[RowsInMemory, RowsInMemory, list[dict]]:
    train, heldout, heldout_prompts = RowsInMemory(), RowsInMemory(), []
    for number, row in enumerate(tqdm(rows, desc="tokenizing", mininterval=5)):
        messages = list(row["messages"])
        if row.get("completion_token_ids"):
            messages[-1] = {**messages[-1], "completion_token_ids": row["completion_token_ids"]}
        try:
            sample = render_conversation(tokenizer, messages, max_length=max_length)[-1]
        except ValueError:
            continue
        supervised = int(sum(sample.loss_mask))
        if supervised < 2:
            continue
        rows_of_split = heldout if number % 40 == 0 else train
        rows_of_split.append(
            {
                "input_ids": list(sample.input_ids),
                "loss_mask": list(sample.loss_mask),
                "length": len(sample.input_ids),
                "num_supervised": supervised,
                "row_id": number,
            }
        )
        if number % 40 == 0:
            heldout_prompts.append({"id": row["id"], "messages": messages[:-1]})
    return train, heldout, heldout_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--completions", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--max_steps", type=int, default=1500, help="of the schedule; --seconds may end it earlier")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block_size", type=int, default=8)
    parser.add_argument("--num_anchors", type=int, default=32)
    parser.add_argument("--token_budget", type=int, default=16384)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--eval_rows", type=int, default=200)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--attention_backend", default="auto")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()

    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    started = time.perf_counter()
    train, heldout, prompts = tokenize(list(read_rows(arguments.completions)), tokenizer, arguments.max_length)
    heldout[:] = list(heldout)[: arguments.eval_rows]
    seconds_tokenizing = time.perf_counter() - started
    arguments.output.mkdir(parents=True, exist_ok=True)
    with open(arguments.output / "heldout_prompts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts[:64])

    config = create_drafter_config(
        AutoConfig.from_pretrained(arguments.target),
        num_hidden_layers=arguments.layers,
        block_size=arguments.block_size,
        # <reponame>, which no chat ever contains.
        mask_token_id=tokenizer.convert_tokens_to_ids("<reponame>"),
    )
    torch.manual_seed(0)
    drafter = DFlashForSpeculation(config)
    target = FrozenTarget(
        arguments.target,
        config.target_layer_ids,
        device="cuda:0" if cuda else "cpu",
        dtype=torch.bfloat16 if cuda else torch.float32,
    )
    args = DFlashTrainingArguments(
        str(arguments.output),
        token_budget=arguments.token_budget,
        eval_token_budget=8192,
        num_anchors=arguments.num_anchors,
        anchor_ratio=0,
        attention_backend=arguments.attention_backend,
        learning_rate=arguments.learning_rate,
        max_steps=arguments.max_steps,
        num_train_epochs=1000,
        logging_steps=50,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_num_workers=2 if cuda else 0,
        disable_tqdm=True,
        seed=0,
    )
    trainer = DFlashTrainer(
        drafter, target, args, train_dataset=train, eval_dataset=heldout, callbacks=[StopAfter(arguments.seconds)]
    )
    before = trainer.evaluate()
    started = time.perf_counter()
    trainer.train()
    seconds_training = time.perf_counter() - started
    after = trainer.evaluate()
    trainer.save_model(str(arguments.output))
    logs = [entry for entry in trainer.state.log_history if "context_tokens" in entry]
    tokens = sum(entry["context_tokens"] for entry in logs)
    result = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": {
            k: Path(v).name if isinstance(v, Path) else str(v) for k, v in vars(arguments).items() if k != "target"
        },
        "target": Path(arguments.target).name,
        "rows": {"train": len(train), "heldout": len(heldout)},
        "reply_tokens_a_row": sum(row["num_supervised"] for row in train) / len(train),
        "seconds_tokenizing": seconds_tokenizing,
        "seconds_training": seconds_training,
        "steps": trainer.state.global_step,
        "context_tokens": tokens,
        "context_tokens_per_second": tokens / seconds_training,
        "blocks": sum(entry["blocks"] for entry in logs),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "before": before,
        "after": after,
        "curve": [
            {k: entry[k] for k in ("step", "loss", "accuracy", "anchor_acceptance_length", "learning_rate")}
            for entry in logs
        ],
    }
    (arguments.output / "smollm2_drafter.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "curve"}, indent=1))


if __name__ == "__main__":
    main()
