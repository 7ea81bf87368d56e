# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where drafters and targets go, decided before anything loads.

hf-dflash plan --config recipes/qwen36.yaml --num_processes 2 --num_devices 4
"""

import os
import re
from dataclasses import dataclass, field

import torch


def place_targets(
    local_rank: int,
    local_world_size: int,
    device_count: int,
    *,
    target_devices: str | None = None,
    targets_per_process: int = 1,
) -> list[str]:
    """The devices of one process's targets; its drafter trains on `cuda:{local_rank}`.

    By default target i of rank r sits on `cuda:{local_world_size + r * n + i}`, n targets a process, and on the drafter's
    own device where there is only one.

    Args:
        local_rank (`int`), local_world_size (`int`): of this process, on this machine.
        device_count (`int`): visible CUDA devices; 0 means the CPU.
        target_devices (`str`, *optional*): `"same"` for the drafter's device, or a comma-separated list of devices for
            all processes of the machine, n for each. Devices joined by `+` share one target: `"cuda:2+cuda:3"`.
        targets_per_process (`int`, *optional*, defaults to 1): n.

    Raises:
        `ValueError`: if there are too few devices, showing the wanted map.
    """
    if targets_per_process < 1:
        raise ValueError(f"`targets_per_process` is {targets_per_process}: a drafter needs at least one target.")
    if device_count == 0:
        return ["cpu"] * targets_per_process
    if local_world_size > device_count:
        raise ValueError(
            f"{local_world_size} processes on {device_count} CUDA device(s): each trains a drafter on its own device. Start "
            f"{device_count} process(es) at most."
        )
    if target_devices == "same" or (target_devices is None and device_count == 1 and local_world_size == 1):
        return [f"cuda:{local_rank}"] * targets_per_process
    wanted = local_world_size * targets_per_process
    if target_devices is not None:
        devices = [device.strip() for device in target_devices.split(",")]
        if len(devices) != wanted:
            raise ValueError(
                f"`target_devices` names {len(devices)} devices, {local_world_size} process(es) with {targets_per_process} "
                f"target(s) each need {wanted}."
            )
    else:
        devices = [f"cuda:{local_world_size + i}" for i in range(wanted)]
    parts = [part for device in devices for part in device.split("+")]
    unknown = [part for part in parts if not re.fullmatch(r"cuda:\d+|cpu", part)]
    if unknown:
        raise ValueError(
            f"`target_devices` names {', '.join(unknown)}: write cuda:2, or cuda:2+cuda:3 for one target."
        )
    numbers = [int(part.removeprefix("cuda:")) for part in parts if part.startswith("cuda:")]
    if max(numbers, default=0) >= device_count:
        drafters = ", ".join(f"rank {r}: drafter cuda:{r}" for r in range(local_world_size))
        raise ValueError(
            f"{device_count} CUDA device(s) are visible, {local_world_size + wanted} are wanted: {drafters}; targets "
            f"{', '.join(devices)}. Start fewer processes, or put both on one device with `--target_devices same`."
        )
    return devices[local_rank * targets_per_process : (local_rank + 1) * targets_per_process]


def check_launch(world_size: int) -> None:
    """Refuses to train alone where several processes were asked for.

    `accelerate launch --cpu --num_processes 2` starts one process and says nothing (accelerate 1.15).

    Args:
        world_size (`int`): processes that this one knows of, itself included.

    Raises:
        `ValueError`: naming both numbers, and the launcher that works.
    """
    wanted = int(os.environ.get("WORLD_SIZE", 1))
    # What accelerate's launcher sets for a single process, and the rendezvous that only several processes need.
    launched_alone = "ACCELERATE_MIXED_PRECISION" in os.environ and "RANK" not in os.environ
    if world_size == 1 and (wanted > 1 or (launched_alone and "MASTER_PORT" in os.environ)):
        asked = f"{wanted} processes were" if wanted > 1 else "Several processes were"
        raise ValueError(
            f"{asked} asked for and this one is alone: each would train on everything. Start them with `torchrun "
            "--nproc_per_node N`; `accelerate launch` starts several processes on GPUs only."
        )


def place_targets_of_this_process(target_devices: str | None, targets_per_process: int, use_cpu: bool) -> list[str]:
    """[`place_targets`] for the process that calls it, as `torchrun` and `accelerate launch` describe it."""
    return place_targets(
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        0 if use_cpu else torch.cuda.device_count(),
        target_devices=target_devices,
        targets_per_process=targets_per_process,
    )


def describe_plan(job, args, num_processes: int, num_devices: int, lengths=None, supervised=None) -> str:
    """The map, the memory that each device needs, and who will wait for whom, as text.

    Args:
        job ([`JobArguments`]), args ([`DFlashTrainingArguments`]): the job.
        num_processes (`int`), num_devices (`int`): on each machine.
        lengths (`Sequence[int]`, *optional*), supervised (`Sequence[int]`, *optional*): tokens of the documents; by default
            half of `max_length` each, seven eighths of them supervised, as in the reference job.

    Raises:
        `ValueError`: if there are too few devices, showing the wanted map.
    """
    from transformers import AutoConfig

    from .balance import PAPER_ANCHORS
    from .estimate import GIB, count_blocks, drafter_flops, drafter_memory, measure_sizes, target_flops, target_memory
    from .run import make_drafter_config

    target_config = AutoConfig.from_pretrained(job.target)
    dtype = target_config.get_text_config(decoder=True).dtype if job.target_dtype == "auto" else job.target_dtype
    dtype = (getattr(torch, dtype) if isinstance(dtype, str) else dtype) or torch.float32
    sizes = measure_sizes(target_config, make_drafter_config(job), dtype)
    is_assumed = lengths is None
    if is_assumed:
        lengths, supervised = [job.max_length // 2], [job.max_length * 7 // 16]
    num_anchors = PAPER_ANCHORS if args.num_anchors == "auto" else args.num_anchors
    num_blocks = count_blocks(lengths, supervised, args.token_budget, num_anchors, args.anchor_ratio)

    compute_bytes = 2 if args.bf16 or args.fp16 else 4
    targets = target_memory(sizes, args.token_budget)
    drafter = drafter_memory(
        sizes,
        args.token_budget,
        num_blocks,
        compute_bytes=compute_bytes,
        is_distributed=num_processes > 1,
        checkpointing=args.gradient_checkpointing,
        head_fp8=args.head_fp8,
    )
    memory: dict[str, dict[str, float]] = {}
    lines = ["Map"]
    for rank in range(num_processes):
        own = f"cuda:{rank}" if num_devices else "cpu"
        places = place_targets(
            rank,
            num_processes,
            num_devices,
            target_devices=args.target_devices,
            targets_per_process=args.targets_per_process,
        )
        lines.append(f"  rank {rank}: drafter {own}, target {', '.join(places)}")
        _add(memory, own, drafter, "drafter", 1)
        if args.pipeline == "on" or (args.pipeline == "auto" and own not in places):
            num_slots = args.pipeline_depth * len(places) + 1
            of_slot = args.token_budget * sizes.num_features * sizes.hidden_size * compute_bytes
            _add(memory, own, {"features in flight": num_slots * of_slot}, "drafter", 1)
        for place in places:
            devices = place.split("+")
            for device in devices:
                _add(memory, device, targets, "target", len(devices))

    lines += ["", "Memory, GiB (estimated, without what the allocator wastes)"]
    for device, parts in sorted(memory.items()):
        lines.append(f"  {device}: {sum(parts.values()) / GIB:.1f}")
        lines += [f"    {value / GIB:6.1f}  {name}" for name, value in parts.items()]

    of_target, of_drafter = target_flops(sizes, args.token_budget), drafter_flops(sizes, args.token_budget, num_blocks)
    ratio = of_target / args.targets_per_process / of_drafter
    waiting = (
        "drafters wait for targets" if ratio > 1.1 else "targets wait for drafters" if ratio < 0.9 else "balanced"
    )
    documents = "documents assumed half of max_length" if is_assumed else f"{len(lengths):,} documents"
    lines += [
        "",
        f"Balance, a micro-batch of {args.token_budget} tokens ({documents})",
        f"  target   {of_target / 1e12:8.1f} TFLOP, {sizes.target_parameters / 1e9:.2f}B parameters, "
        f"{args.targets_per_process} a drafter",
        f"  drafter  {of_drafter / 1e12:8.1f} TFLOP, {sizes.drafter_parameters / 1e9:.2f}B parameters, "
        f"{num_blocks:.0f} blocks of {sizes.block_size}",
        f"  target : drafter = {ratio:.2f} at equal speed: {waiting}"
        + ("" if waiting == "balanced" else "; `targets_per_process`, `anchor_ratio` or `--num_anchors auto` turn it"),
    ]
    return "\n".join(lines)


def _add(memory: dict, device: str, parts: dict[str, float], owner: str, shares: int) -> None:
    on_device = memory.setdefault(device, {})
    for name, value in parts.items():
        key = f"{owner}: {name}"
        on_device[key] = on_device.get(key, 0.0) + value / shares


@dataclass
class MachineArguments:
    """
    The machine that is planned for.

    Args:
        num_processes (`int`, *optional*, defaults to 1): drafters on the machine.
        num_devices (`int`, *optional*): GPUs of the machine; those of this one by default.
    """

    num_processes: int = field(default=1, metadata={"help": "Drafters on the machine."})
    num_devices: int | None = field(
        default=None, metadata={"help": "GPUs of the machine; those of this one by default."}
    )


def main(argv: list[str]) -> int:
    """`hf-dflash plan`: takes every option of `hf-dflash train`, loads nothing."""
    from .run import parse_job, read_document_sizes

    # No GPU of this machine is needed: precision is of the machine that will train.
    job, args, machine = parse_job(
        [*argv, "--use_cpu", "true"], MachineArguments, prog="hf-dflash plan", needs_completions=False
    )
    num_devices = torch.cuda.device_count() if machine.num_devices is None else machine.num_devices
    print(describe_plan(job, args, machine.num_processes, num_devices, *read_document_sizes(job, args)))
    return 0
