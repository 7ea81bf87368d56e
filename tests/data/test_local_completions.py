# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import make_target
from tiny_tokenizers import THINKING_TEMPLATE, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash.data.local_completions import generate_completions_locally, split_reasoning


ROOT = Path(__file__).parents[2]
NO_LIMITS = {"limits": None, "disable_tqdm": True}


def write_prompts(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_completions(folder):
    files = [*sorted(folder.glob("completions-*.jsonl")), *folder.glob("completions-*.partial")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def count_answered(folder):
    """Of a folder that is being written."""
    while True:
        files = [*folder.glob("*.jsonl"), *folder.glob("*.jsonl.partial")]
        try:
            return sum(file.read_bytes().count(b"\n") for file in files)
        except FileNotFoundError:
            continue  # a shard has just been given its final name


def read_failures(folder):
    return [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]


def make_rows(count):
    return [
        {"id": f"row-{n}", "source": "made up", "messages": [{"role": "user", "content": f"What is {n} + {n * 7}?"}]}
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("plain", "<|im_start|>assistant\n", (None, "plain")),
        ("<think>\nhm\n</think>\n\nyes", "<|im_start|>assistant\n", ("hm", "yes")),
        ("hm\n</think>\n\nyes", "<|im_start|>assistant\n<think>\n", ("hm", "yes")),
        ("\n</think>\n\nyes", "<|im_start|>assistant\n<think>\n", ("", "yes")),
        ("hm, cut here", "<|im_start|>assistant\n<think>\n", ("hm, cut here", "")),
        ("yes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", (None, "yes")),
    ],
)
def test_reasoning_is_kept_apart(text, prompt, expected):
    assert split_reasoning(text, prompt) == expected


def test_replies_are_those_of_generate_and_tokenize_takes_them_as_they_are(tmp_path, target_folder):
    from hf_dflash.data.tokenization import tokenize_completions

    prompts = write_prompts(tmp_path / "prompts.jsonl", make_rows(12))
    manifest = generate_completions_locally(
        prompts,
        tmp_path / "out",
        target_folder,
        dtype="float64",
        max_new_tokens=20,
        token_budget=250,
        shard_rows=5,
        **NO_LIMITS,
    )
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    expected = {}
    for row in make_rows(12):
        inputs = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = target.generate(**inputs, max_new_tokens=20, do_sample=False)[0]
        expected[row["id"]] = output.tolist(), inputs["input_ids"].shape[1]
    rows = read_completions(tmp_path / "out")
    assert len(rows) == manifest["counts"]["rows"] == 12
    for row in rows:
        ids, prompt_length = expected[row["id"]]
        assert row["completion_token_ids"] == ids[prompt_length:]
        ended = ids[-1] in target.generation_config.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert row["messages"][-1]["content"] == tokenizer.decode(ids[prompt_length : -1 if ended else None])
        assert row["source"] == "made up"
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}

    dataset = tokenize_completions(
        tmp_path / "out",
        target_folder,
        tmp_path / "tokens",
        num_workers=1,
        min_supervised_tokens=1,
        gates=None,
        disable_tqdm=True,
    )
    tokenized = {tuple(sample["input_ids"]): sum(sample["loss_mask"]) for sample in dataset}
    assert tokenized == {tuple(ids): len(ids) - prompt_length for ids, prompt_length in expected.values()}


def test_thinking_is_kept_apart_and_turns_go_on(tmp_path):
    tokenizer = make_tokenizer(THINKING_TEMPLATE, special_tokens=("<|im_start|>", "<|im_end|>", "</think>"))
    target = make_target("qwen3", vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(30, 80)]
    turns = [("user", "one"), ("assistant", "?"), ("user", "two"), ("assistant", "?")]
    rows = [
        {"id": str(n), "messages": [{"role": role, "content": f"{text} {n}"} for role, text in turns]}
        for n in range(8)
    ]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    generate_completions_locally(
        prompts, tmp_path / "out", target, tokenizer=tokenizer, max_new_tokens=30, enable_thinking=True, **NO_LIMITS
    )
    rows = read_completions(tmp_path / "out")
    assert len(rows) == 8
    replies = [message for row in rows for message in row["messages"] if message["role"] == "assistant"]
    assert all("reasoning_content" in reply for reply in replies)
    assert any(len(row["messages"]) == 4 for row in rows)
    assert all(row["chat_template_kwargs"] == {"enable_thinking": True} for row in rows)


def test_rows_that_cannot_be_answered_are_listed(tmp_path, target_folder):
    prompts = tmp_path / "prompts.jsonl"
    good = make_rows(3)
    lines = [json.dumps(row) for row in good] + [
        "{not json",
        json.dumps(good[0]),
        json.dumps({"id": "x", "messages": []}),
        json.dumps({"id": "y", "messages": [{"role": "user", "content": "long " * 300}]}),
        "",
        json.dumps({"id": "z", "messages": [{"role": "wizard", "content": "?"}]}),
    ]
    prompts.write_text("\n".join(lines) + "\n")
    manifest = generate_completions_locally(
        prompts, tmp_path / "out", target_folder, max_new_tokens=4, max_prompt_tokens=200, **NO_LIMITS
    )
    assert sorted(row["id"] for row in read_completions(tmp_path / "out")) == ["row-0", "row-1", "row-2"]
    reasons = sorted(failure["reason"] for failure in read_failures(tmp_path / "out"))
    assert reasons == ["bad_json", "duplicate_id", "missing_field", "prompt_too_long", "unknown_role"]
    assert manifest["counts"] | {"cut": 0} == {"rows": 3, "cut": 0, "empty": 0, "failed": 5}


@pytest.mark.compat
def test_a_repetition_penalty_of_the_target_is_applied_and_other_settings_are_named(tmp_path, target_folder, caplog):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_rows(3))
    options = {"tokenizer": tokenizer, "max_new_tokens": 12, **NO_LIMITS}
    plain = generate_completions_locally(prompts, tmp_path / "plain", target, **options)
    target.generation_config.repetition_penalty = 1.5
    manifest = generate_completions_locally(prompts, tmp_path / "penalized", target, **options)
    assert "repetition_penalty" not in plain["options"] and manifest["options"]["repetition_penalty"] == 1.5
    assert not caplog.records
    inputs = tokenizer.apply_chat_template(
        make_rows(3)[0]["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    replies = {row["id"]: row["completion_token_ids"] for row in read_completions(tmp_path / "penalized")}
    assert replies[make_rows(3)[0]["id"]] == expected.tolist()

    target.generation_config.no_repeat_ngram_size, target.generation_config.top_k = 3, 20
    generate_completions_locally(prompts, tmp_path / "greedy", target, **options)
    assert caplog.messages[-1].endswith("says beside: no_repeat_ngram_size 3.")
    caplog.clear()
    generate_completions_locally(prompts, tmp_path / "drawn", target, temperature=0.5, **options)
    assert "says beside: no_repeat_ngram_size 3, top_k 20. To write them with it, give --top_k 20." in caplog.text


def test_prompts_that_leave_no_room_in_the_targets_context_fail(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    target.config.max_position_embeddings = 40
    rows = make_rows(1) + [{"id": "long", "messages": [{"role": "user", "content": "1 + 1 " * 20}]}]
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    manifest = generate_completions_locally(
        prompts, tmp_path / "out", target, tokenizer=tokenizer, max_new_tokens=8, **NO_LIMITS
    )
    assert (manifest["counts"]["rows"], manifest["counts"]["failed"]) == (1, 1)
    (failure,) = read_failures(tmp_path / "out")
    assert failure["id"] == "long" and "room for 32 in the target's context" in failure["detail"]


def test_a_time_limit_stops_between_batches_and_the_next_run_goes_on(tmp_path, target_folder):
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_rows(6))
    options = {"max_new_tokens": 4, "max_batch_rows": 2, **NO_LIMITS}
    stopped = generate_completions_locally(prompts, tmp_path / "out", target_folder, time_limit=0, **options)
    assert stopped["status"] == "running" and stopped["counts"]["rows"] < 6
    finished = generate_completions_locally(prompts, tmp_path / "out", target_folder, **options)
    assert finished["status"] == "finished" and finished["counts"]["rows"] == 6


@pytest.mark.distributed
def test_two_devices_share_the_work_and_a_kill_loses_nothing(tmp_path, target_folder):
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_rows(60))
    command = [
        *(sys.executable, "-m", "hf_dflash.cli", "generate", prompts, tmp_path / "out", "--target", target_folder),
        *("--devices", "cpu", "cpu", "--dtype", "float64", "--max_new_tokens", "16", "--max_batch_rows", "4"),
        *("--shard_rows", "16", "--no_limits"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while count_answered(tmp_path / "out") < 8:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert count_answered(tmp_path / "out") < 60

    options = {"dtype": "float64", "max_new_tokens": 16, "devices": ["cpu"], **NO_LIMITS}
    generate_completions_locally(prompts, tmp_path / "out", str(target_folder), **options)
    rows = read_completions(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in make_rows(60))
    generate_completions_locally(prompts, tmp_path / "alone", str(target_folder), **options)
    alone = {row["id"]: row for row in read_completions(tmp_path / "alone")}
    assert {row["id"]: row for row in rows} == alone
