# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""SIGKILL at random moments: nothing can be prepared for it, only what is on the disk counts."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import killable_run
import pytest
import torch
from tiny_training import assert_same

from hf_dflash.training.checkpoint import find_last_checkpoint, list_checkpoints


@pytest.fixture(scope="module")
def processes():
    # Forked from a server that has everything imported and has not started a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killable_run"])
    return context


@pytest.fixture(scope="module")
def undisturbed(processes, tmp_path_factory):
    """The state at the end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = processes.Process(target=killable_run.run, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == 0
    return torch.load(folder / "state.pt", weights_only=False)


def last_step(folder: Path) -> int:
    return int((find_last_checkpoint(folder) or "-0").rpartition("-")[2])


def kill_and_resume(processes, undisturbed, folder: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    steps_between = undisturbed["step"] / kills
    killed = 0
    for _ in range(kills):
        began = processes.Event()
        # Counted in steps, not seconds, of which a busy machine takes now more, now fewer.
        step = last_step(folder) + int(draw.uniform(0, steps_between))
        process = processes.Process(target=killable_run.run, args=(str(folder), began))
        process.start()
        assert began.wait(120)
        while last_step(folder) < step and process.is_alive():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed > 1
    process = processes.Process(target=killable_run.run, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert_same(torch.load(folder / "state.pt", weights_only=False), undisturbed)
    # What the kills left half-written is gone.
    assert len(list_checkpoints(folder)) == 2


def test_a_run_that_is_killed_again_and_again_ends_bit_equal(processes, undisturbed, tmp_path):
    kill_and_resume(processes, undisturbed, tmp_path, kills=4, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_twenty_times_ends_bit_equal(processes, undisturbed, tmp_path):
    kill_and_resume(processes, undisturbed, tmp_path, kills=20, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.distributed
def test_two_processes_of_which_one_is_killed_go_on_bit_equal(tmp_path):
    worker = Path(__file__).parents[1] / "distributed" / "worker.py"
    draw = random.Random(2)

    def start(folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [
            subprocess.Popen(
                [sys.executable, str(worker), "killable", str(folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]

    def finish(folder):
        assert [process.wait(240) for process in start(folder)] == [0, 0]
        return torch.load(folder / "state.pt", weights_only=False)

    undisturbed = finish(tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    for _ in range(4):
        step = find_last_checkpoint(folder)
        ranks = start(folder)
        # From the first new checkpoint on, any moment may be the last.
        while find_last_checkpoint(folder) == step and all(rank.poll() is None for rank in ranks):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        draw.choice(ranks).kill()
        assert all(rank.wait(120) != 0 for rank in ranks)
    assert_same(finish(folder), undisturbed)
