# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import gzip
import inspect
import json
import sys

import pytest
import torch
from oracle_drafter import make_drafter, make_oracle
from tiny_models import make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dflash.cli import main as hf_dflash
from hf_dflash.evaluation.benchmark import (
    AcceptanceReport,
    PromptResult,
    encode_prompt,
    find_first_difference,
    load_prompts,
    measure_acceptance,
)


TEMPLATE = (
    "{% for m in messages %}{{ 'user' if m.role == 'user' else 'assistant' }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking %}think {% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    words = ["pad", "begin", "stop", "user", "assistant", "end", "think"] + [f"w{i}" for i in range(7, 96)]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w7"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, pad_token="pad", eos_token="stop")


def make_result(acceptance_lengths, domain="a", **fields):
    defaults = {
        "id": "x",
        "num_prompt_tokens": 3,
        "num_new_tokens": 1 + sum(acceptance_lengths),
        "num_target_passes": 1 + len(acceptance_lengths),
        "seconds": 1.0,
    }
    return PromptResult(domain=domain, acceptance_lengths=acceptance_lengths, **{**defaults, **fields})


def test_summary_names_both_means_and_splits_them_by_slot_and_domain():
    report = AcceptanceReport(
        {"block_size": 5},
        [
            make_result([5, 1, 3], plain_seconds=4.0, num_plain_tokens=10, first_difference=-1),
            make_result([2], domain="b", plain_seconds=2.0, num_plain_tokens=3, first_difference=1),
            make_result([], domain="b", plain_seconds=0.5, num_plain_tokens=1, first_difference=-1),
        ],
    )
    summary = report.summary()
    assert summary["acceptance_length_micro"] == 11 / 4
    assert summary["acceptance_length_macro"] == (3 + 2) / 2
    assert summary["acceptance_by_slot"] == [3 / 4, 2 / 4, 1 / 4, 1 / 4]
    assert 1 + sum(summary["acceptance_by_slot"]) == summary["acceptance_length_micro"]
    assert summary["acceptance_histogram"] == [1, 1, 1, 0, 1]
    assert summary["target_passes_per_token"] == (4 + 2 + 1) / (10 + 3 + 1)
    assert summary["speedup"] == pytest.approx((14 / 3) / (14 / 6.5))
    # At that length a block would take exactly the time of as many plain tokens.
    assert summary["break_even_acceptance_length"] == pytest.approx((3 / 4) * (14 / 6.5))
    assert (summary["num_identical"], summary["num_compared"]) == (2, 3)
    assert report.summary("b")["acceptance_length_micro"] == 2
    table = report.to_markdown().splitlines()
    assert [line.split(" | ")[0] for line in table[2:5]] == ["| a", "| b", "| all"]


def test_decoding_prompts_gives_what_an_oracle_dictates(tokenizer):
    target = make_target("qwen3_5", torch.float64)
    rows = [
        {"id": "one", "messages": [{"role": "user", "content": "w9 w10"}]},
        {"id": "two", "prompt": "w33", "domain": "other"},
    ]
    sequences = []
    for row in rows:
        input_ids = encode_prompt(tokenizer, row.get("messages") or [{"role": "user", "content": "w33"}], True)
        mask = torch.ones_like(input_ids)
        sequences.append(
            target.generate(input_ids, attention_mask=mask, max_new_tokens=40, eos_token_id=10_000)[0].tolist()
        )
    oracle = make_oracle(target, block_size=4).plan(sequences, lambda: 2)
    report = measure_acceptance(
        target,
        oracle,
        rows,
        tokenizer,
        max_new_tokens=10,
        eos_token_id=10_000,
        enable_thinking=True,
        progress=False,
    )
    assert [r.acceptance_lengths for r in report.results] == [[3, 3, 3], [3, 3, 3]]
    assert [r.first_difference for r in report.results] == [-1, -1]
    assert [r.num_target_passes for r in report.results] == [4, 4]
    assert report.domains == ["prompts", "other"]
    assert report.acceptance_length == 3
    json.dumps(report.to_dict())


def test_turns_are_asked_one_after_the_other_with_the_targets_own_answers(tokenizer):
    target = make_target("qwen3", torch.float64)
    drafter = make_drafter(target)
    prompts = [{"id": "talk", "turns": ["w9", "w10 w11"]}]
    report = measure_acceptance(
        target, drafter, prompts, tokenizer, max_new_tokens=6, enable_thinking=True, progress=False
    )
    assert [r.id for r in report.results] == ["talk", "talk/turn2"]
    first = encode_prompt(tokenizer, [{"role": "user", "content": "w9"}], True)
    answer = target.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=6)[0, first.shape[1] :]
    kept = [token for token in answer.tolist() if token not in tokenizer.all_special_ids]
    # user w9 end assistant <answer> end user w10 w11 end assistant think
    assert report.results[1].num_prompt_tokens == 4 + len(kept) + 1 + 4 + 2


def test_thinking_is_passed_to_the_template(tokenizer):
    messages = [{"role": "user", "content": "w9"}]
    with_thinking = encode_prompt(tokenizer, messages, True)[0].tolist()
    without = encode_prompt(tokenizer, messages, False)[0].tolist()
    assert with_thinking == [*without, tokenizer.convert_tokens_to_ids("think")]


def test_without_a_word_about_thinking_the_template_decides_as_it_does_when_completions_are_written(tokenizer):
    messages = [{"role": "user", "content": "w9"}]
    thinks = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    thinks.chat_template = "{{ messages[0].content }} {{ 'w10' if enable_thinking is not defined else 'w11' }}"
    assert encode_prompt(thinks, messages)[0].tolist() == [9, 10]
    assert encode_prompt(thinks, messages, True)[0].tolist() == [9, 11]


def test_a_conversation_is_not_cut_down_to_its_last_message_where_there_is_no_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert encode_prompt(bare, [{"role": "user", "content": "w9"}])[0].tolist() == [9]
    with pytest.raises(ValueError, match="no chat template, which a conversation of 2 messages needs"):
        encode_prompt(bare, [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}])


def measured_settings(target, tokenizer, **options):
    options = {"max_new_tokens": 3, "progress": False, "compare_with_plain": False, **options}
    return measure_acceptance(target, make_drafter(target), [{"prompt": "w9"}], tokenizer, **options).settings


@pytest.mark.compat
def test_settings_name_what_decides_the_tokens_wherever_it_comes_from(tokenizer):
    target = make_target("qwen3")
    assert not measured_settings(target, tokenizer).keys() & {"temperature", "top_k", "top_p", "repetition_penalty"}
    target.generation_config.temperature, target.generation_config.repetition_penalty = 0.7, 1.3
    greedy = measured_settings(target, tokenizer)
    assert greedy["repetition_penalty"] == 1.3 and "temperature" not in greedy
    drawn = measured_settings(target, tokenizer, do_sample=True, top_p=0.9)
    # 50 is the one of `generate` itself.
    assert [drawn[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")] == [0.7, 0.9, 50, 1.3]


def test_a_prompt_that_does_not_fit_the_targets_context_is_named(tokenizer, caplog):
    target = make_target("qwen3")
    target.config.max_position_embeddings = 8
    measured_settings(target, tokenizer, max_new_tokens=4)
    assert not caplog.records
    measured_settings(target, tokenizer, max_new_tokens=5)
    assert "Prompt 0 and its reply may take 4 + 5 tokens, but the target was made for 8" in caplog.text


def test_evaluate_command_writes_table_json_and_plot(tokenizer, tmp_path, capsys, monkeypatch):
    target = make_target("qwen3_5")
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(target, block_size=4).save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w9 w10"}\n\n{"prompt": "w33"}\n{"prompt": "w34"}\n')
    arguments = ["evaluate", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    arguments += [
        "--prompts",
        str(prompts),
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
        "--output",
        str(tmp_path / "out"),
    ]
    arguments += ["--no-enable-thinking", "--device", "cpu"]
    assert hf_dflash(arguments) == 0
    result = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert result["summary"]["num_prompts"] == 2
    assert result["settings"]["enable_thinking"] is False
    assert (result["summary"]["num_identical"], result["summary"]["num_compared"]) == (2, 2)
    assert (tmp_path / "out" / "acceptance.md").read_text().strip() in capsys.readouterr().out
    picture = tmp_path / "out" / "acceptance.png"
    assert picture.read_bytes().startswith(b"\x89PNG")

    # Without matplotlib the figures are written all the same.
    picture.unlink()
    (tmp_path / "out" / "acceptance.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert hf_dflash(arguments) == 0
    assert "need matplotlib" in capsys.readouterr().err
    assert (tmp_path / "out" / "acceptance.json").exists() and not picture.exists()


def test_a_target_in_the_drafters_place_is_refused_by_name(tokenizer, tmp_path, capsys):
    make_target("qwen3_5").save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w9 w10"}\n')
    target = str(tmp_path / "target")
    assert hf_dflash(["evaluate", "--target", target, "--drafter", target, "--prompts", str(prompts)]) == 2
    assert f"--drafter {target} is no drafter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature 0.5", "--temperature changes nothing when decoding is greedy: add --do-sample"),
        ("--sample-drafts", "--sample_drafts changes nothing when decoding is greedy: add --do-sample"),
        ("--do-sample --temperature 0", "leave out --do-sample"),
        ("--do-sample --top-p 2", "top_p must be in (0, 1], but is 2.0"),
        ("--do-sample --top-p 0", "top_p must be in (0, 1], but is 0.0"),
        ("--output {file}", "is a file: give a folder"),
        ("", "--prompts gsm9k is neither a file here nor one of the sets gsm8k"),
    ],
)
def test_options_that_would_do_nothing_or_fail_late_are_refused_before_anything_loads(
    tmp_path, capsys, options, message
):
    (tmp_path / "file").touch()
    options = options.format(file=tmp_path / "file").split()
    assert hf_dflash(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "gsm9k", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--limit", "--max-new-tokens", "--tree-budget"])
def test_none_of_what_is_counted_is_refused_by_the_name_of_the_option(capsys, option):
    with pytest.raises(SystemExit):
        hf_dflash(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p.jsonl", option, "0"])
    assert f"argument {option}: must be at least 1, but is 0" in capsys.readouterr().err


def test_the_command_and_the_function_write_as_many_tokens(capsys):
    default = inspect.signature(measure_acceptance).parameters["max_new_tokens"].default
    with pytest.raises(SystemExit):
        hf_dflash(["evaluate", "--help"])
    assert f"of each turn (default: {default})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ("[1]\n", "line 1: a row is an object"),
        ('{"text": "a"}\n', r"line 1: a prompt has .* this row has \['text'\]"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: `messages` must end with a user turn"),
        ('{"turns": ["a", ""]}\n', "line 1: a user turn is a non-empty string"),
        ('{"turns": "Hello"}\n', "line 1: a user turn is a non-empty string, and `turns` a list of them"),
        ('{"messages": "Hello"}\n', "line 1: `messages` is a list of objects"),
        ('{"messages": ["a"]}\n', "line 1: `messages` is a list of objects"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: a user turn is a non-empty string"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_rows_get_ids_and_domains(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "id": 7, "source": "mt_bench/stem"}\n')
    rows = load_prompts(path)
    assert [(row["id"], row["domain"]) for row in rows] == [("gsm8k:1", "gsm8k"), ("7", "mt_bench/stem")]
    compressed = tmp_path / "gsm8k.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_prompts(compressed) == rows


def test_a_prompt_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}'))
    with pytest.raises(ValueError, match="prompts.jsonl, line 1: not JSON"):
        load_prompts(path)


def test_first_difference_counts_the_end_of_the_shorter_sequence():
    tokens = torch.tensor([1, 2, 3])
    assert find_first_difference(tokens, torch.tensor([1, 2, 3])) == -1
    assert find_first_difference(tokens, torch.tensor([1, 9, 3])) == 1
    assert find_first_difference(tokens, torch.tensor([1, 2])) == 2
