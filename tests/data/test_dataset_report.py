# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

from tiny_tokenizers import CHATML_TEMPLATE, make_tokenizer

from hf_dflash.data.dataset_report import load_dataset_report
from hf_dflash.data.tokenization import tokenize_completions
from hf_dflash.data.tokenized_dataset import find_manifest


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
