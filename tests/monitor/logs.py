# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Run logs without a run."""

import json

from hf_dflash.monitor.run_log import RUN_LOG


def write_rows(folder, rows, mode="w"):
    """Appends or writes rows, dicts or raw lines, to the run log of a folder."""
    with open(folder / RUN_LOG, mode, encoding="utf-8") as file:
        for row in rows:
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")


def training_rows(first, last, seconds_a_step=1.0, **figures):
    """One row a step; figures are functions of the step."""
    return [
        {"step": step, "time": 1000 + seconds_a_step * step} | {name: figure(step) for name, figure in figures.items()}
        for step in range(first, last + 1)
    ]


BEGIN = {"event": "begin", "step": 0, "time": 1000.0, "run": {"name": "a run", "max_steps": 100}}
