# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Training runs with random weights and random documents, for benchmarks of whole optimizer steps: the real trainer, in the
shapes of the reference job (documents of 2,048 tokens, four to a micro-batch, seven eighths of them supervised)."""

import shlex
import sys
import tempfile
from dataclasses import dataclass

import torch
from datasets import Dataset
from measuring import Report
from target_forward import QWEN36, TINY, make_model
from transformers import TrainerCallback

from hf_dflash import DFlashForSpeculation, DFlashTrainer, DFlashTrainingArguments, FrozenTarget
from hf_dflash.drafter.configuration_dflash import create_drafter_config


@dataclass
class Shapes:
    """
    Args:
        name (`str`): of these shapes.
        target (`dict`), drafter (`dict`): fields of their configurations.
        num_target_layers (`int`): of random weights; layers 1 to n - 3 are read, five of them.
        document_length (`int`), token_budget (`int`): in tokens.
        dtype (`torch.dtype`): of the target.
    """

    name: str
    target: dict
    drafter: dict
    num_target_layers: int
    document_length: int
    token_budget: int
    dtype: torch.dtype


def shapes_of(name: str, num_target_layers: int | None = None, token_budget: int | None = None) -> Shapes:
    """`"qwen36"`: the reference job; `"small"`: as wide as a 1B model, for the memory of many steps; `"tiny"`: for a CPU."""
    if name == "tiny":
        drafter = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 5}
        return Shapes(name, TINY, drafter, num_target_layers or 8, 24, token_budget or 96, torch.float32)
    drafter = {"num_hidden_layers": 5, "block_size": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    drafter |= {"head_dim": 128, "mask_token_id": 5}
    target, length, layers = QWEN36, 2048, 32
    if name == "small":
        target = {**QWEN36, "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072}
        target |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
        target |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        drafter |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
        length, layers = 512, 8
    return Shapes(
        name, target, drafter, num_target_layers or layers, length, token_budget or 4 * length, torch.bfloat16
    )


def make_documents(shapes: Shapes, num_micro_batches: int) -> Dataset:
    """Random rows; no two of one length, so that micro-batches hold the same rows in every epoch."""
    per_batch = shapes.token_budget // shapes.document_length
    generator = torch.Generator().manual_seed(0)
    rows = []
    for row_id in range(num_micro_batches * per_batch):
        length = shapes.document_length - row_id % (shapes.document_length * 3 // 4)
        tokens = torch.randint(6, shapes.target["vocab_size"], (length,), generator=generator).tolist()
        loss_mask = [0] * (length // 8) + [1] * (length - length // 8)
        rows.append({"input_ids": tokens, "loss_mask": loss_mask, "row_id": row_id, "length": length})
    return Dataset.from_list(rows)


def make_target(shapes: Shapes, device: str, layer_ids: list[int] | None = None) -> FrozenTarget:
    model = make_model(shapes.target, shapes.num_target_layers, device, shapes.dtype)
    return FrozenTarget(model, layer_ids or make_drafter_config(shapes, model.config).target_layer_ids)


def make_drafter_config(shapes: Shapes, target_config):
    return create_drafter_config(target_config, **shapes.drafter)


def make_trainer(targets: list[FrozenTarget], shapes: Shapes, dataset: Dataset, output_dir=None, **options):
    """The trainer of a fresh drafter, the same in every call; on the CPU if the targets are there."""
    use_cpu = targets[0].device.type == "cpu"
    torch.manual_seed(0)
    with torch.device("cpu" if use_cpu else torch.cuda.current_device()):
        drafter = DFlashForSpeculation(make_drafter_config(shapes, targets[0].model.config))
    arguments = DFlashTrainingArguments(
        output_dir or tempfile.mkdtemp(),
        **{
            "token_budget": shapes.token_budget,
            "learning_rate": 1e-4,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": use_cpu,
            "bf16": not use_cpu,
            **options,
        },
    )
    return DFlashTrainer(drafter, targets, arguments, train_dataset=dataset)


class Logs(TrainerCallback):
    """Keeps the log lines of training."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.lines.append(dict(logs))


def signature(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of all bits, on the tensor's device; equal only if (as good as) every bit is."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype.is_floating_point:
        tensor = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return tensor.sum(dtype=torch.long)


def digest(tensors) -> int:
    """Of many tensors, on the host."""
    return sum(int(signature(tensor)) for tensor in tensors)


def start_report(script: str, argv: list[str] | None, arguments) -> tuple[Report, Shapes, str, str]:
    """
    The report of a benchmark of one target and one drafter: each on a GPU of its own where there are two, in the shapes of the
    reference job; tiny on a CPU.

    Args:
        script (`str`): file name of the benchmark.
        argv (`list[str]`, *optional*): its arguments, by default those of the process.
        arguments: the parsed ones, with `tiny`, `layers` and `output`.

    Returns:
        `(report, shapes, drafter_device, target_device)`.
    """
    num_devices = 0 if arguments.tiny else torch.cuda.device_count()
    drafter_device = "cpu" if num_devices == 0 else "cuda:0"
    target_device = "cuda:1" if num_devices > 1 else drafter_device
    shapes = shapes_of("tiny" if num_devices == 0 else "qwen36", arguments.layers)
    report = Report(
        arguments.output,
        torch.device(drafter_device),
        target_layers=shapes.num_target_layers,
        token_budget=shapes.token_budget,
        devices=[drafter_device, target_device],
        command=shlex.join(["python", f"benchmarks/{script}", *(sys.argv[1:] if argv is None else argv)]),
    )
    return report, shapes, drafter_device, target_device
