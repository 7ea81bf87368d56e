# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Files are whole or not there; a locked folder keeps others out for as long as its holder lives."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from hf_dflash.atomic_files import locked_folder, replacing, write_json


def test_reader_finds_the_old_content_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": "ö"})
    old = path.read_text(encoding="utf-8")
    with replacing(path) as file:
        file.write("new")
        file.flush()
        assert path.read_text(encoding="utf-8") == old
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_error_while_writing_leaves_the_old_content_and_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), replacing(path, "wb") as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_is_locked_for_as_long_as_its_holder_lives(tmp_path):
    code = (
        "import sys, pathlib; from hf_dflash.atomic_files import locked_folder\n"
        "with locked_folder(pathlib.Path(sys.argv[1]), 'using'): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "folder")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="Another process is using"), locked_folder(tmp_path / "folder", "using"):
            pass
        holder.kill()
    with locked_folder(tmp_path / "folder", "using"):
        pass


def test_a_process_that_was_forked_and_outlives_the_holder_keeps_nobody_out(tmp_path):
    code = (
        "import os, sys, pathlib, time; from hf_dflash.atomic_files import locked_folder\n"
        "with locked_folder(pathlib.Path(sys.argv[1]), 'using'):\n"
        "    if not os.fork(): print(os.getpid(), flush=True); time.sleep(60)\n"
        "    sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        child = int(holder.stdout.readline())
        holder.kill()
        holder.wait()
        try:
            os.kill(child, 0)
            with locked_folder(tmp_path, "using"):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_locked_folder_into_which_nothing_was_put_is_taken_away_with_those_made_for_it(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine" / "deep" / "deeper", tmp_path / "mine"):
        with pytest.raises(RuntimeError), locked_folder(folder, "using"):
            assert (folder / ".lock").exists()
            raise RuntimeError
        assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with locked_folder(tmp_path / "a" / "b", "using"):
        (tmp_path / "a" / "file").touch()
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "file"]
    with locked_folder(tmp_path / "kept", "using"):
        (tmp_path / "kept" / "file").touch()
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {".lock", "file"}


def test_a_lock_file_that_its_holder_takes_away_locks_nobody_out_and_nobody_in(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    flock, taken_away = fcntl.flock, []

    def flock_too_late(lock, how):
        # The holder ends between this process's `open` and `flock`.
        if not taken_away:
            taken_away.append(lock)
            (folder / ".lock").unlink()
            folder.rmdir()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with locked_folder(folder, "using"):
        assert taken_away and (folder / ".lock").exists()
        with pytest.raises(ValueError, match="Another process is using"), locked_folder(folder, "using"):
            pass
