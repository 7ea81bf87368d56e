# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Pictures of what benchmarks/quality.py has measured: ours in blue and solid, speculators' in orange and dashed."""

import statistics
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure
from quality_runs import (
    COLUMNS,
    beside_peers,
    drafter_of,
    group_runs,
    is_peer,
    last_values,
    mean_of_seeds,
    rates_by_way,
    tokens_a_step,
)


HELD_OUT = "acceptance_length"
LABEL = "acceptance length, walked"
_DPI = 110
_TICKS = [1, 2, 4, 8, 16, 32]
_OURS, _THEIRS = "tab:blue", "tab:orange"


def plot_curves_over_tokens(runs: list[dict], path: Path) -> None:
    """
    Acceptance length over context tokens, a panel a domain; a line is the mean over seeds. Only what stands beside speculators'
    ([`beside_peers`]) is shown: all settings are in [`plot_settings`].
    """
    domains = {
        name: key
        for name, key in COLUMNS.items()
        if "T = 1" not in name and any(key in point for run in runs for point in run["curve"])
    }
    shown = beside_peers(runs)
    colors = _Colors(shown)
    figure = Figure(figsize=(4.2 * max(1, len(domains)), 5.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(domains)), squeeze=False)[0]
    for panel, (name, key) in zip(panels, domains.items(), strict=False):
        for (tokens, setting), some in shown.items():
            points = _points(some, key)
            x, y = [t / 1e6 for t in points], [statistics.fmean(values) for values in points.values()]
            panel.plot(x, y, label=f"{setting}, {tokens / 1e6:g}M", **colors.style(setting))
        panel.set(title=name, xlabel="context tokens, millions", ylabel=LABEL, xscale="log")
        panel.set_xticks(_TICKS, _TICKS)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=_DPI)


def plot_settings(runs: list[dict], path: Path) -> None:
    """All settings of the number of tokens that most were trained on: held-out, a dot for each seed."""
    groups = group_runs(runs)
    counts = [tokens for tokens, _ in groups]
    most = max(set(counts), key=counts.count)
    shown = [(setting, some) for (tokens, setting), some in groups.items() if tokens == most][::-1]
    figure = Figure(figsize=(9, 1 + 0.24 * len(shown)), layout="constrained")
    panel = figure.subplots()
    for row, (_, some) in enumerate(shown):
        mean, color = mean_of_seeds(some, HELD_OUT), _THEIRS if is_peer(some[0]) else _OURS
        # Without a drafter each pass of the target emits one token.
        panel.barh(row, mean - 1, left=1, color=color, alpha=0.55)
        panel.plot(last_values(some, HELD_OUT), [row] * len(some), "o", color=color, markersize=3)
        panel.text(max(last_values(some, HELD_OUT)) + 0.015, row, f"{mean:.2f}", va="center", fontsize=7)
    panel.set_yticks(
        range(len(shown)), [f"{setting}, {tokens_a_step(some[0]) // 1024}K" for setting, some in shown], fontsize=7
    )
    panel.set(xlabel=LABEL, title=f"Held-out after {most / 1e6:g}M context tokens (K: tokens a step; dots: seeds)")
    panel.set_xlim(1, 1.05 * max(mean_of_seeds(some, HELD_OUT) for _, some in shown))
    panel.set_ylim(-0.7, len(shown) - 0.3)
    panel.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=_DPI)


def plot_equal_time(runs: list[dict], speeds: list[dict], path: Path) -> None:
    """Held-out at the end of each run over the seconds that it takes alone on a GPU, a panel for each way; a line joins
    the runs of a setting on more and more tokens."""
    peers = {drafter_of(run) for run in runs if is_peer(run)}
    timed = {speed["setting"] for speed in speeds}
    shown = {key: some for key, some in group_runs(runs).items() if key[1] in timed and drafter_of(some[0]) in peers}
    sides = {setting: is_peer(some[0]) for (_, setting), some in shown.items()}
    # Only one side says nothing.
    ways = {
        way: rates
        for way, rates in rates_by_way(speeds).items()
        if len({sides[setting] for setting in rates if setting in sides}) == 2
    }
    figure = Figure(figsize=(6.5 * max(1, len(ways)), 5.2), layout="constrained")
    panels = figure.subplots(1, max(1, len(ways)), squeeze=False, sharex=True, sharey=True)[0]
    colors = _Colors(shown)
    for panel, (way, rates) in zip(panels, ways.items(), strict=False):
        ends: dict[str, list[tuple[float, float, float]]] = {}
        for (tokens, setting), some in shown.items():
            if setting in rates:
                ends.setdefault(setting, []).append((tokens / rates[setting], mean_of_seeds(some, HELD_OUT), tokens))
        for setting, points in ends.items():
            style = colors.style(setting)
            panel.plot([point[0] for point in points], [point[1] for point in points], label=setting, **style)
            for (seconds, mean, tokens), side in zip(points, ["right", *["left"] * len(points)], strict=False):
                label, offset = f"{tokens / 1e6:g}M", (5 if side == "left" else -5, -3)
                panel.annotate(label, (seconds, mean), offset, textcoords="offset points", fontsize=7, ha=side)
        panel.set(title=way, xlabel="seconds on one GPU, target's passes included", ylabel=LABEL)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=_DPI)


def _points(runs: list[dict], key: str) -> dict[int, list[float]]:
    """The values of all seeds at each number of tokens."""
    points: dict[int, list[float]] = {}
    for run in runs:
        for point in run["curve"]:
            if key in point:
                points.setdefault(point["tokens"], []).append(point[key])
    return dict(sorted(points.items()))


class _Colors:
    """A shade for each setting: blue for ours, orange for speculators'."""

    def __init__(self, groups: dict[tuple[float, str], list[dict]]):
        self._styles = {}
        for peer, name, line in ((False, "Blues", "-"), (True, "Oranges", "--")):
            settings = list(
                dict.fromkeys(setting for (_, setting), some in groups.items() if is_peer(some[0]) == peer)
            )
            for i, setting in enumerate(settings):
                color = colormaps[name](0.95 - 0.6 * i / max(1, len(settings) - 1))
                self._styles[setting] = {"color": color, "linestyle": line, "marker": "o", "markersize": 4}

    def style(self, setting: str) -> dict:
        return self._styles[setting]
