# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The completions of the reference job: Qwen3.6-27B answers the prompt set of mixtures/qwen36.yaml with thinking on.

    python recipes/generate_completions.py prompts/qwen36/prompts.jsonl completions/qwen36 \
        --servers http://node1:8000/v1 http://node2:8000/v1 --num_gpus 16 --estimate

`--estimate` answers the first 512 prompts, says what all of them will take, and stops; without it the run goes on from there,
and goes on again after whatever stops it. docs/completions.md shows how to start the servers and how to choose the lengths.
"""

import sys
import time

from hf_dflash.cli import explain_mistakes
from hf_dflash.command_line import CommandParser
from hf_dflash.data.prompts import count_prompts
from hf_dflash.data.server_completions import generate_completions_from_servers
from hf_dflash.data.sources import list_sources


# Prompts are shuffled, so the first ones stand for all of them.
ESTIMATE_ROWS = 512


def describe_cost(num_prompts: int, this_run: dict, seconds: float, num_gpus: int, gpu_hour_price: float) -> str:
    """What all prompts take, from what some of them took."""
    rows, tokens = this_run["rows"], this_run["completion_tokens"]
    tokens_per_second = tokens / seconds
    hours = num_prompts * (tokens / rows) / tokens_per_second / 3600
    gpu_hours = hours * num_gpus
    return (
        f"{rows} replies of {tokens / rows:,.0f} tokens on average ({this_run['cut'] / rows:.1%} cut), "
        f"{tokens_per_second:,.0f} tokens/s.\n"
        f"All {num_prompts:,} prompts: {num_prompts * tokens / rows / 1e9:.2f}B tokens, {hours:,.1f} h, "
        f"{gpu_hours:,.0f} GPU hours, {gpu_hours * gpu_hour_price:,.0f} at {gpu_hour_price:g} a GPU hour. A short run has "
        "its servers half empty at its end, so the whole is rather quicker."
    )


def main(argv: list[str]) -> None:
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", help="what `hf-dflash mix` wrote")
    parser.add_argument("output", help="folder of completions")
    parser.add_argument("--servers", nargs="+", required=True, metavar="URL")
    parser.add_argument("--concurrency", type=int, default=128, help="requests in flight at each server")
    parser.add_argument("--max_new_tokens", type=int, default=4096, help="thinking included")
    parser.add_argument("--upload_to", metavar="URI", help="s3://bucket/prefix to copy each shard to when it is full")
    parser.add_argument(
        "--estimate", action="store_true", help=f"answer {ESTIMATE_ROWS} prompts, and say what all take"
    )
    parser.add_argument("--num_gpus", type=int, default=1, help="of all servers together, for the estimate")
    parser.add_argument("--gpu_hour_price", type=float, default=2.5, help="for the estimate")
    arguments = parser.parse_args(argv)

    started = time.monotonic()
    manifest = generate_completions_from_servers(
        arguments.prompts,
        arguments.output,
        arguments.servers,
        concurrency=arguments.concurrency,
        # Temperature and the like are left to the server, which has them from the target's generation config.
        max_new_tokens=arguments.max_new_tokens,
        enable_thinking=True,
        max_rows=ESTIMATE_ROWS if arguments.estimate else None,
        upload_to=arguments.upload_to,
    )
    if arguments.estimate:
        if not manifest["this_run"]["rows"]:
            raise ValueError(
                f"{arguments.output} has the answers of an estimate already: choose an empty folder to measure again."
            )
        num_prompts = count_prompts(list_sources(arguments.prompts))
        seconds = time.monotonic() - started
        cost = describe_cost(num_prompts, manifest["this_run"], seconds, arguments.num_gpus, arguments.gpu_hour_price)
        print(cost)


if __name__ == "__main__":
    sys.exit(explain_mistakes("generate_completions.py", main, sys.argv[1:]))
