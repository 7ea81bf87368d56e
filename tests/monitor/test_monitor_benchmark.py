# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from browser import CHROMIUM


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "results.json"
    script = Path(__file__).parents[2] / "benchmarks" / "monitor.py"
    options = ["--num_lines", "1500", "--num_steps", "4", "--output", str(output)]
    result = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(output.read_text())


def test_the_benchmark_runs(results):
    assert 0 < results["cost"]["share_inside_callbacks_logging_each_tenth"] < 1


@pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="no Chromium, or no playwright to drive it",
)
@pytest.mark.parametrize("side", ["with_overview", "without_overview"])
def test_of_a_longer_log_only_what_was_added_is_read(results, side):
    assert 0 < results[side]["bytes_read_for_ten_more_lines"] == results[side]["bytes_of_ten_more_lines"]
