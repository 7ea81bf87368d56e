# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Where drafters and targets go, decided before anything loads (DESIGN 3.10)."""

import os

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
            all processes of the machine, n for each.
        targets_per_process (`int`, *optional*, defaults to 1): n.

    Raises:
        `ValueError`: if there are too few devices, showing the wanted map.
    """
    if targets_per_process < 1:
        raise ValueError(f"`targets_per_process` is {targets_per_process}: a drafter needs at least one target.")
    if device_count == 0:
        return ["cpu"] * targets_per_process
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
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device.startswith("cuda:")]
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
