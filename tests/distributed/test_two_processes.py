# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Two processes, by torchrun, over gloo, on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_training import (
    GradientRecorder,
    comparable,
    make_dataset,
    make_trainer,
    relative_difference,
    training_state,
)
from worker import EQUAL_STEPS, RESUME, silent_dataset

from hf_dflash.training.checkpoint import find_last_checkpoint
from hf_dflash.training.host_group import HostGroup
from hf_dflash.training.run_lock import only_run_in


pytestmark = [pytest.mark.distributed, pytest.mark.compat]

WORKER = Path(__file__).with_name("worker.py")
FIRST_STEP_FP32 = 2e-6
WEIGHTS_FP64 = 1e-10


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def launch(scenario: str, folder: Path) -> list[dict]:
    """What each rank saved."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(WORKER)]
    done = subprocess.run(
        [*command, scenario, str(folder)], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("exactness", tmp_path_factory.mktemp("exactness"))


def test_the_first_gradient_is_that_of_one_process_by_any_grouping(ranks, tmp_path):
    recorder = GradientRecorder()
    one = make_trainer(tmp_path, token_budget=100_000, max_steps=1, max_grad_norm=0.0, callbacks=[recorder])
    one.train()
    for rank in ranks:
        assert relative_difference(rank["first_gradients"], recorder.first) <= FIRST_STEP_FP32
        log, reference = rank["first_log"], one.state.log_history[0]
        for name in ("loss", "grad_norm"):
            assert log[name] == pytest.approx(reference[name], rel=1e-6)
        for name in ("accuracy", "anchor_acceptance_length", "blocks", "context_tokens"):
            assert log[name] == reference[name]


def datasets():
    return {
        "steps": make_dataset(),
        # Two micro-batches in all: from the second step on there is nothing left for a rank.
        "few_rows": make_dataset(3),
        "silent_rows": silent_dataset(),
    }


@pytest.mark.parametrize("name", ["steps", "few_rows", "silent_rows"])
def test_weights_logs_and_metrics_are_those_of_one_process_at_equal_steps(name, ranks, tmp_path):
    options = {**EQUAL_STEPS, "gradient_accumulation_steps": 2, "dataset": datasets()[name]}
    one = make_trainer(tmp_path, eval_dataset=make_dataset(9, seed=2), **options)
    one.train()
    reference, evaluation = training_state(one), one.evaluate()
    for rank in ranks:
        state = rank[name]
        assert state["step"] == reference["step"]
        for weight, value in reference["weights"].items():
            torch.testing.assert_close(state["weights"][weight], value, rtol=0, atol=WEIGHTS_FP64)
        logs = [entry for entry in state["log"] if "loss" in entry]
        references = [entry for entry in reference["log"] if "loss" in entry]
        assert len(logs) == len(references) > 0
        for entry, other in zip(logs, references, strict=True):
            assert entry == pytest.approx(other, rel=1e-8)
        for metric, value in evaluation.items():
            if not metric.endswith(("runtime", "per_second")):
                assert state["evaluation"][metric] == pytest.approx(value, rel=1e-10), metric


def test_a_signal_on_one_rank_stops_both_and_the_resumed_run_is_bit_equal(tmp_path):
    # Equality with the undisturbed run is asserted on each rank.
    undisturbed, other = launch("resume", tmp_path)
    assert all(torch.equal(undisturbed["weights"][name], other["weights"][name]) for name in other["weights"])

    # The same checkpoint goes on with one process that takes twice as many micro-batches.
    options = {**RESUME, "gradient_accumulation_steps": 2 * RESUME["gradient_accumulation_steps"]}
    alone = make_trainer(tmp_path / "stopped", **options)
    alone.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-5"))
    for name, value in undisturbed["weights"].items():
        torch.testing.assert_close(alone.model.state_dict()[name], value, rtol=0, atol=WEIGHTS_FP64)
    for entry, other_entry in zip(comparable(alone.state.log_history), undisturbed["log"], strict=True):
        if "loss" in entry:
            assert entry == pytest.approx(other_entry, rel=1e-8)


def test_targets_that_compute_ahead_change_nothing_and_one_that_fails_stops_all_ranks_behind_a_checkpoint(tmp_path):
    # Bit-equality of on and off, and of the resumed run, is asserted on each rank.
    ranks = launch("pipeline", tmp_path)
    assert all(torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]) for name in ranks[0]["weights"])
    assert [rank["failed_at"] for rank in ranks] == [1, 1]
    assert "OutOfMemoryError: no room" in ranks[1]["message"]
    assert "another process" in ranks[0]["message"]


def test_data_slower_than_the_time_limit_of_collectives_is_waited_for(tmp_path):
    assert [rank["step"] for rank in launch("slow_data", tmp_path)] == [3, 3]


def test_a_run_in_the_folder_of_another_one_is_refused_on_all_ranks(tmp_path):
    with only_run_in(tmp_path, HostGroup(1)):
        messages = [rank["message"] for rank in launch("refused", tmp_path)]
    assert f"process {os.getpid()} on" in messages[0] and "first process" in messages[1]


def test_when_one_rank_is_killed_the_other_ends_with_an_error(tmp_path):
    # Without a launcher that would end the other one.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "killed", str(tmp_path)],
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = processes[0].communicate(timeout=120)
        assert processes[1].wait(timeout=120) == -9
        assert processes[0].returncode == 1
        assert "Error" in errors
        assert find_last_checkpoint(tmp_path) is None and not list(tmp_path.glob("rank*.pt"))
    finally:
        for process in processes:
            process.kill()
