# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from tiny_tokenizers import CHATML_TEMPLATE, make_tokenizer

from hf_dflash.data import sources as sources_module
from hf_dflash.data import unit_workers
from hf_dflash.data.tokenization import tokenize_completions
from hf_dflash.data.unit_tokenization import UnitTokenizer
from hf_dflash.data.unit_workers import _take


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "MIN_UNIT_BYTES", 1000)
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Five of them, I think."}]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 60)
    return path


def wait_until(condition):
    deadline = time.time() + 200
    while not condition():
        assert time.time() < deadline
        time.sleep(0.005)


def tokenize(source, output):
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    return tokenize_completions(source, tokenizer, output, num_workers=2, gates=None, disable_tqdm=True)


def before_the_first_unit_here(monkeypatch, action):
    """Has this process (not the others) do something once it has taken its first unit."""

    class Tokenizer(UnitTokenizer):
        is_first = True

        def process(self, index):
            if self.is_first:
                self.is_first = False
                action(index, len(self.units))
            return super().process(index)

    monkeypatch.setattr(unit_workers, "UnitTokenizer", Tokenizer)


def test_each_unit_is_taken_once(tmp_path):
    (tmp_path / "taken").touch()
    todo = [5, 3, 8, 1, 9, 0]
    one, other = _take(str(tmp_path), todo), _take(str(tmp_path), todo)
    assert [next(one), next(other), next(other), next(one)] == todo[:4]
    assert [*other, *one] == todo[4:]


def test_another_process_does_all_units_but_the_one_at_which_this_process_stays(source, tmp_path, monkeypatch):
    output = tmp_path / "out"
    before_the_first_unit_here(
        monkeypatch, lambda index, number: wait_until(lambda: len(list(output.glob("unit-*.json"))) == number - 1)
    )
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    dataset = tokenize(source, output)
    assert len(dataset) == 60 and len(set(dataset["row_id"])) == 60
    assert len(list(output.glob("unit-*.arrow"))) > 5
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_what_a_unit_raises_in_another_process_is_raised_here(source, tmp_path, monkeypatch):
    def take_the_source_away(index, number):
        source.rename(tmp_path / "elsewhere.jsonl")
        wait_until(multiprocessing.active_children)
        wait_until(lambda: not multiprocessing.active_children())
        (tmp_path / "elsewhere.jsonl").rename(source)

    before_the_first_unit_here(monkeypatch, take_the_source_away)
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl") as caught:
        tokenize(source, tmp_path / "out")
    assert "In a worker process" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert len(tokenize(source, tmp_path / "out")) == 60


def test_a_worker_that_is_killed_is_an_error_and_the_run_goes_on_when_started_again(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def kill(index, number):
        (taken,) = tmp_path.glob("hf-dflash-*/taken")
        with open(taken, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # the other process takes nothing meanwhile
            wait_until(multiprocessing.active_children)
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
            wait_until(lambda: not multiprocessing.active_children())

    before_the_first_unit_here(monkeypatch, kill)
    with pytest.raises(RuntimeError, match="ended with status -9"):
        tokenize(source, tmp_path / "out")
    monkeypatch.undo()
    assert len(tokenize(source, tmp_path / "out")) == 60
    assert not list(tmp_path.glob("hf-dflash-*"))


def test_what_a_killed_run_has_left_for_its_workers_is_removed_by_the_next_and_nobody_elses(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []

    def stop(index, number):
        folders.extend(tmp_path.glob("hf-dflash-*"))
        raise KeyboardInterrupt

    before_the_first_unit_here(monkeypatch, stop)
    for name in ("out", "other"):
        with pytest.raises(KeyboardInterrupt):
            tokenize(source, tmp_path / name)
    for folder in folders:  # as a killed run does not remove them
        folder.mkdir()
        (folder / "job.pickle").write_bytes(b"much")
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(tokenize(source, tmp_path / "out")) == 60
    assert [folder.exists() for folder in folders] == [False, True]


def test_a_tokenizer_that_cannot_be_pickled_is_refused_with_a_way_out(source, tmp_path):
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    tokenizer.cannot_be_pickled = lambda: None
    options = {"gates": None, "disable_tqdm": True}
    with pytest.raises(ValueError, match="num_workers=1"):
        tokenize_completions(source, tokenizer, tmp_path / "out", num_workers=2, **options)
    assert len(tokenize_completions(source, tokenizer, tmp_path / "out", num_workers=1, **options)) == 60


def test_a_script_that_tokenizes_when_it_is_imported_is_told_what_to_do(source, tmp_path):
    make_tokenizer(CHATML_TEMPLATE).save_pretrained(tmp_path / "target")
    script = tmp_path / "script.py"
    script.write_text(
        "from hf_dflash.data import sources, tokenization, unit_workers\n"
        "sources.MIN_UNIT_BYTES = 1000\n"
        "class Late(unit_workers.UnitTokenizer):\n"
        "    def process(self, index):\n"
        "        import multiprocessing, time\n"
        "        while not multiprocessing.active_children(): time.sleep(0.01)\n"
        "        while multiprocessing.active_children(): time.sleep(0.01)\n"
        "        return super().process(index)\n"
        "unit_workers.UnitTokenizer = Late\n"
        f"tokenization.tokenize_completions({str(source)!r}, {str(tmp_path / 'target')!r}, '{tmp_path}/out', num_workers=2)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: A worker process ended with status 1") and "__main__" in last
