# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Rows of our own in the schema of each set of the reference mixture, and mixtures that are written for a test."""

import json

from hf_dflash.data.mixture_file import load_mixture


FILLER = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon".split()
)


def user(text):
    return {"role": "user", "content": text}


def write_mixture(tmp_path, text):
    path = tmp_path / "mixture.yaml"
    path.write_text(f"output: {tmp_path}/out\n{text.replace('TMP', str(tmp_path))}")
    return load_mixture(path)


GLAIVE_FUNCTION = {
    "name": "get_tide",
    "description": "Height of the tide",
    "parameters": {"type": "object", "properties": {"port": {"type": "string"}}},
}
GLAIVE_SYSTEM = (
    "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    + json.dumps(GLAIVE_FUNCTION, indent=4)
    + "\n"
)
GLAIVE_CHAT = (
    "USER: How high is the water in Brest?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "get_tide", "arguments": \'{"port": "Brest"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"height": 3.1}\n\n\n'
    "ASSISTANT: It is 3.1 metres. <|endoftext|>\n\n\n"
    "USER: Thanks!\n\n\nASSISTANT: You are welcome. <|endoftext|>\n"
)
GLAIVE_CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "get_tide", "arguments": {}}}]}  # fmt: skip

CASES = {
    "glaive-function-calling-v2": (
        {"system": GLAIVE_SYSTEM, "chat": GLAIVE_CHAT},
        [
            user("How high is the water in Brest?"),
            GLAIVE_CALL,
            {"role": "tool", "content": '{"height": 3.1}'},
            {"role": "assistant", "content": ""},
            user("Thanks!"),
        ],
        [{"type": "function", "function": GLAIVE_FUNCTION}],
    ),
    "evol-codealpaca": (
        {"instruction": "Sort a list in Rust.", "output": "v.sort();"},
        [user("Sort a list in Rust.")],
        None,
    ),
    "magicoder-oss-instruct": (
        {
            "lang": "python",
            "raw_index": 3,
            "index": 7,
            "seed": "def f(x):",
            "openai_fingerprint": "fp",
            "problem": "Write f.",
            "solution": "pass",
        },
        [user("Write f.")],
        None,
    ),
    "magicoder-evol-instruct": (
        {"instruction": "Explain recursion.", "response": "See recursion."},
        [user("Explain recursion.")],
        None,
    ),
    "agentic-coding-trajectories": (
        {
            "session_id": "made-up::1",
            "source_dataset": "made-up",
            "source_id": "1",
            "agent_framework": "swe-agent",
            "recorded_model": "unknown",
            "messages_json": json.dumps(
                [
                    {"role": "system", "content": "You can use a shell."},
                    user("Fix the failing test."),
                    {"role": "assistant", "content": "ls"},
                    user("OBSERVATION: setup.py"),
                ]
            ),
            "n_turns": 1,
            "max_isl": 40,
            "total_tokens": 41,
            "ground_truth_meta_json": "{}",
        },
        [{"role": "system", "content": "You can use a shell."}, user("Fix the failing test.")],
        None,
    ),
    "qwen3.5-tool-calling-v2": (
        {
            "messages": [
                {"role": "system", "content": "You have these functions: {}"},
                user("Find a lamp."),
                {"role": "assistant", "content": '{"name": "search"}'},
                user("FUNCTION RESPONSE: []"),
                {"role": "assistant", "content": "There is none."},
            ]
        },
        [
            {"role": "system", "content": "You have these functions: {}"},
            user("Find a lamp."),
            {"role": "assistant", "content": ""},
            user("FUNCTION RESPONSE: []"),
        ],
        None,
    ),
    "openorca": (
        {"id": "flan.1", "system_prompt": "Think aloud.", "question": "Is ice cold?", "response": "Yes."},
        [{"role": "system", "content": "Think aloud."}, user("Is ice cold?")],
        None,
    ),
}
