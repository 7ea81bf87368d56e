# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a measurement of acceptance found, prompt by prompt and in sum, as the table of a model card, as JSON and as a picture."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..markdown_table import table_cell
from .acceptance import acceptance_by_slot


@dataclass
class PromptResult:
    """
    Args:
        id (`str`): of the prompt's row; `/turn2` and so on are added for later turns.
        domain (`str`): what the row belongs to.
        num_prompt_tokens (`int`), num_new_tokens (`int`): lengths.
        acceptance_lengths (`list[int]`): tokens that each verify pass emitted, bonus token included.
        num_target_passes (`int`): the pass over the prompt included.
        seconds (`float`): wall-clock time of speculative decoding.
        plain_seconds (`float`, *optional*), num_plain_tokens (`int`, *optional*): of plain decoding.
        first_difference (`int`, *optional*): the first new token in which greedy decoding and ours differ, -1 where they are
            the same; `None` when it was not compared or tokens were drawn.
        repeated_4gram_share (`float`): of the new tokens, see [`repeated_ngram_share`]. Loops are easy to draft.
    """

    id: str
    domain: str
    num_prompt_tokens: int
    num_new_tokens: int
    acceptance_lengths: list[int]
    num_target_passes: int
    seconds: float
    plain_seconds: float | None = None
    num_plain_tokens: int | None = None
    first_difference: int | None = None
    repeated_4gram_share: float = 0.0


@dataclass
class AcceptanceReport:
    """
    What was measured, and how.

    Args:
        settings (`dict`): of the run (models, sampling, lengths, device, versions).
        results (`list[PromptResult]`): prompt by prompt.
    """

    settings: dict
    results: list[PromptResult] = field(default_factory=list)

    def summary(self, domain: str | None = None) -> dict:
        """
        The figures over all prompts, or over those of one domain.

        Returns:
            `dict` with
            - `num_prompts`, `num_new_tokens`;
            - `acceptance_length_micro`: tokens / blocks, bonus token included; `None` where no block was decoded;
            - `acceptance_length_macro`: mean over prompts of each prompt's own figure;
            - `acceptance_by_slot`: for slot k = 1 .. B - 1, the share of blocks in which it and all before it were accepted,
              so that 1 + their sum is the micro figure. A block that an end cuts short counts what it emitted;
            - `acceptance_histogram`: blocks that emitted 1 .. B tokens;
            - `target_passes_per_token`: the pass over the prompt included (plain decoding: 1.0);
            - `tokens_per_second`, `plain_tokens_per_second`, `speedup`: ours, plain decoding's, and the one over the other;
              `None` without the comparison;
            - `break_even_acceptance_length`: the micro figure at which `speedup` would be 1;
            - `num_identical`, `num_compared`: prompts whose greedy output equals plain decoding's;
            - `repeated_4gram_share`: mean over prompts, of 4-grams that occurred before in the same completion.
        """
        block_size = self.settings["block_size"]
        results = [r for r in self.results if domain is None or r.domain == domain]
        lengths = [length for r in results for length in r.acceptance_lengths]
        by_prompt = [sum(r.acceptance_lengths) / len(r.acceptance_lengths) for r in results if r.acceptance_lengths]
        num_tokens = sum(r.num_new_tokens for r in results)
        compared = [r for r in results if r.first_difference is not None]
        speed = _compare_speed([r for r in results if r.plain_seconds is not None])
        return {
            "num_prompts": len(results),
            "num_new_tokens": num_tokens,
            "acceptance_length_micro": sum(lengths) / len(lengths) if lengths else None,
            "acceptance_length_macro": sum(by_prompt) / len(by_prompt) if by_prompt else None,
            "acceptance_by_slot": acceptance_by_slot(lengths, block_size) if lengths else [None] * (block_size - 1),
            "acceptance_histogram": [lengths.count(n) for n in range(1, block_size + 1)],
            "target_passes_per_token": sum(r.num_target_passes for r in results) / num_tokens if num_tokens else None,
            **speed,
            "num_identical": sum(r.first_difference == -1 for r in compared),
            "num_compared": len(compared),
            "repeated_4gram_share": sum(r.repeated_4gram_share for r in results) / len(results) if results else None,
        }

    @property
    def acceptance_length(self) -> float | None:
        """The micro figure over all prompts."""
        return self.summary()["acceptance_length_micro"]

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(r.domain for r in self.results))

    def to_dict(self) -> dict:
        """Everything, ready for JSON."""
        return {
            "settings": self.settings,
            "summary": self.summary(),
            "domains": {domain: self.summary(domain) for domain in self.domains},
            "prompts": [asdict(r) for r in self.results],
        }

    def to_markdown(self) -> str:
        """The table of a model card: one row a domain, and all of them together."""
        lines = [
            "| prompts | number | acceptance length (micro) | (macro) | target passes / token | speed-up | break-even length "
            "| identical to plain | repeated 4-grams |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        rows = [(domain, self.summary(domain)) for domain in self.domains]
        if len(rows) != 1:
            rows.append(("all", self.summary()))
        for name, s in rows:
            identical = f"{s['num_identical']} / {s['num_compared']}" if s["num_compared"] else "-"
            cells = [
                table_cell(name),
                str(s["num_prompts"]),
                show_figure(s["acceptance_length_micro"]),
                show_figure(s["acceptance_length_macro"]),
                show_figure(s["target_passes_per_token"], 3),
                show_figure(s["speedup"]),
                show_figure(s["break_even_acceptance_length"]),
                identical,
                f"{s['repeated_4gram_share']:.1%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        by_slot = ", ".join(show_figure(share) for share in self.summary()["acceptance_by_slot"])
        how = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value is not None)
        lines += [
            "",
            f"Acceptance by slot: {by_slot}.",
            "",
            "Acceptance length counts the bonus token; micro is tokens / blocks, macro the mean of prompts. Target passes "
            "include the one over the prompt; speed-up is wall-clock against plain `generate` in the same run.",
            "",
            f"Settings: {how}.",
        ]
        return "\n".join(lines)

    def save_plot(self, path: str | Path) -> None:
        """
        A PNG: acceptance by slot, and how many tokens blocks emitted.

        Raises:
            `ImportError`: without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Plots need matplotlib: pip install 'hf-dflash[eval]'.") from error
        summary = self.summary()
        slots = range(1, self.settings["block_size"])
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        by_slot, histogram = figure.subplots(1, 2)
        by_slot.bar(slots, [share or 0 for share in summary["acceptance_by_slot"]])
        by_slot.set(xlabel="slot", ylabel="share of blocks accepted up to it", ylim=(0, 1), xticks=list(slots))
        total = max(1, sum(summary["acceptance_histogram"]))
        lengths = range(1, self.settings["block_size"] + 1)
        histogram.bar(lengths, [count / total for count in summary["acceptance_histogram"]])
        mean = summary["acceptance_length_micro"]
        if mean is not None:
            histogram.axvline(mean, color="black", linestyle="--", label=f"mean {mean:.2f}")
            histogram.legend()
        histogram.set(xlabel="tokens of a block, bonus included", ylabel="share of blocks", xticks=list(lengths))
        figure.savefig(path, dpi=150)


def _compare_speed(results: list[PromptResult]) -> dict:
    speed = {"speedup": None, "break_even_acceptance_length": None, "tokens_per_second": None}
    speed["plain_tokens_per_second"] = None
    if not results or not sum(r.num_plain_tokens for r in results):
        return speed
    seconds, plain_seconds = sum(r.seconds for r in results), sum(r.plain_seconds for r in results)
    ours = sum(r.num_new_tokens for r in results) / seconds
    plain = sum(r.num_plain_tokens for r in results) / plain_seconds
    blocks = sum(len(r.acceptance_lengths) for r in results)
    speed.update(speedup=ours / plain, tokens_per_second=ours, plain_tokens_per_second=plain)
    if blocks:
        # What a block costs, in plain tokens.
        speed["break_even_acceptance_length"] = seconds / blocks * plain
    return speed


def show_figure(value: float | None, digits: int = 2) -> str:
    """A figure as tables show it; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"
