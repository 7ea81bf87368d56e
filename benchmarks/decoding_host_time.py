# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a block of speculative decoding costs the host: plain `generate`, transformers' own DFlash path, and ours.

    python benchmarks/decoding_host_time.py --output benchmarks/results/decoding_host_time_cpu.json

A GPU that decodes with a small target waits for the host: for Python and for launches, whatever the width of the model. Here
the target has the 30 layers of SmolLM2 and the drafter 5, so narrow that a CPU has next to nothing to compute, and one thread
does everything. The weights are random, so hardly a draft is accepted, by either side: the time of a block does not depend
on it. The ways take turns; times are medians over all blocks, from the end of one target pass to the end of the next, and
`rest` is what is spent outside of the two models.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path

import torch
from measuring import Report
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.decoding.speculative import speculative_generate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few blocks: checks the script")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.rounds, args.max_new_tokens = 4, 1, 12
    torch.set_num_threads(1)
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "tiny")}
    report = Report(args.output, torch.device("cpu"), **settings)

    target, drafter = make_models(args.layers, args.block_size)
    input_ids = torch.randint(3, 99, (1, 12))
    # No end token: all ways make equally many tokens.
    arguments = {
        "attention_mask": torch.ones_like(input_ids), "max_new_tokens": args.max_new_tokens, "eos_token_id": 10_000,
        "do_sample": False,
    }  # fmt: skip
    plain = partial(target.generate, input_ids, **arguments)
    ways = {
        "plain": plain,
        "transformers": partial(plain, assistant_model=drafter, speculation_type="dflash"),
        "ours": partial(speculative_generate, target, drafter, input_ids, return_stats=False, **arguments),
    }
    clocks = {way: Clock(target, drafter) for way in ways}
    expected = plain()
    for round in range(1 + args.rounds):
        for way, decode in ways.items():
            with clocks[way]:
                sequences = decode()
            if not torch.equal(sequences, expected):
                raise SystemExit(f"{way}: the output is not that of plain decoding.")
            if round == 0:
                clocks[way].clear()
    for way, clock in clocks.items():
        report.add(way, clock.summarize())
    stages = report.results["stages"]
    report.ratio("block: transformers / ours", stages["transformers"]["block_ms"], stages["ours"]["block_ms"])
    report.ratio("rest: transformers / ours", stages["transformers"]["rest_ms"], stages["ours"]["rest_ms"])
    return 0


def make_models(num_layers: int, block_size: int) -> tuple[LlamaForCausalLM, DFlashForSpeculation]:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    drafter_config = create_drafter_config(config, num_hidden_layers=5, block_size=block_size, mask_token_id=99)
    return target, DFlashForSpeculation(drafter_config).eval()


class Clock:
    """A context manager that notes when passes of target and drafter begin and end; the pass over the prompt is left out."""

    def __init__(self, target, drafter):
        self.models = {"target": target, "drafter": drafter}
        self.clear()

    def clear(self) -> None:
        self.seconds = {"block": [], "target": [], "drafter": [], "rest": []}

    def __enter__(self) -> None:
        self.begins, self.ends, self.handles = (
            {name: [] for name in self.models},
            {name: [] for name in self.models},
            [],
        )
        for name, model in self.models.items():
            note_begin, note_end = partial(note, self.begins[name]), partial(note, self.ends[name])
            self.handles += [model.register_forward_pre_hook(note_begin), model.register_forward_hook(note_end)]

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()
        # The first block follows the prompt, whose features are still to be read.
        ends = self.ends["target"][1:]
        blocks = [end - begin for begin, end in pairwise(ends)]
        targets, drafters = self.passes("target")[2:], self.passes("drafter")[1:]
        # Plain decoding has no drafter, and a last block may be too short to need it.
        rests = [block - sum(models) for block, *models in zip_longest(blocks, targets, drafters, fillvalue=0.0)]
        for name, seconds in zip(self.seconds, (blocks, targets, drafters, rests), strict=True):
            self.seconds[name] += seconds

    def passes(self, name: str) -> list[float]:
        return [end - begin for begin, end in zip(self.begins[name], self.ends[name], strict=True)]

    def summarize(self) -> dict:
        medians = {f"{name}_ms": 1e3 * statistics.median(values or [0.0]) for name, values in self.seconds.items()}
        return {"blocks": len(self.seconds["block"]), **medians}


def note(times: list[float], *_) -> None:
    times.append(time.perf_counter())


if __name__ == "__main__":
    sys.exit(main())
