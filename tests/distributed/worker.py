# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One rank of a distributed test: `worker.py SCENARIO FOLDER`, started by torchrun."""

import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from tiny_models import make_target  # noqa: E402
from tiny_training import GradientRecorder, assert_same, make_dataset, make_trainer, training_state  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from hf_dflash import FrozenTarget  # noqa: E402
from hf_dflash.data.batching import TokenBudgetBatchSampler  # noqa: E402
from hf_dflash.target.pipeline import TargetForwardError  # noqa: E402


RANK = int(os.environ.get("RANK", 0))

# The same as in test_two_processes.py, with half the accumulation: W * GA is equal.
EQUAL_STEPS = {"dtype": torch.float64, "token_budget": 64, "num_train_epochs": 2, "logging_steps": 2}
RESUME = {"dtype": torch.float64, "gradient_accumulation_steps": 2, "logging_steps": 3, "num_train_epochs": 4}


def exactness(folder: Path) -> dict:
    """Gradients of a first step over all documents; several steps; windows in which this rank has nothing."""
    recorder = GradientRecorder()
    one_step = {"max_steps": 1, "max_grad_norm": 0.0, "callbacks": [recorder]}
    # More accumulation than there are micro-batches: the tail of each rank's window is empty.
    first = make_trainer(folder / "first", token_budget=64, gradient_accumulation_steps=5, **one_step)
    first.train()
    result = {"first_gradients": recorder.first, "first_log": first.state.log_history[0]}

    wrapped = first.model_wrapped
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert not wrapped.find_unused_parameters
    drafter = {id(parameter) for parameter in first.model.parameters()}
    assert {id(parameter) for parameter in wrapped.parameters()} == drafter
    assert {id(p) for group in first.optimizer.param_groups for p in group["params"]} == drafter

    for name, options in {
        "steps": EQUAL_STEPS,
        "few_rows": {**EQUAL_STEPS, "dataset": make_dataset(3)},
        "silent_rows": {**EQUAL_STEPS, "dataset": silent_dataset()},
    }.items():
        trainer = make_trainer(folder / name, eval_dataset=make_dataset(9, seed=2), **options)
        trainer.train()
        result[name] = {**training_state(trainer), "evaluation": trainer.evaluate()}
    return result


def silent_dataset():
    """Rank 1 sees nothing but rows without supervision in the first epoch."""
    dataset = make_dataset()
    micro_batches = TokenBudgetBatchSampler(dataset["length"], 64, seed=42, rank=1, world_size=2)
    silent = {index for rows in micro_batches for index in rows}
    return dataset.map(
        lambda row, i: {"loss_mask": [0] * row["length"] if i in silent else row["loss_mask"]}, with_indices=True
    )


def resume(folder: Path) -> dict:
    """A signal on rank 1 alone, then the run goes on; against a run that nobody disturbed."""
    undisturbed = make_trainer(folder / "undisturbed", **RESUME)
    undisturbed.train()

    class SignalOnRank1(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if RANK == 1 and state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = make_trainer(folder / "stopped", callbacks=[SignalOnRank1()], **RESUME)
    try:
        stopped.train()
    except SystemExit as error:
        assert error.code == 143
    else:
        raise AssertionError("The signal was not agreed.")
    assert stopped.state.global_step == 5
    steps = torch.tensor([stopped.state.global_step])
    dist.all_reduce(steps)
    assert steps == 10

    resumed = make_trainer(folder / "stopped", **RESUME)
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), training_state(undisturbed))
    return training_state(undisturbed)


PIPELINE = {"gradient_accumulation_steps": 2, "logging_steps": 3, "num_train_epochs": 2}


class FailsOnRank1(FrozenTarget):
    """Runs out of memory at its fourth micro-batch, the second of a step."""

    count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        if RANK == 1 and self.count == 4:
            raise torch.OutOfMemoryError("no room")
        return super().__call__(*args, **kwargs)


def pipeline(folder: Path) -> dict:
    """Targets that compute ahead, against inline; a target that fails on one rank, and the run that goes on."""
    states = []
    for mode in ("off", "on"):
        trainer = make_trainer(folder / mode, pipeline=mode, **PIPELINE)
        trainer.train()
        states.append(training_state(trainer))
    assert_same(states[1], states[0])

    failing = make_trainer(
        folder / "failing", pipeline="on", target=FailsOnRank1(make_target("qwen3"), [1, 3]), **PIPELINE
    )
    try:
        failing.train()
    except TargetForwardError as error:
        message = str(error)
    else:
        raise AssertionError("The failure was not agreed.")
    step = failing.state.global_step
    resumed = make_trainer(folder / "failing", pipeline="on", **PIPELINE)
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), states[0])
    return {**states[0], "message": message, "failed_at": step}


class SlowOnRank0(torch.utils.data.Dataset):
    """Rows of which the first that rank 0 reads takes longer than any collective may."""

    def __init__(self, rows):
        self.rows, self.is_slow = rows, RANK == 0
        self.column_names = rows.column_names

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if isinstance(index, int) and self.is_slow and self.is_reading:
            self.is_slow = False
            time.sleep(12)
        return self.rows[index]

    is_reading = False


def slow_data(folder: Path) -> dict:
    """Data that keeps one rank waiting for longer than the time limit of collectives, in training and in evaluation."""
    # Not `ddp_timeout=10`: on the CPU, transformers does not pass it on.
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    dataset = SlowOnRank0(make_dataset())
    trainer = make_trainer(folder, dataset=dataset, max_steps=3, eval_dataset=make_dataset(4))

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            dataset.is_reading = True

    trainer.add_callback(Begin())
    start = time.monotonic()
    trainer.train()
    assert time.monotonic() - start > 10
    trainer.evaluate()
    return {"step": trainer.state.global_step}


def killed(folder: Path) -> dict:
    """Rank 1 dies in the middle, without a word."""

    class Die(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if RANK == 1 and state.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    make_trainer(folder, callbacks=[Die()]).train()
    return {}


def killable(folder: Path) -> dict:
    """Goes on from what is on the disk, saving at every step; the test kills a rank."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    import killable_run

    killable_run.run(str(folder))
    return {}


def refused(folder: Path) -> dict:
    """A run in the folder of another one, which holds it in the test's process."""
    try:
        make_trainer(folder).train()
    except ValueError as error:
        return {"message": str(error)}
    raise AssertionError("The refusal was not agreed.")


SCENARIOS = {f.__name__: f for f in (exactness, resume, pipeline, slow_data, killed, killable, refused)}


def main(scenario: str, folder: str) -> int:
    torch.set_num_threads(1)
    try:
        result = SCENARIOS[scenario](Path(folder))
    except BaseException:
        traceback.print_exc()
        return 1
    torch.save(result, Path(folder) / f"rank{RANK}.pt")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    # Gloo's threads may abort an interpreter that takes its time to end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
