# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash evaluate`: decodes prompts with a drafter and prints the Markdown table of a model card."""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

from ..command_line import DTYPES, CommandParser, at_least_one, available_device
from ..data.local_generation import LocalSampling
from ..hub.drafter_files import read_native_drafter
from .benchmark import MAX_NEW_TOKENS, OURS_ONLY, measure_acceptance
from .prompt_sets import PROMPT_SETS, load_prompt_set
from .prompts import load_prompts


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash evaluate`."""
    args = _parser().parse_args(argv)
    if args.temperature == 0 and not args.do_sample:
        # Other tools ask for greedy decoding so.
        args.temperature = None
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    ours = {name: getattr(args, name) for name in OURS_ONLY if getattr(args, name)}
    if not args.do_sample:
        for name in [*sampling, *(ours.keys() & {"sample_drafts"})]:
            raise ValueError(f"--{name} changes nothing when decoding is greedy: add --do-sample.")
    if args.temperature == 0:
        raise ValueError("--temperature 0 is greedy decoding: leave out --do-sample and what belongs to it.")
    # Its own checks: `generate` takes a `top_p` of 2 for none, and one of 0 for greedy.
    LocalSampling(**{"temperature": 1.0, **sampling})
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output} is a file: give a folder.")
    prompts, given = [], set()
    for name in args.prompts:
        source = name if name in PROMPT_SETS else Path(name).resolve()
        if source in given:
            raise ValueError(f"--prompts {name} is given twice: each of its prompts would count twice.")
        given.add(source)
        if name in PROMPT_SETS:
            prompts += load_prompt_set(name, args.limit, args.seed)
        elif Path(name).is_dir() or not Path(name).exists():
            raise ValueError(f"--prompts {name} is neither a file here nor one of the sets {', '.join(PROMPT_SETS)}.")
        else:
            prompts += load_prompts(name, args.limit)

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


def _parser() -> argparse.ArgumentParser:
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
        choices=["auto", *DTYPES],
        help="of both models (default: as the target was saved)",
    )
    parser.add_argument(
        "--device", type=available_device, help="of both models (default: the first accelerator, else the CPU)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the target's repository")
    parser.add_argument("--output", type=Path, help="folder for acceptance.json, acceptance.md and acceptance.png")
    return parser
