# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
`hf-dflash generate`: the target writes the completions that its drafter learns from. Prompts in, a folder of JSONL shards out.

Either servers answer (`server_completions.py`), or transformers does on this machine (`local_completions.py`).
"""

import argparse
import json
import os
from pathlib import Path

from ..command_line import DTYPES, CommandParser, at_least_one, available_device
from .chat_client import RetryPolicy
from .completion_folder import ReplyLimits
from .server_completions import generate_completions_from_servers
from .sources import FAILURES


_LOCAL_OPTIONS = {
    "chat_template",
    "devices",
    "dtype",
    "max_prompt_tokens",
    "token_budget",
    "max_batch_rows",
    "time_limit",
}
_SERVER_OPTIONS = {"model", "concurrency", "request_options", "return_token_ids"}


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash generate PROMPTS... OUT`."""
    arguments = vars(_parser().parse_args(argv))
    base_urls, target = arguments.pop("server"), arguments.pop("target")
    limits = ReplyLimits(
        **{name: arguments.pop(name) for name in ("max_empty_share", "max_identical_share", "max_failed_share")}
    )
    if arguments.pop("no_limits"):
        limits = None
    retry = RetryPolicy(arguments.pop("max_attempts"), arguments.pop("timeout"))
    api_key = os.environ.get(arguments.pop("api_key_variable"))
    given = {name: value for name, value in arguments.items() if value is not None}
    other = _LOCAL_OPTIONS if base_urls else _SERVER_OPTIONS
    if misplaced := sorted(given.keys() & other):
        hint = " A server is given its template when it starts." if misplaced[0] == "chat_template" else ""
        raise ValueError(f"--{misplaced[0]} is for {'--target' if base_urls else '--server'}.{hint}")
    if "chat_template" in given:
        given["chat_template"] = Path(given["chat_template"]).read_text(encoding="utf-8")
    if base_urls:
        manifest = generate_completions_from_servers(
            base_urls=base_urls, output_dir=given.pop("output"), retry=retry, api_key=api_key, limits=limits, **given
        )
    else:
        # Here, because it imports torch, which neither servers nor `--help` need.
        from .local_completions import generate_completions_locally

        manifest = generate_completions_locally(model=target, output_dir=given.pop("output"), limits=limits, **given)
    if "repetition_penalty" in manifest["options"]:
        print(
            f"Written with the repetition_penalty of the target's generation config, {manifest['options']['repetition_penalty']}."
        )
    counts = manifest["counts"]
    print(
        f"{counts['rows']} rows in {arguments['output']}: {counts['cut']} cut by the length limit, {counts['empty']} empty; "
        f"{counts['failed']} prompts failed" + (" (failures.jsonl says why)." if counts["failed"] else ".")
    )
    if manifest["status"] != "finished":
        print("The time is over before the prompts are. Run the same command again to go on.")
    elif not counts["rows"]:
        raise ValueError(_why_nothing(arguments["prompts"], arguments["output"], counts["failed"]))
    return 0


def _why_nothing(prompts: list[str], folder: str, num_failed: int) -> str:
    if not num_failed:
        return f"There is no prompt in {', '.join(prompts)}."
    with open(os.path.join(folder, FAILURES), encoding="utf-8") as file:
        first = json.loads(file.readline())
    return f"Not one of {num_failed} prompts was answered. The first, {first['id'] or first.get('where')}: {first['detail']}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-dflash generate",
        description="The target writes the completions that its drafter learns from. The same command goes on with a run "
        "that was stopped.",
        epilog="Exit status: 0 if every prompt is answered or listed in failures.jsonl, 2 if the run was refused or stopped, or if "
        "not one prompt was answered.",
    )
    parser.add_argument("prompts", nargs="+", help="JSONL files, folders, globs, s3:// prefixes or hub:// datasets")
    parser.add_argument("output", help="folder of completions")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--server", nargs="+", metavar="URL", help="servers of the target, such as http://node1:8000/v1"
    )
    where.add_argument("--target", help="name or folder of the target, to answer on this machine")

    group = parser.add_argument_group("sampling (default: what the server chooses; greedy on this machine)")
    group.add_argument(
        "--max_new_tokens", type=int, help="longer replies are cut (on this machine at 1024 by default)"
    )
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top_p", type=float, help="smallest set of tokens with this probability")
    group.add_argument("--top_k", type=int, help="most probable tokens to choose from")
    group.add_argument("--seed", type=int, help="of sampling")
    group.add_argument("--enable_thinking", action=argparse.BooleanOptionalAction, help="for the chat template")
    group.add_argument(
        "--chat_template_kwargs", type=json.loads, metavar="JSON", help="further variables for the template"
    )

    group = parser.add_argument_group("output")
    group.add_argument("--max_rows", type=at_least_one, help="only the first prompts")
    group.add_argument("--shard_rows", type=int, default=500, help="rows of a file (default: 500)")
    group.add_argument("--upload_to", metavar="URI", help="s3://bucket/prefix to copy each file to when it is full")
    group.add_argument("--endpoint_url", help="address of the object store, if not Amazon's")

    defaults = ReplyLimits()
    group = parser.add_argument_group("when to stop (shares of the latest replies)")
    for name, of_what in (
        ("max_empty_share", "replies without a word"),
        ("max_identical_share", "replies that are one and the same"),
        ("max_failed_share", "prompts that failed"),
    ):
        default = getattr(defaults, name)
        group.add_argument(f"--{name}", type=float, default=default, help=f"{of_what} (default: {default})")
    group.add_argument("--no_limits", action="store_true", help="stop never")

    retry = RetryPolicy()
    group = parser.add_argument_group("with --server")
    group.add_argument("--model", help="its name at the servers (default: the only one)")
    group.add_argument("--concurrency", type=int, help="requests in flight at each server (default: 64)")
    group.add_argument(
        "--timeout", type=float, default=retry.timeout, help="seconds for a reply (default: %(default)g)"
    )
    group.add_argument(
        "--max_attempts", type=int, default=retry.max_attempts, help="tries for each reply (default: %(default)s)"
    )
    group.add_argument("--request_options", type=json.loads, metavar="JSON", help="what else goes into each request")
    group.add_argument(
        "--no_return_token_ids",
        dest="return_token_ids",
        action="store_const",
        const=False,
        help="do not ask for the exact ids of replies: they are tokenized later",
    )
    group.add_argument("--api_key_variable", default="OPENAI_API_KEY", help="environment variable that holds the key")

    group = parser.add_argument_group("with --target")
    group.add_argument(
        "--chat_template",
        metavar="FILE",
        help="template the target is served with, if not its own (tokenize and train take it too)",
    )
    group.add_argument("--devices", nargs="+", type=available_device, help="such as cuda:0 cuda:1 (default: all)")
    group.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16)")
    group.add_argument("--max_prompt_tokens", type=int, help="longer prompts fail (default: 4096)")
    group.add_argument("--token_budget", type=int, help="cached tokens of a batch (default: 131072)")
    group.add_argument("--max_batch_rows", type=int, help="rows of a batch (default: 1024)")
    group.add_argument("--time_limit", type=float, help="seconds after which no further batch is started")
    return parser
