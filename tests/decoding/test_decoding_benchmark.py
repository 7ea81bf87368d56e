# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""benchmarks/decoding.py on tiny random models: what it writes, and that a run that is out of time leaves what it has."""

import importlib.util
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "decoding.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_decoding", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_way_is_compared_over_the_same_prompts(benchmark, tmp_path):
    output = tmp_path / "decoding.json"
    also = ["tree", "plain, sampled", "ours, sampled"]
    tiny = ["--tiny", "--dtype", "float32", "--limit", "2", "--max-new-tokens", "12"]
    report = benchmark.main([*tiny, "--output", str(output), "--also", *also])
    summary = report["summary"]
    assert list(summary) == ["plain", "ours", "transformers", *also]
    assert json.loads(output.read_text())["summary"] == summary
    for way in ("ours", "transformers", "tree"):
        assert summary[way]["prompts_identical"] == summary[way]["prompts_compared"] == 2
        assert summary[way]["share_differing_from_plain"] == 0
    assert summary["ours"]["acceptance_length"] == summary["transformers"]["acceptance_length"]
    assert summary["plain"]["speedup"] == summary["plain, sampled"]["speedup"] == 1


def test_results_so_far_are_in_the_file_when_the_time_is_over(benchmark, tmp_path, monkeypatch):
    output = tmp_path / "decoding.json"
    # Ten seconds pass with each look at the clock.
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: float(next(clock)))
    tiny = ["--tiny", "--dtype", "float32", "--max-new-tokens", "8"]
    benchmark.main([*tiny, "--output", str(output), "--time-limit", "150"])
    saved = json.loads(output.read_text())
    assert saved["summary"]["plain"]["prompts"] == 1
    assert sum(summary["prompts"] for summary in saved["summary"].values()) < 9


def test_a_differing_token_is_counted_with_the_margin_of_the_targets_logits(benchmark, monkeypatch):
    decode = benchmark.Run.decode

    def decode_wrongly(self, way, input_ids, max_new_tokens):
        sequences, passes = decode(self, way, input_ids, max_new_tokens)
        if way == "ours":
            sequences[0, -1] = (sequences[0, -1] + 1) % 250
        return sequences, passes

    monkeypatch.setattr(benchmark.Run, "decode", decode_wrongly)
    tiny = ["--tiny", "--dtype", "float32", "--limit", "1", "--max-new-tokens", "8"]
    report = benchmark.main(tiny)
    [difference] = report["first_differences"]["ours"]
    assert difference["place"] == 7 and difference["differing"] == 1 and difference["margin"] > 0
    assert report["summary"]["ours"]["share_differing_from_plain"] == 1 / 8
    assert report["summary"]["ours"]["share_off_argmax"] == 1 / 8
    assert report["summary"]["plain"]["share_off_argmax"] == 0
