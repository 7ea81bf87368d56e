# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import io

from hf_dflash.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_a_short_task_is_one_whole_line():
    file = io.StringIO()
    with ProgressBar(total=5, desc="Tokenizing", unit=" rows", file=file) as bar:
        for _ in range(5):
            bar.update()
            bar.set_postfix(samples=3, refresh=False)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("Tokenizing: 100% 5/5 [") and "samples=3" in line
    assert "\r" not in file.getvalue()


def test_a_long_task_is_a_line_now_and_then_and_one_at_the_end():
    file = io.StringIO()
    for _ in ProgressBar(range(3), desc="rows", file=file, mininterval=0):
        pass
    shares = [line.split()[1] for line in file.getvalue().splitlines()]
    assert shares == ["33%", "67%", "100%", "100%"]


def test_of_how_many_nobody_knows_there_is_no_share():
    file = io.StringIO()
    with ProgressBar(desc="Uploading", unit="file", file=file) as bar:
        bar.update(3)
    assert file.getvalue().startswith("Uploading: 3 [") and "%" not in file.getvalue()


def test_nothing_is_said_of_what_is_disabled_left_out_or_never_began():
    file = io.StringIO()
    with ProgressBar(total=5, file=file, disable=True) as bar:
        bar.update(5)
    with ProgressBar(total=5, file=file, leave=False) as bar:
        bar.update(5)
    with ProgressBar(total=5, initial=5, file=file):
        pass
    assert file.getvalue() == ""


def test_in_a_terminal_it_is_tqdms_bar():
    file = Terminal()
    for _ in ProgressBar(range(3), desc="rows", file=file, mininterval=0, ascii=True):
        pass
    assert "\rrows: 100%|##########| 3/3 [" in file.getvalue()
