# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A picture of a training run: loss, acceptance length, accuracy by slot."""


def plot_curves(log_history: list[dict], path: str) -> None:
    """Draws what a `Trainer` logged.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        path (`str`): PNG to write.

    Raises:
        `ImportError`: if matplotlib is missing, saying what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: `pip install 'hf-dflash[eval]'`.") from error

    training = [entry for entry in log_history if "loss" in entry]
    evaluations = [entry for entry in log_history if "eval_loss" in entry]
    # A Figure of its own, not pyplot: nothing global, no display.
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, acceptance, slots = figure.subplots(1, 3)

    loss.plot([entry["step"] for entry in training], [entry["loss"] for entry in training], label="training")
    if evaluations:
        steps = [entry["step"] for entry in evaluations]
        loss.plot(steps, [entry["eval_loss"] for entry in evaluations], "o-", label="held-out")
    loss.set(title="Loss", xlabel="step")
    loss.legend()

    with_length = [entry for entry in training if "anchor_acceptance_length" in entry]
    acceptance.plot(
        [entry["step"] for entry in with_length],
        [entry["anchor_acceptance_length"] for entry in with_length],
        alpha=0.5,
        label="training, mean over anchors",
    )
    if evaluations:
        for name, label in (
            ("anchor_acceptance_length", "held-out, mean over anchors"),
            ("acceptance_length", "held-out, walked"),
        ):
            acceptance.plot(steps, [entry[f"eval_{name}"] for entry in evaluations], "o-", label=label)
    acceptance.set(title="Acceptance length (bonus token included)", xlabel="step")
    acceptance.legend()

    if evaluations:
        prefix = "eval_accuracy_slot_"
        for entry, style in ((evaluations[0], ":"), (evaluations[-1], "-")):
            accuracy = {int(k.removeprefix(prefix)): v for k, v in entry.items() if k.startswith(prefix)}
            slots.plot(list(accuracy), list(accuracy.values()), style, marker="o", label=f"step {entry['step']}")
        slots.legend()
    slots.set(title="Held-out accuracy by slot", xlabel="slot", ylim=(0, 1))
    figure.savefig(path, dpi=120)
