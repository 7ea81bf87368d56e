# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What benchmarks/quality.py has measured: its runs, those that differ in the seed only together, and the speed of settings."""

import json
import statistics
from pathlib import Path


# Columns: their heading, and the key of a curve's point.
COLUMNS = {
    "held-out": "acceptance_length",
    "MT-Bench": "mtbench_acceptance_length",
    "GSM8K": "gsm8k_acceptance_length",
    "HumanEval": "humaneval_acceptance_length",
    "held-out, T = 1": "heldout_t1_acceptance_length",
    "MT-Bench, T = 1": "mtbench_t1_acceptance_length",
    "GSM8K, T = 1": "gsm8k_t1_acceptance_length",
    "HumanEval, T = 1": "humaneval_t1_acceptance_length",
}


def read_runs(folder: Path) -> list[dict]:
    """The finished runs in a folder; others are left out, for their curves end before the schedule does."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-seed*.json"))]
    return [run for run in runs if run["finished"]]


def group_runs(runs: list[dict]) -> dict[tuple[float, str], list[dict]]:
    """Runs that differ in the seed only, by tokens and setting; the best held-out figure first within the same tokens."""
    groups: dict[tuple[float, str], list[dict]] = {}
    for run in runs:
        groups.setdefault((run["tokens"], run["setting"]), []).append(run)
    return dict(sorted(groups.items(), key=lambda item: (item[0][0], -mean_of_seeds(item[1], "acceptance_length"))))


def last_values(runs: list[dict], key: str) -> list[float]:
    """A figure at the end of each run that has it."""
    return [run["curve"][-1][key] for run in runs if key in run["curve"][-1]]


def mean_of_seeds(runs: list[dict], key: str) -> float:
    return statistics.fmean(last_values(runs, key))


def is_peer(run: dict) -> bool:
    """Whether speculators' code trained it."""
    return "peer" in run["options"]


def drafter_of(run: dict) -> tuple:
    """What must be the same for a comparison of how drafters are trained: layers, slots, captured layers."""
    options = run["options"]
    return options["num_hidden_layers"], options["block_size"], tuple(run["target_layer_ids"])


def tokens_a_step(run: dict) -> int:
    return run["options"]["token_budget"]


def beside_peers(runs: list[dict]) -> dict[tuple[float, str], list[dict]]:
    """Groups of runs: all of speculators', the best of ours with as many tokens, tokens a step and the same drafter, and those on at
    least twice as many tokens."""
    groups = group_runs(runs)

    def shape(key) -> tuple:
        return key[0], drafter_of(groups[key][0]), tokens_a_step(groups[key][0])

    theirs = {shape(key) for key, some in groups.items() if is_peer(some[0])}
    longest_of_theirs = max((tokens for tokens, *_ in theirs), default=0)
    best, shown = set(), {}
    for key, some in groups.items():
        # Within as many tokens the best comes first.
        is_best = not is_peer(some[0]) and shape(key) in theirs and shape(key) not in best
        if is_best:
            best.add(shape(key))
        if is_best or is_peer(some[0]) or key[0] >= 2 * longest_of_theirs:
            shown[key] = some
    return shown


def rates_by_way(speeds: list[dict]) -> dict[str, dict[str, float]]:
    """Context tokens a second: [`way_of`] -> setting -> rate."""
    return {
        way: {speed["setting"]: tokens_per_second(speed) for speed in speeds if way_of(speed) == way}
        for way in sorted({way_of(speed) for speed in speeds})
    }


def way_of(speed: dict) -> str:
    """How the same arithmetic was run."""
    layers = "layers compiled" if speed["compile_layers"] == "on" else "layers as they are"
    # Older measurements knew no graphs.
    return layers + (", target in CUDA graphs" if speed.get("target_cuda_graphs", "off") == "on" else "")


def tokens_per_second(speed: dict) -> float:
    return speed["context_tokens_per_second"]


def read_speeds(folder: Path) -> list[dict]:
    """What `quality.py --speed` measured, the latest of each setting and way."""
    path = folder / "speed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return list({(r["setting"], r["attention"], way_of(r)): r for r in results}.values())
