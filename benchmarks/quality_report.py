# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Tables of what benchmarks/quality.py has measured, for docs/ablations.md, and the card in docs/example_card."""

import json
import statistics
from pathlib import Path

from quality_plots import plot_curves_over_tokens, plot_equal_time, plot_settings
from quality_runs import (
    COLUMNS,
    drafter_of,
    group_runs,
    is_peer,
    last_values,
    mean_of_seeds,
    rates_by_way,
    read_runs,
    read_speeds,
    tokens_a_step,
    tokens_per_second,
    way_of,
)

from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.hub.model_card import CURVES_FILE, AcceptanceFigure, create_drafter_card, read_training_record
from hf_dflash.training.curves import plot_curves


BEGIN, END = "<!-- results: written by `quality.py --report` -->", "<!-- end of results -->"


def _cell(runs: list[dict], key: str) -> str:
    values = last_values(runs, key)
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
        if not is_peer(theirs[0]):
            continue
        shape = drafter_of(theirs[0]), tokens_a_step(theirs[0])
        ours = {
            name: some
            for (t, name), some in groups.items()
            if t == tokens and not is_peer(some[0]) and (drafter_of(some[0]), tokens_a_step(some[0])) == shape
        }
        if not ours:
            continue
        name, best = max(ours.items(), key=lambda item: mean_of_seeds(item[1], "acceptance_length"))
        above = mean_of_seeds(best, "acceptance_length") / mean_of_seeds(theirs, "acceptance_length") - 1
        lines.append(
            f"- `{name}` is {above:+.1%} against `{setting}` (held-out, {tokens / 1e6:g}M tokens on both sides)."
        )
    return "\n".join(lines)


def compare_at_equal_time(runs: list[dict], speeds: list[dict]) -> str:
    """
    How far our best run with the same drafter is above a run of speculators' that takes at least as long, by the speed of both
    alone on a GPU: for each setting of speculators and way whose speed has been measured.
    """
    lines = []
    groups = group_runs(runs)
    for (tokens, setting), theirs in groups.items():
        if not is_peer(theirs[0]):
            continue
        for way, rates in rates_by_way(speeds).items():
            if setting not in rates:
                continue
            seconds = tokens / rates[setting]
            # What the clock cannot tell apart counts as equal.
            ours = {
                (t, name): some
                for (t, name), some in groups.items()
                if name in rates
                and not is_peer(some[0])
                and drafter_of(some[0]) == drafter_of(theirs[0])
                and t / rates[name] <= 1.01 * seconds
            }
            if not ours:
                continue
            (t, name), best = max(ours.items(), key=lambda item: mean_of_seeds(item[1], "acceptance_length"))
            above = mean_of_seeds(best, "acceptance_length") / mean_of_seeds(theirs, "acceptance_length") - 1
            lines.append(
                f"- In the {seconds:.0f} s that `{setting}` takes for {tokens / 1e6:g}M tokens, {way}, `{name}` "
                f"takes {t / 1e6:g}M ({t / rates[name]:.0f} s) and is {above:+.1%} (held-out)."
            )
    return "\n".join(lines)


def make_speed_table(speeds: list[dict]) -> str:
    """Context tokens a second, empty where nothing has been measured."""
    if not speeds:
        return ""
    lines = ["Alone on the device, target's forward pass included, compilation left out:", ""]
    lines += ["| setting | attention | way | context tokens / s | steps / s |"]
    lines += ["|---" * 5 + "|"]
    for r in sorted(speeds, key=lambda r: (way_of(r), -tokens_per_second(r))):
        lines.append(
            f"| `{r['setting']}` | {r['attention']} | {way_of(r)} | {tokens_per_second(r):,} | {r['steps_per_second']:.1f} |"
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
    Puts tables between the two marks of a Markdown document, and pictures beside the results.

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
    plot_curves_over_tokens(runs, results / "curves.png")
    plot_settings(runs, results / "settings.png")
    plot_equal_time(runs, speeds, results / "equal_time.png")
    print(f"{len(runs)} runs: {document}, pictures in {results}")
