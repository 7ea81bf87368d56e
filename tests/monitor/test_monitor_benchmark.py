# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_runs_and_reads_of_a_longer_log_only_what_was_added(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "monitor.py"
    options = ["--num_lines", "1500", "--num_steps", "4", "--output", str(tmp_path / "results.json")]
    result = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for side in (results["with_overview"], results["without_overview"]):
        assert side.get("bytes_read_for_ten_more_lines") == side.get("bytes_of_ten_more_lines")
    assert 0 < results["cost"]["share_inside_callbacks_logging_each_tenth"] < 1
