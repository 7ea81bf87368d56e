# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import shutil

import pytest
from tiny_models import make_target
from tiny_tokenizers import THINKING_TEMPLATE, make_tokenizer

from hf_dflash.data.check_command import main
from hf_dflash.data.dataset_gates import DatasetRefused, run_gates
from hf_dflash.data.dataset_report import load_dataset_report
from hf_dflash.data.report_rendering import describe_report
from hf_dflash.data.tokenize_command import main as tokenize_main


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

    # `train` stops before it loads a model: there is but a config in this folder.
    from hf_dflash.training.run import main as train_main

    target = shutil.copytree(thinking_target, tmp_path / "target")
    make_target("qwen3", vocab_size=len(make_tokenizer()) + 1).config.save_pretrained(target)
    train = ["--target", str(target), "--completions", str(source), "--output_dir", str(tmp_path / "drafter")]
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
