# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Tables and curves of what benchmarks/quality.py has measured, for docs/ablations.md, and the card in docs/example_card."""

import json
import statistics
from pathlib import Path

from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.hub.model_card import CURVES_FILE, AcceptanceFigure, create_drafter_card, read_training_record
from hf_dflash.training.curves import plot_curves


BEGIN, END = "<!-- results: written by `quality.py --report` -->", "<!-- end of results -->"
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
    return dict(sorted(groups.items(), key=lambda item: (item[0][0], -_mean(item[1], "acceptance_length"))))


def _values(runs: list[dict], key: str) -> list[float]:
    return [run["curve"][-1][key] for run in runs if key in run["curve"][-1]]


def _mean(runs: list[dict], key: str) -> float:
    return statistics.fmean(_values(runs, key))


def _cell(runs: list[dict], key: str) -> str:
    values = _values(runs, key)
    if not values:
        return "-"
    spread = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def make_tables(runs: list[dict]) -> str:
    """Markdown: acceptance lengths, accuracy by slot, what was really decoded. A spread is half of largest minus smallest."""
    groups = group_runs(runs)
    lines = ["| setting | context tokens | blocks | seeds | " + " | ".join(COLUMNS) + " |"]
    lines += ["|---" * (len(COLUMNS) + 4) + "|"]
    for (tokens, setting), some in groups.items():
        blocks = statistics.fmean(run["blocks"] for run in some)
        seeds = ", ".join(str(run["seed"]) for run in some)
        cells = [f"`{setting}`", f"{tokens / 1e6:g}M", f"{blocks / 1e6:.2f}M", seeds]
        lines.append("| " + " | ".join([*cells, *(_cell(some, key) for key in COLUMNS.values())]) + " |")
    lines += ["", "Held-out accuracy by slot (each slot by itself, target's label):", ""]
    slots = max((len(_slots(run)) for run in runs), default=0)
    lines += ["| setting | context tokens | " + " | ".join(str(slot) for slot in range(1, slots + 1)) + " |"]
    lines += ["|---" * (slots + 2) + "|"]
    for (tokens, setting), some in groups.items():
        columns = zip(*map(_slots, some), strict=True)
        cells = [f"{statistics.fmean(column):.2f}" for column in columns]
        cells += ["-"] * (slots - len(cells))
        lines.append(f"| `{setting}` | {tokens / 1e6:g}M | " + " | ".join(cells) + " |")
    decoded = [run for some in groups.values() for run in some if "decoded" in run]
    if decoded:
        lines += ["", "Really decoded in fp32, beside the walk over the same text:", ""]
        lines += ["| setting | context tokens | seed | sampling | decoded | walked | gap | identical to plain |"]
        lines += ["|---" * 8 + "|"]
        for run in decoded:
            for way, figures in run["decoded"].items():
                real, walked = figures["decoded_acceptance_length"], figures["walked_acceptance_length"]
                same = f"{figures['identical_to_plain']} / {figures['compared']}" if "compared" in figures else "-"
                lines.append(
                    f"| `{run['setting']}` | {run['tokens'] / 1e6:g}M | {run['seed']} | {'greedy' if way == 'greedy' else 'T = 1'} "
                    f"| {real:.3f} | {walked:.3f} | {real / walked - 1:+.1%} | {same} |"
                )
    versions = sorted({f"{name} {number}" for run in runs for name, number in run["versions"].items()})
    devices = sorted({run["device"] for run in runs})
    lines += ["", f"Device: {', '.join(devices)}. Versions: {', '.join(versions)}."]
    return "\n".join(lines)


def _slots(run: dict) -> list[float]:
    point = run["curve"][-1]
    return [point[f"accuracy_slot_{slot}"] for slot in range(1, run["options"]["block_size"])]


def compare_with_peers(runs: list[dict]) -> str:
    """How far our best setting of as many tokens, tokens a step, layers and slots is above each of speculators'."""
    lines = []
    groups = group_runs(runs)
    for (tokens, setting), theirs in groups.items():
        if "peer" not in theirs[0]["options"]:
            continue
        shape = _drafter(theirs[0]), _tokens_a_step(theirs[0])
        ours = {
            name: some
            for (t, name), some in groups.items()
            if t == tokens
            and "peer" not in some[0]["options"]
            and (_drafter(some[0]), _tokens_a_step(some[0])) == shape
        }
        if not ours:
            continue
        name, best = max(ours.items(), key=lambda item: _mean(item[1], "acceptance_length"))
        above = _mean(best, "acceptance_length") / _mean(theirs, "acceptance_length") - 1
        lines.append(
            f"- `{name}` is {above:+.1%} against `{setting}` (held-out, {tokens / 1e6:g}M tokens on both sides)."
        )
    return "\n".join(lines)


def _drafter(run: dict) -> tuple:
    options = run["options"]
    return options["num_hidden_layers"], options["block_size"], tuple(run["target_layer_ids"])


def _tokens_a_step(run: dict) -> int:
    return run["options"]["token_budget"]


def compare_at_equal_time(runs: list[dict], speeds: list[dict]) -> str:
    """
    How far our best run with the same drafter is above a run of speculators' that takes at least as long, by the speed of both
    alone on a GPU: for each setting of speculators and way of compiling whose speed has been measured.
    """
    lines = []
    groups = group_runs(runs)
    for (tokens, setting), theirs in groups.items():
        if "peer" not in theirs[0]["options"]:
            continue
        for compiled in sorted({speed["compile_layers"] for speed in speeds}):
            rates = {speed["setting"]: _rate(speed) for speed in speeds if speed["compile_layers"] == compiled}
            if setting not in rates:
                continue
            seconds = tokens / rates[setting]
            # What the clock cannot tell apart counts as equal.
            ours = {
                (t, name): some
                for (t, name), some in groups.items()
                if name in rates
                and "peer" not in some[0]["options"]
                and _drafter(some[0]) == _drafter(theirs[0])
                and t / rates[name] <= 1.01 * seconds
            }
            if not ours:
                continue
            (t, name), best = max(ours.items(), key=lambda item: _mean(item[1], "acceptance_length"))
            above = _mean(best, "acceptance_length") / _mean(theirs, "acceptance_length") - 1
            lines.append(
                f"- In the {seconds:.0f} s that `{setting}` takes for {tokens / 1e6:g}M tokens, compiled layers {compiled}, `{name}` "
                f"takes {t / 1e6:g}M ({t / rates[name]:.0f} s) and is {above:+.1%} (held-out)."
            )
    return "\n".join(lines)


def _rate(speed: dict) -> float:
    return speed["context_tokens_per_second"]


def plot(runs: list[dict], path: Path) -> None:
    """Curves over context tokens, a panel a domain; a line is the mean over seeds."""
    from matplotlib.figure import Figure

    shown = {name: key for name, key in COLUMNS.items() if "T = 1" not in name}
    shown = {name: key for name, key in shown.items() if any(key in point for run in runs for point in run["curve"])}
    figure = Figure(figsize=(4.6 * max(1, len(shown)), 5), layout="constrained")
    panels = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for panel, (name, key) in zip(panels, shown.items(), strict=False):
        for (tokens, setting), some in group_runs(runs).items():
            points: dict[int, list[float]] = {}
            for run in some:
                for point in run["curve"]:
                    if key in point:
                        points.setdefault(point["tokens"], []).append(point[key])
            x = sorted(points)
            style = "--" if "peer" in some[0]["options"] else "-"
            y = [statistics.fmean(points[t]) for t in x]
            panel.plot([t / 1e6 for t in x], y, style, marker="o", markersize=3, label=f"{setting}, {tokens / 1e6:g}M")
        panel.set(title=name, xlabel="context tokens, millions", ylabel="acceptance length, walked")
        panel.grid(alpha=0.3)
    panels[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)


def read_speeds(folder: Path) -> list[dict]:
    """What `quality.py --speed` measured, the latest of each setting and way of compiling."""
    path = folder / "speed.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return list({(r["setting"], r["attention"], r["compile_layers"]): r for r in results}.values())


def make_speed_table(speeds: list[dict]) -> str:
    """Context tokens a second, empty where nothing has been measured."""
    if not speeds:
        return ""
    lines = ["Alone on the device, target's forward pass included, compilation left out:", ""]
    lines += ["| setting | attention | compiled layers | context tokens / s | steps / s |"]
    lines += ["|---" * 5 + "|"]
    for r in sorted(speeds, key=lambda r: (r["compile_layers"], -_rate(r))):
        lines.append(
            f"| `{r['setting']}` | {r['attention']} | {r['compile_layers']} | {_rate(r):,} | {r['steps_per_second']:.1f} |"
        )
    return "\n".join(lines)


def write_example_card(results: Path, folder: Path) -> None:
    """
    The card of the recipe's drafter as it would stand on the Hub: what `DFlashTrainer` has recorded of its run, and beside the
    figures of the walk those that were really decoded.

    Raises:
        `ValueError`: if no run of the recipe is finished that has kept its card.
    """
    runs = [run for run in read_runs(results) if run["setting"] == "recipe" and _card_folder(results, run).exists()]
    if not runs:
        raise ValueError(f"{results} holds no card of the recipe: `quality.py --setting recipe --card` makes one.")
    run = max(runs, key=lambda run: run["tokens"])
    source = _card_folder(results, run)
    config, record = DFlashConfig.from_pretrained(source), read_training_record(source)
    minutes, seconds = divmod(round(run["seconds_since_start"]), 60)
    record.progress = f"{run['steps']:,} steps, {run['tokens'] / 1e6:g}M context tokens, in {minutes} min {seconds} s on one {run['device']}."
    for way, figures in run.get("decoded", {}).items():
        compared = ""
        if "compared" in figures:
            compared = (
                f", {figures['identical_to_plain']} of {figures['compared']} outputs identical to plain decoding"
            )
        record.acceptance.append(
            AcceptanceFigure(
                "all four sets together",
                figures["decoded_acceptance_length"],
                f"really decoded in fp32, {'greedy' if way == 'greedy' else 'temperature 1'}, {figures['blocks']} blocks; the walk "
                f"over the same text gives {figures['walked_acceptance_length']:.2f}{compared}",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    plot_curves(json.loads((source / "log_history.json").read_text(encoding="utf-8")), str(folder / CURVES_FILE))
    config.to_json_file(folder / "config.json")
    create_drafter_card(
        config,
        target_name=config.target_name_or_path,
        repo_id=f"{config.target_name_or_path.split('/')[-1]}-DFlash",
        record=record,
        has_curves=True,
    ).save(folder / "README.md")


def _card_folder(results: Path, run: dict) -> Path:
    return results / f"card-{run['setting']}-{run['tokens'] / 1e6:g}M-seed{run['seed']}"


def write_report(results: Path, document: Path) -> None:
    """
    Puts tables between the two marks of a Markdown document, and a picture beside the results.

    Raises:
        `ValueError`: if nothing is finished, or the document has no marks.
    """
    runs = read_runs(results)
    if not runs:
        raise ValueError(f"{results} holds no finished run: train some with `quality.py --jobs`.")
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{document} has no lines {BEGIN!r} and {END!r} to write between.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    speeds = read_speeds(results)
    parts = [
        compare_with_peers(runs),
        compare_at_equal_time(runs, speeds),
        make_tables(runs),
        make_speed_table(speeds),
    ]
    document.write_text(
        before + BEGIN + "\n\n" + "\n\n".join(part for part in parts if part) + "\n\n" + END + after, encoding="utf-8"
    )
    plot(runs, results / "curves.png")
    print(f"{len(runs)} runs: {document}, {results / 'curves.png'}")
