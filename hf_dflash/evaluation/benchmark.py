# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Acceptance length and speed of a drafter, really decoded, against plain decoding in the same run.

`hf-dflash evaluate --target T --drafter D --prompts FILE.jsonl` prints the Markdown table of a model card and writes JSON
and a PNG beside it.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from ..command_line import CommandParser, at_least_one, available_device
from ..data.local_generation import LocalSampling
from ..data.sources import open_jsonl
from ..decoding.attention_kernels import without_cudnn_attention
from ..decoding.generation_settings import settings_that_decide
from ..decoding.speculative import speculative_generate
from ..drafter.configuration_dflash import DFlashConfig
from ..hub.drafter_files import read_native_drafter
from ..progress import ProgressBar
from .acceptance import acceptance_by_slot, repeated_ngram_share
from .prompt_sets import PROMPT_SETS, load_prompt_set


logger = logging.getLogger(__name__)

# Arguments of `speculative_generate` that plain `generate` does not know.
_OURS_ONLY = ("sample_drafts", "adaptive_block", "tree_budget", "cuda_graph")

# New tokens of a turn, unless another number is given: acceptance lengths of different numbers are hard to compare.
MAX_NEW_TOKENS = 512


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
                name,
                str(s["num_prompts"]),
                _show(s["acceptance_length_micro"]),
                _show(s["acceptance_length_macro"]),
                _show(s["target_passes_per_token"], 3),
                _show(s["speedup"]),
                _show(s["break_even_acceptance_length"]),
                identical,
                f"{s['repeated_4gram_share']:.1%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        by_slot = ", ".join(_show(share) for share in self.summary()["acceptance_by_slot"])
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


def _show(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def load_prompts(path: str | Path, limit: int | None = None) -> list[dict]:
    """
    Reads prompts from a JSONL file.

    Args:
        path (`str` or `Path`): one object a line with `messages` (a conversation that ends with a user turn), `turns` (user
            messages, each answered before the next is asked) or `prompt` (one user message); `id` and `domain` (or `source`)
            are used where they exist. Compressed if it ends with `.gz`.
        limit (`int`, *optional*): the first so many rows.

    Raises:
        `ValueError`: for an empty file, and for a row that is none of these, naming file and line.
    """
    path = Path(path)
    name = Path(path.name.removesuffix(".gz")).stem
    rows = []
    with open_jsonl(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and len(rows) >= limit:
                break
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
            where = f"{path}, line {number}"
            if not isinstance(row, dict):
                raise ValueError(f"{where}: a row is an object, this is a {type(row).__name__}.")
            _read_turns(row, where)
            domain = row.get("domain") or row.get("source") or name
            rows.append({**row, "id": str(row.get("id", f"{name}:{number}")), "domain": domain})
    if not rows:
        raise ValueError(f"{path} holds no prompts: give one JSON object a line with `messages`, `turns` or `prompt`.")
    return rows


def _read_turns(row: dict, where: str) -> tuple[list[dict], list[str]]:
    """The conversation before the first answer without its last user turn, and the user turns that are to be answered."""
    if "turns" in row:
        before, turns = [], row["turns"]
    elif "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"{where}: `messages` is a list of objects with `role` and `content`.")
        if not messages or messages[-1].get("role") != "user":
            raise ValueError(
                f"{where}: `messages` must end with a user turn, which the target is to answer: leave out what follows it."
            )
        before, turns = messages[:-1], [messages[-1].get("content")]
    elif "prompt" in row:
        before, turns = [], [row["prompt"]]
    else:
        raise ValueError(f"{where}: a prompt has `messages`, `turns` or `prompt`, this row has {sorted(row)}.")
    # A string is a sequence of strings too: each of its characters would be a turn.
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: a user turn is a non-empty string, and `turns` a list of them.")
    return before, turns


def encode_prompt(tokenizer, messages: list[dict], enable_thinking: bool | None = None) -> torch.LongTensor:
    """
    The ids, `[1, length]`, that a server would give the target: chat template and generation prompt. Without a template, those of
    a single message's text.

    Raises:
        `ValueError`: for a conversation without a template.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise ValueError(
                f"The target's tokenizer has no chat template, which a conversation of {len(messages)} messages needs: take prompts "
                "of one user turn, or give the template that the target is served with (--chat-template)."
            )
        return tokenizer(messages[-1]["content"], return_tensors="pt").input_ids
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
    )["input_ids"]


def measure_acceptance(
    target,
    drafter,
    prompts: Iterable[dict],
    tokenizer,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    enable_thinking: bool | None = None,
    do_sample: bool = False,
    compare_with_plain: bool = True,
    seed: int = 0,
    progress: bool = True,
    **generation_kwargs,
) -> AcceptanceReport:
    """
    Decodes prompts one by one with the drafter and, for comparison, without it.

    Args:
        target (`PreTrainedModel`), drafter ([`DFlashForSpeculation`]): in evaluation mode, on their devices.
        prompts (`Iterable[dict]`): rows as [`load_prompts`] gives them.
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        max_new_tokens (`int`, *optional*, defaults to 512): of each turn.
        enable_thinking (`bool`, *optional*): given to the chat template; its own default if not given, as everywhere. A drafter
            that was trained on completions with thinking accepts far less without it, and the other way round.
        do_sample (`bool`, *optional*, defaults to `False`): draw tokens instead of taking the most likely ones.
        compare_with_plain (`bool`, *optional*, defaults to `True`): time plain `generate` on the same prompts, and when greedy
            compare the tokens.
        seed (`int`, *optional*, defaults to 0): of sampling, set anew for each prompt.
        progress (`bool`, *optional*, defaults to `True`): show a progress bar.
        generation_kwargs: of [`speculative_generate`] (`temperature`, `sample_drafts`, ...).

    Returns:
        [`AcceptanceReport`].

    Raises:
        `ValueError`: if a row is no prompt, naming its id.
    """
    prompts = list(prompts)
    ours_only = {name: generation_kwargs.pop(name) for name in _OURS_ONLY if name in generation_kwargs}
    plain_kwargs = {"max_new_tokens": max_new_tokens, "do_sample": do_sample, **generation_kwargs}
    report = AcceptanceReport(
        settings={
            "target": target.config._name_or_path or type(target).__name__,
            "drafter": drafter.config._name_or_path or type(drafter).__name__,
            "block_size": drafter.config.block_size,
            "max_new_tokens": max_new_tokens,
            "enable_thinking": enable_thinking,
            "do_sample": do_sample,
            "seed": seed if do_sample else None,
            **ours_only,
            **generation_kwargs,
            **settings_that_decide(_prepare_generation_config(target, plain_kwargs), do_sample),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": _device_name(target.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    context_length = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    measure = _Measurement(
        target,
        drafter,
        plain_kwargs,
        ours_only,
        compare_with_plain,
        seed,
    )
    with ProgressBar(prompts, desc="Decoding", unit="prompt", disable=not progress) as bar:
        for number, row in enumerate(bar):
            name = str(row.get("id", number))
            messages, turns = _read_turns(row, f"prompt {name}")
            for turn_number, turn in enumerate(turns, start=1):
                messages = [*messages, {"role": "user", "content": turn}]
                input_ids = encode_prompt(tokenizer, messages, enable_thinking).to(target.device)
                if context_length is not None and input_ids.shape[1] + max_new_tokens > context_length:
                    logger.warning(
                        f"Prompt {name} and its reply may take {input_ids.shape[1]} + {max_new_tokens} tokens, but the target was "
                        f"made for {context_length}: what is written behind them says nothing. Leave the prompt out, or take "
                        "fewer new tokens."
                    )
                result, new_tokens = measure(input_ids)
                result.id = name if turn_number == 1 else f"{name}/turn{turn_number}"
                result.domain = str(row.get("domain") or row.get("source") or "prompts")
                report.results.append(result)
                answer = tokenizer.decode(new_tokens, skip_special_tokens=True)
                messages = [*messages, {"role": "assistant", "content": answer}]
            bar.set_postfix(acceptance=_show(report.acceptance_length))
    return report


def _prepare_generation_config(target, generation_kwargs: dict) -> transformers.GenerationConfig:
    """What `generate` makes of its arguments, the target's generation config and its own defaults."""
    any_ids = torch.ones(1, 1, dtype=torch.long, device=target.device)
    return target.generate(
        any_ids,
        attention_mask=any_ids,
        custom_generate=lambda model, input_ids, generation_config, **_: generation_config,
        **generation_kwargs,
    )


class _Measurement:
    """Decodes one prompt both ways, after a few unmeasured tokens that let everything initialise itself."""

    def __init__(self, target, drafter, generation_kwargs, ours_only, compare_with_plain, seed):
        self.target, self.drafter = target, drafter
        self.generation_kwargs, self.ours_only = generation_kwargs, ours_only
        self.compare_with_plain, self.seed = compare_with_plain, seed
        self.is_warm = False

    def __call__(self, input_ids: torch.LongTensor) -> tuple[PromptResult, torch.LongTensor]:
        if not self.is_warm:
            self._speculative(input_ids, max_new_tokens=4)
            if self.compare_with_plain:
                self._plain(input_ids, max_new_tokens=4)
            self.is_warm = True
        out, seconds = self._timed(self._speculative, input_ids)
        new_tokens = out.sequences[0, input_ids.shape[1] :]
        result = PromptResult(
            id="",
            domain="",
            num_prompt_tokens=input_ids.shape[1],
            num_new_tokens=len(new_tokens),
            acceptance_lengths=out.acceptance_lengths[0],
            num_target_passes=out.num_target_passes,
            seconds=seconds,
            repeated_4gram_share=repeated_ngram_share(new_tokens.tolist()),
        )
        if self.compare_with_plain:
            plain, result.plain_seconds = self._timed(self._plain, input_ids)
            plain_tokens = plain[0, input_ids.shape[1] :]
            result.num_plain_tokens = len(plain_tokens)
            if not self.generation_kwargs["do_sample"]:
                result.first_difference = find_first_difference(new_tokens, plain_tokens)
        return result, new_tokens

    def _speculative(self, input_ids, **overrides):
        mask = torch.ones_like(input_ids)
        arguments = {**self.generation_kwargs, **self.ours_only, **overrides}
        return speculative_generate(self.target, self.drafter, input_ids, mask, **arguments)

    def _plain(self, input_ids, **overrides):
        arguments = {**self.generation_kwargs, **overrides}
        # As ours does: the two differ in what is speculative alone.
        with without_cudnn_attention(self.target.device):
            return self.target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)

    def _timed(self, function, input_ids):
        torch.manual_seed(self.seed)
        _synchronize(self.target.device)
        start = time.perf_counter()
        out = function(input_ids)
        _synchronize(self.target.device)
        return out, time.perf_counter() - start


def find_first_difference(tokens: torch.Tensor, reference: torch.Tensor) -> int:
    """The first position in which two 1-D sequences differ (the end of the shorter one counts), -1 if they are the same."""
    shared = min(len(tokens), len(reference))
    different = (tokens[:shared] != reference[:shared]).nonzero()
    if len(different):
        return int(different[0])
    return -1 if len(tokens) == len(reference) else shared


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash evaluate`."""
    parser = CommandParser(
        prog="hf-dflash evaluate",
        description="Acceptance length (bonus token included) and speed of a drafter against plain decoding.",
    )
    parser.add_argument("--target", required=True, help="folder or Hub id of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub id of the drafter")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        help=f"JSONL files with `messages`, `turns` or `prompt` rows, or sets on the Hub: {', '.join(PROMPT_SETS)}",
    )
    parser.add_argument(
        "--limit", type=at_least_one, help="so many prompts of each: the first of a file, any of a set (--seed)"
    )
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=MAX_NEW_TOKENS, help="of each turn (default: %(default)s)"
    )
    parser.add_argument(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="given to the chat template: as the drafter's completions were written (default: the template's own)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="the same: if it was not the target's own")
    parser.add_argument("--do-sample", action="store_true", help="draw tokens instead of taking the most likely ones")
    for name, number in (("--temperature", float), ("--top-p", float), ("--top-k", int)):
        parser.add_argument(name, type=number, help="of --do-sample (default: the target's generation config)")
    parser.add_argument("--sample-drafts", action="store_true", help="draw the drafts too")
    parser.add_argument("--adaptive-block", action="store_true", help="verify only as many drafts as pay")
    parser.add_argument("--tree-budget", type=at_least_one, help="verify a tree of so many drafts (dense targets)")
    parser.add_argument("--cuda-graph", action="store_true", help="replay the verify pass as a CUDA graph")
    parser.add_argument(
        "--seed", type=int, default=0, help="of sampling, and of what --limit takes of a set (default: 0)"
    )
    parser.add_argument(
        "--compare-with-plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time plain decoding too (default: on)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "bfloat16", "float16", "float32", "float64"],
        help="of both models (default: as the target was saved)",
    )
    parser.add_argument(
        "--device", type=available_device, help="of both models (default: the first accelerator, else the CPU)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the target's repository")
    parser.add_argument("--output", type=Path, help="folder for acceptance.json, acceptance.md and acceptance.png")
    args = parser.parse_args(argv)

    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    ours = {name: getattr(args, name) for name in _OURS_ONLY if getattr(args, name)}
    for name in [*sampling, "sample_drafts"]:
        if not args.do_sample and getattr(args, name) not in (None, False):
            raise ValueError(f"--{name} changes nothing when decoding is greedy: add --do-sample.")
    if args.temperature == 0:
        raise ValueError("--temperature 0 is greedy decoding: leave out --do-sample and what belongs to it.")
    # Its own checks: `generate` takes a `top_p` of 2 for none, and one of 0 for greedy.
    LocalSampling(**{"temperature": 1.0, **sampling})
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output} is a file: give a folder.")
    prompts = []
    for name in args.prompts:
        if name in PROMPT_SETS:
            prompts += load_prompt_set(name, args.limit, args.seed)
        elif not Path(name).is_file():
            raise ValueError(f"--prompts {name} is neither a file here nor one of the sets {', '.join(PROMPT_SETS)}.")
        else:
            prompts += load_prompts(name, args.limit)

    # Importing the package registers the drafter's classes.
    model_type = transformers.AutoConfig.from_pretrained(args.drafter).model_type
    if model_type != DFlashConfig.model_type:
        raise ValueError(
            f"--drafter {args.drafter} is no drafter in hf_dflash's own layout (its `model_type` is {model_type!r}): give the "
            "folder of a drafter, or `hf-dflash import` another project's first."
        )
    drafter = read_native_drafter(args.drafter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    target = transformers.AutoModelForCausalLM.from_pretrained(
        args.target, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )
    device = args.device or torch.accelerator.current_accelerator() or "cpu"
    target, drafter = target.to(device).eval(), drafter.to(device, target.dtype)

    report = measure_acceptance(
        target,
        drafter,
        prompts,
        tokenizer,
        max_new_tokens=args.max_new_tokens,
        enable_thinking=args.enable_thinking,
        do_sample=args.do_sample,
        compare_with_plain=args.compare_with_plain,
        seed=args.seed,
        **sampling,
        **ours,
    )
    print(report.to_markdown())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "acceptance.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
        (args.output / "acceptance.md").write_text(report.to_markdown() + "\n", encoding="utf-8")
        print(f"Written to {args.output}: acceptance.json, acceptance.md")
        try:
            report.save_plot(args.output / "acceptance.png")
            print(f"Written to {args.output}: acceptance.png")
        except ImportError as error:
            # Decoding took long, and its figures are there.
            print(error, file=sys.stderr)
    return 0
