# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import datasets
import numpy as np
import pytest
from tiny_models import VOCAB_SIZE
from tiny_tokenizers import CHATML_TEMPLATE, THINKING_TEMPLATE, make_tokenizer

from hf_dflash.data.agreement import measure_target_agreement
from hf_dflash.data.checks import (
    DatasetGates,
    DatasetRefused,
    describe_report,
    find_manifest,
    hash_reply,
    load_dataset_report,
    main,
    run_gates,
)
from hf_dflash.data.tokenization import main as tokenize_main
from hf_dflash.data.tokenization import tokenize_completions


def dataset_of(replies, prompt_length=10):
    """A dataset that was made elsewhere: tokens and masks only."""
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[1] * prompt_length + list(reply) for reply in replies],
            "loss_mask": [[False] * prompt_length + [True] * len(reply) for reply in replies],
        }
    )


def replies(count, length=20, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, (count, length)).tolist()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        # 2 of 100 are short: 2%.
        (replies(98) + [[1, 2]] * 1 + [[3, 4]], {}, r"2 of 100 rows \(2\.0%\) have fewer than 16 supervised tokens"),
        (replies(98) + [[7] * 20] * 2, {}, r"one and the same reply is in 2 of 100 rows \(2\.0%\)"),
        (replies(100), {"min_supervised_share": 0.7}, r"66\.7% of 3,000 tokens are supervised; limit 70\.0%"),
        (replies(100, length=15), {}, "100 of 100 rows"),
        ([[]] * 3, {}, "nothing is supervised: 3 rows, 30 tokens"),
        (replies(1, length=3), {}, r"1 of 1 rows \(100\.0%\)"),
    ],
)
def test_a_failed_gate_stops_with_the_numbers_and_the_option(rows, options, message):
    with pytest.raises(DatasetRefused, match=message):
        run_gates(dataset_of(rows), gates=DatasetGates(**options))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (replies(100), {}),
        (replies(99) + [[1, 2]], {}),  # exactly 1%
        (replies(98) + [[7] * 20] * 2, {"max_reply_share": 0.02}),
        (replies(98) + [[1, 2], [3, 4]], {"max_short_share": 0.02}),
        (replies(10) + [[1, 2]], {}),  # a single row refuses nothing
        (replies(100, length=15), {"block_size": 8}),
    ],
)
def test_a_dataset_within_the_limits_passes(rows, options):
    results = run_gates(dataset_of(rows), gates=DatasetGates(**options))
    assert len(results) == 4 and all(result.passed for result in results)


def test_the_drafters_block_size_goes_before_the_gates():
    dataset = dataset_of(replies(100, length=12))
    run_gates(dataset, block_size=12)
    with pytest.raises(DatasetRefused, match="fewer than 13 supervised"):
        run_gates(dataset, block_size=13)


def test_a_dataset_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="no column loss_mask"):
        run_gates(datasets.Dataset.from_dict({"input_ids": [[1, 2]]}))
    with pytest.raises(ValueError, match="Row 0 has 2 input_ids but 1 values in loss_mask"):
        run_gates(datasets.Dataset.from_dict({"input_ids": [[1, 2]], "loss_mask": [[1]]}))
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        run_gates("no/such/folder")


def test_columns_of_tokenize_and_tokens_alone_give_the_same_statistics(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": f"{n % 7}", "completion": f"The reply to {n % 7} is a reply of {n % 7} words."} for n in range(50)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = tokenize_completions(
        path, make_tokenizer(CHATML_TEMPLATE), tmp_path / "out", gates=None, num_workers=1, disable_tqdm=True
    )
    report = load_dataset_report(dataset)
    bare = load_dataset_report(dataset.select_columns(["input_ids", "loss_mask"]))
    assert (bare.lengths, bare.supervised_lengths) == (report.lengths, report.supervised_lengths)
    assert bare.frequent_replies == report.frequent_replies
    assert [item["count"] for item in report.frequent_replies] == [8, 7, 7, 7, 7]
    assert report.duplicate_share == bare.duplicate_share == 1 - 7 / 50
    # Rows that somebody has chosen are judged as they are, without the manifest of the whole.
    chosen = dataset.select(range(0, 50, 2))
    assert find_manifest(dataset) is not None and find_manifest(chosen) is None
    assert load_dataset_report(chosen).num_rows == 25


def test_equal_replies_have_equal_hashes_and_others_do_not():
    ids = np.arange(1000, dtype=np.int32)
    assert hash_reply(ids) == hash_reply(ids.copy()) != hash_reply(ids[1:])
    assert -(2**63) <= hash_reply(ids) < 2**63


@pytest.fixture(scope="module")
def thinking_target(tmp_path_factory):
    """Tokenizer and template alone: whoever loads a model from here fails."""
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer(THINKING_TEMPLATE).save_pretrained(folder)
    return folder


def completions_87_percent_empty(form, tokenizer):
    """1,000 completions of which 870 are the end of an empty thought and the end of the turn: six tokens."""
    six = tokenizer.encode("\n</think>\n\n<|im_end|>")
    for number in range(1000):
        row = {"messages": [{"role": "user", "content": f"What is {number}?"}]}
        if number % 100 >= 87:
            text = f"I think of {number}.\n</think>\n\nThe number {number} is what it is, and that is all of it."
            row["messages"].append({"role": "assistant", "content": text})
        elif form == "text":
            row["messages"].append({"role": "assistant", "reasoning_content": "", "content": ""})
        else:
            row["completion_token_ids"] = six
        yield row


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_the_dataset_that_is_87_percent_empty_is_refused_by_tokenize_check_and_train(
    form, thinking_target, tmp_path, capsys
):
    source, output = tmp_path / "completions.jsonl", tmp_path / "dataset"
    rows = completions_87_percent_empty(form, make_tokenizer(THINKING_TEMPLATE))
    source.write_text("\n".join(json.dumps(row) for row in rows))

    assert tokenize_main([str(source), "--target", str(thinking_target), "--output", str(output), "--quiet"]) == 1
    assert "870 of 1,000 rows (87.0%) have fewer than 16 supervised tokens" in capsys.readouterr().err
    assert main([str(output), "--target", str(thinking_target)]) == 1
    printed = capsys.readouterr()
    assert "FAIL  870 of 1,000 rows (87.0%)" in printed.out and "refused" in printed.err
    with pytest.raises(DatasetRefused, match=r"870 of 1,000 rows \(87\.0%\)"):
        run_gates(output, block_size=16)
    # Starting again does not get around it.
    assert tokenize_main([str(source), "--target", str(thinking_target), "--output", str(output), "--quiet"]) == 1

    # `train` stops before it looks for a model: there is none in this folder.
    from hf_dflash.training.run import main as train_main

    train = ["--target", str(thinking_target), "--completions", str(source), "--output_dir", str(tmp_path / "drafter")]
    with pytest.raises(DatasetRefused, match=r"870 of 1,000 rows \(87\.0%\)"):
        train_main([*train, "--use_cpu", "True"])


def test_the_report_is_one_screen_json_and_a_picture(thinking_target, tmp_path, capsys):
    rows = []
    for number in range(200):
        reply = (
            f"I think of {number}.\n</think>\n\nThe number {number} is what it is, and that is all there is to say."
        )
        rows.append({"prompt": f"What is {number}?", "completion": reply})
    rows[3]["finish_reason"] = rows[4]["finish_reason"] = "length"
    rows[5]["completion"] = "\n</think>\n\nThe number 5, without a thought, but long enough to be of use for a block."
    rows[7] = {"prompt": "What?"}
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert (
        tokenize_main([str(source), "--target", str(thinking_target), "--output", str(tmp_path / "d"), "--quiet"]) == 3
    )
    capsys.readouterr()

    assert main([str(tmp_path / "d"), "--color"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 50
    assert "rows read               200" in printed and "missing_field" in printed
    assert "cut by a length limit 1.0%" in printed and "thinking empty 0.5%" in printed
    # The supervised span, and nothing else, is green; the prompt before it is not.
    assert "<think>⏎\033[0m\033[32mI think of 0.⏎</think>⏎⏎The number 0 is" in printed
    assert "<|im_end|>\033[0m" in printed

    report = json.loads((tmp_path / "d" / "report.json").read_text())
    assert report["num_rows"] == 199 and report["counts"]["rows_skipped"] == {"missing_field": 1}
    assert report["cut_share"] == 2 / 199 and report["empty_thinking_share"] == 1 / 199
    assert sum(report["lengths"]["counts"]) == sum(report["supervised_lengths"]["counts"]) == 199
    assert (tmp_path / "d" / "report.png").read_bytes().startswith(b"\x89PNG")
    text = describe_report(load_dataset_report(tmp_path / "d", num_samples=1))
    assert "[[" in text and "\033" not in text


def test_the_share_of_tokens_that_are_the_targets_argmax(tiny_qwen3):
    import torch

    greedy, other = [], []
    for start in range(6):
        ids = torch.tensor([[start + 5, 7, 9]])
        out = tiny_qwen3.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0
        ].tolist()
        greedy.append(out)
        other.append(out[:3] + [(token + 1) % VOCAB_SIZE for token in out[3:]])
    mask = [[False] * 3 + [True] * 12] * 6
    own = datasets.Dataset.from_dict({"input_ids": greedy, "loss_mask": mask})
    assert measure_target_agreement(own, tiny_qwen3) == {"share": 1.0, "num_tokens": 72, "num_rows": 6}
    foreign = datasets.Dataset.from_dict({"input_ids": other, "loss_mask": mask})
    assert measure_target_agreement(foreign, tiny_qwen3, num_rows=4)["share"] < 0.5
    with pytest.raises(ValueError, match="it is another target"):
        measure_target_agreement(
            datasets.Dataset.from_dict({"input_ids": [[0, 10**6]], "loss_mask": [[False, True]]}), tiny_qwen3
        )
