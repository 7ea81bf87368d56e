# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One run at a time in an `output_dir`, against a run in a process of its own."""

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import socket

import held_run
import pytest
from tiny_training import heard_by_pytest, make_trainer
from transformers import TrainerCallback

import hf_dflash.training.run as run
from hf_dflash.training.host_group import HostGroup
from hf_dflash.training.run_lock import LOCK_FILE, only_run_in


ALONE = HostGroup(1)


@pytest.fixture(scope="module")
def processes():
    # Forked from a server that has everything imported and has not started a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["held_run"])
    return context


@pytest.fixture
def hold(processes):
    """Begins a run in a folder, in another process."""
    begun, workers = [], []

    def begin(folder):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=held_run.run, args=(str(folder), theirs))
        process.start()
        begun.append(process)
        assert ours.poll(120)
        workers.append(ours.recv())
        return process, workers[-1]

    yield begin
    for process in begun:
        process.kill()
        process.join()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_is_refused_before_it_touches_the_folder_until_the_first_is_killed(hold, job_file, tmp_path):
    folder = tmp_path / "out"
    holder, worker = hold(folder)
    before = content(folder)
    refusal = f"out belongs to a run .*: process {holder.pid} on {socket.gethostname()}.*`kill`.*`--output_dir`"
    with pytest.raises(ValueError, match=refusal):
        make_trainer(folder, max_steps=1).train()
    with pytest.raises(ValueError, match=refusal):
        run.main(["--config", str(job_file)])
    assert content(folder) == before
    # This one only looks.
    assert run.main(["--config", str(job_file), "--dry_run"]) == 0

    holder.kill()
    holder.join()
    os.kill(worker, 0)  # which outlives it, and has copies of its descriptors
    trainer = make_trainer(folder, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        run.main(["--config", str(job_file)])


def is_locked(folder):
    with open(folder / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_process_trains_again_in_its_folder_and_leaves_no_lock_behind_however_a_run_ends(tmp_path):
    class Look(TrainerCallback):
        error = None

        def on_step_end(self, args, state, control, **kwargs):
            assert is_locked(tmp_path)
            if self.error is not None:
                raise self.error

    look = Look()
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, callbacks=[look])
    for look.error in (None, KeyboardInterrupt, OSError, None):
        try:
            trainer.train()
        except (KeyboardInterrupt, OSError):
            assert look.error is not None
        assert not (tmp_path / LOCK_FILE).exists()
    with only_run_in(tmp_path, ALONE):
        trainer.train(resume_from_checkpoint=True)
        # Whoever came first goes last.
        assert is_locked(tmp_path)
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_folder_that_was_made_for_the_lock_goes_with_it_unless_something_was_put_there(tmp_path):
    with pytest.raises(RuntimeError), only_run_in(tmp_path / "a" / "b", ALONE):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with only_run_in(tmp_path / "a" / "b", ALONE):
        (tmp_path / "a" / "file").touch()
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "file"]


def test_a_lock_file_that_its_holder_takes_away_lets_no_second_run_in(tmp_path, monkeypatch):
    flock, taken_away = fcntl.flock, []

    def flock_too_late(lock, how):
        # The holder ends between this process's `open` and `flock`.
        if not taken_away:
            taken_away.append(lock)
            (tmp_path / LOCK_FILE).unlink()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with only_run_in(tmp_path, ALONE):
        assert taken_away and is_locked(tmp_path)


def test_a_file_system_that_counts_no_links_keeps_no_run_waiting(tmp_path, monkeypatch):
    fstat, asked = os.fstat, []

    def fstat_without_links(file):
        asked.append(file)
        assert len(asked) < 100
        mode, inode, device, _, *others = fstat(file)
        return os.stat_result((mode, inode, device, 0, *others))

    monkeypatch.setattr(os, "fstat", fstat_without_links)
    with only_run_in(tmp_path, ALONE):
        assert is_locked(tmp_path)


def test_where_the_file_system_has_no_locks_a_run_goes_on_without(tmp_path, monkeypatch, caplog):
    def flock(lock, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    trainer = make_trainer(tmp_path, max_steps=1)
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        trainer.train()
    assert trainer.state.global_step == 1
    assert f"{tmp_path} cannot be locked" in caplog.text
