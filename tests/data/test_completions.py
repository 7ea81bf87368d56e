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
from tiny_tokenizers import CHATML_TEMPLATE, THINKING_TEMPLATE, make_tokenizer

from hf_dflash.data.completion_folder import CompletionFolder, RepliesRefused, ReplyLimits, ReplyWatch
from hf_dflash.data.completions import generate_completions_locally, main, split_reasoning
from hf_dflash.data.on_policy import PromptConversation, Reply


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


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A tiny target with its tokenizer on disk. Several ids end its replies, so some end by themselves."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer(CHATML_TEMPLATE)
    target = make_target("qwen3", vocab_size=len(tokenizer))
    target.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(30, 44)]
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- one conversation


def answer(conversation, *replies):
    asked = []
    for reply in replies:
        asked.append([(message["role"], message["content"]) for message in conversation.messages])
        conversation.add(reply)
    return asked


def test_every_assistant_turn_is_written_anew_and_shown_to_the_next():
    conversation = PromptConversation(
        {
            "id": 5,
            "licence": "MIT",
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "of another model"},
                {"from": "human", "value": "two"},
                {"from": "gpt", "value": "of another model"},
            ],
        }
    )
    first = Reply("first", reasoning_content="hm", completion_token_ids=[4, 5], num_tokens=2)
    asked = answer(conversation, first, Reply("second", completion_token_ids=[6], finish_reason="length"))
    assert asked == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "one"), ("assistant", "first"), ("user", "two")],
    ]
    assert conversation.is_finished
    assert conversation.completion_row() == {
        "id": "5",
        "licence": "MIT",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {
                "role": "assistant",
                "content": "first",
                "reasoning_content": "hm",
                "finish_reason": "stop",
                "completion_token_ids": [4, 5],
            },
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "second"},
        ],
        "finish_reason": "length",
        "completion_token_ids": [6],
    }


@pytest.mark.parametrize("reply", [Reply("cut", finish_reason="length"), Reply(" ")])
def test_a_conversation_ends_behind_a_reply_that_is_cut_or_empty(reply):
    turns = [("user", "one"), ("assistant", "a"), ("user", "two"), ("assistant", "b"), ("user", "three")]
    conversation = PromptConversation({"messages": [{"role": r, "content": c} for r, c in turns]})
    answer(conversation, reply)
    assert conversation.is_finished
    row = conversation.completion_row()
    assert row["turns_left_out"] == 2
    assert [message["content"] for message in row["messages"]] == ["one", reply.content]


def tool_conversation():
    call = {"id": "recorded", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    return PromptConversation(
        {
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
            "messages": [
                {"role": "user", "content": "Is it warm in Rome?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "31 degrees", "tool_call_id": "recorded"},
                {"role": "assistant", "content": "It is."},
            ],
        }
    )


def test_a_tool_result_follows_only_the_same_call():
    conversation = tool_conversation()
    call = {"id": "new", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Roma"}'}}
    answer(conversation, Reply("", tool_calls=[call], finish_reason="tool_calls"))
    assert not conversation.is_finished
    assert conversation.messages[-1] == {"role": "tool", "content": "31 degrees", "tool_call_id": "new"}
    answer(conversation, Reply("Yes, 31 degrees."))
    assert conversation.is_finished and "turns_left_out" not in conversation.completion_row()

    conversation = tool_conversation()
    answer(conversation, Reply("I do not know."))
    assert conversation.is_finished
    assert conversation.completion_row()["turns_left_out"] == 1


def test_a_row_without_an_id_gets_the_same_one_every_time():
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"messages": [{"role": "human", "content": "a"}]}]
    first, second, third = (PromptConversation(row).id for row in rows)
    assert first == third != second


# ---- reasoning


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


# ---- limits


def test_a_run_that_writes_nothing_is_stopped():
    watch = ReplyWatch(ReplyLimits(max_empty_share=0.05, min_rows=100))
    with pytest.raises(RepliesRefused, match=r"87\.0% of the latest 100 replies are empty"):
        for number in range(1000):
            watch.replied(Reply("" if number % 100 < 87 else f"reply {number}"))


def test_a_run_that_repeats_itself_is_stopped_even_when_it_starts_late():
    watch = ReplyWatch(ReplyLimits(max_identical_share=0.2, window=500, min_rows=100))
    for number in range(5000):
        watch.replied(Reply(f"reply {number}"))
    with pytest.raises(RepliesRefused, match="I am sorry"):
        for _ in range(102):
            watch.replied(Reply("I am sorry."))


def test_a_run_whose_prompts_fail_is_stopped():
    watch = ReplyWatch(ReplyLimits(max_failed_share=0.5, min_rows=100))
    with pytest.raises(RepliesRefused, match="100.0% .* failed .* connection refused"):
        for _ in range(100):
            watch.failed("connection refused")


def test_good_replies_pass_the_limits_and_the_window_forgets():
    watch = ReplyWatch(ReplyLimits(window=300, min_rows=100))
    for number in range(3000):
        watch.replied(Reply("" if number % 50 == 0 else "yes" if number % 10 == 0 else f"reply {number}"))
    assert len(watch._window) == 300
    assert sum(watch._kinds.values()) == 300
    assert watch.counts["empty"] == 60


# ---- the folder


def fill(folder, numbers):
    for number in numbers:
        reply = Reply(f"reply {number}")
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply.content}]
        folder.add({"id": str(number), "messages": messages, "finish_reason": "stop"}, [reply])


def test_a_line_that_a_kill_cut_is_written_again(tmp_path):
    with CompletionFolder(tmp_path, {}, shard_rows=4) as folder:
        fill(folder, range(6))
    open_shard = tmp_path / "completions-00001.jsonl.partial"
    open_shard.write_bytes(open_shard.read_bytes()[:-9])
    with CompletionFolder(tmp_path, {}, shard_rows=4) as folder:
        assert folder.answered == {"0", "1", "2", "3", "4"}
        fill(folder, range(5, 9))
        manifest = folder.finish()
    assert [row["id"] for row in read_completions(tmp_path)] == [str(number) for number in range(9)]
    assert manifest["counts"]["rows"] == 9
    assert sorted(path.name for path in tmp_path.glob("completions*")) == [
        f"completions-0000{number}.jsonl" for number in range(3)
    ]


def test_a_folder_of_another_run_is_refused(tmp_path):
    with CompletionFolder(tmp_path, {"temperature": 0}) as folder:
        fill(folder, range(2))
    with pytest.raises(ValueError, match="temperature: 0, now 1"):
        CompletionFolder(tmp_path, {"temperature": 1}).__enter__()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="holds something else"):
        CompletionFolder(tmp_path, {"temperature": 0}).__enter__()


def test_two_processes_cannot_write_the_same_folder(tmp_path):
    with (
        CompletionFolder(tmp_path, {}),
        pytest.raises(ValueError, match="Another process"),
        CompletionFolder(tmp_path, {}),
    ):
        pass


def test_a_closed_shard_that_is_damaged_is_named(tmp_path):
    with CompletionFolder(tmp_path, {}, shard_rows=2) as folder:
        fill(folder, range(2))
    shard = tmp_path / "completions-00000.jsonl"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"completions-00000\.jsonl, line 2 is not a completion"):
        CompletionFolder(tmp_path, {}).__enter__()


# ---- local generation


def test_replies_are_those_of_generate_and_tokenize_takes_them_as_they_are(tmp_path, target_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "There is no prompt in .*prompts.jsonl"),
        ("{not json\n", "Not one of 1 prompts.*prompts.jsonl:1: .*bad_json|JSON"),
    ],
)
def test_a_run_without_one_answer_is_an_error_that_says_why(tmp_path, target_folder, lines, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(lines)
    with pytest.raises(ValueError, match=message):
        main([str(prompts), str(tmp_path / "out"), "--target", str(target_folder), "--devices", "cpu"])


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
