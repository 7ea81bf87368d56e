# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The benchmarks of speed in their tiny form: they run, and save what they measured."""

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_target
from tiny_tokenizers import make_tokenizer


FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(script: str, *arguments: str) -> dict:
        monkeypatch.syspath_prepend(str(FOLDER))
        output = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [script, "--tiny", "--output", str(output), *arguments])
        with pytest.raises(SystemExit) as error:
            runpy.run_path(str(FOLDER / script), run_name="__main__")
        assert not error.value.code
        result = json.loads(output.read_text())
        assert result["device"] == "cpu" and "torch" in result["versions"]
        failed = {stage: values for stage, values in result["stages"].items() if "not measured" in values}
        assert not failed
        return result

    return run


def test_train_step(run):
    stages = run("train_step.py", "--stages", "loss", "ours", "profile")["stages"]
    assert stages["profile"]["all ms"] > 0 and len(stages["profile"]["kernels"]) == 25
    assert stages["hf_dflash, fp32"]["step_ms"] > 0 and stages["labels"]["positions"] > 0
    assert stages["hf_dflash with FP8 head, fp32"]["step_ms"] > 0 and "loss, fp8, eager, 2^28 logits at once" in stages


def test_fp8_head(run):
    stages = run("fp8_head.py")["stages"]
    error = {name: values.get("hidden states: error, %") for name, values in stages.items()}
    assert 0 < error["gradient, FP8"] < error["gradient, FP8, label rounded too"] < 10
    assert {f"training, {how}, seed 0" for how in ("head_fp8", "head as it is")} <= set(stages)


def test_target_forward(run):
    stages = run("target_forward.py")["stages"]
    assert {"stock", "labels, stock", "half of the layers", "ours, FP8"} <= set(stages)


def test_labels_that_change_on_real_replies_are_counted_against_both_precisions(run, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    make_target("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl.gz"
    with gzip.open(text, "wt") as lines:
        for reply in ("Paris is the capital", "seven", ""):
            messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": reply}]
            lines.write(json.dumps({"messages": messages}) + "\n")
    stage = run("target_forward.py", "--stages", "--model", str(tmp_path / "model"), "--text", str(text))["stages"]
    result = stage["labels of model"]
    assert result["conversations"] == 3 and result["matrices in FP8"] > 0
    replies = [tokenizer.encode(f"{reply}<|im_end|>\n") for reply in ("Paris is the capital", "seven", "")]
    assert result["labels"] == sum(map(len, replies))
    assert 0 <= result["FP8: share that differs from bf16"] < 1 and "bf16: share that differs from fp32" in result


def test_kernels_are_sorted_into_kinds(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from measuring import kind_of_kernel

    kinds = {
        "triton_tem_fused_flex_attention_backward_12": "attention ms",
        "triton_poi_fused_mul_silu_flash_3": "element-wise and sums ms",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT": "products ms",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "delta rule ms",
        "_cross_entropy_kernel": "loss ms",
        "Memcpy DtoD (Device -> Device)": "copies ms",
    }
    assert {name: kind_of_kernel(name) for name in kinds} == kinds


def test_decoding_host_time(run):
    result = run("decoding_host_time.py")
    stages = result["stages"]
    assert list(stages) == ["plain", "transformers", "ours"] and stages["plain"]["drafter_ms"] == 0
    # The same drafts are accepted on both sides.
    assert stages["ours"]["blocks"] == stages["transformers"]["blocks"] > 0
    assert set(result["ratios"]) == {"block: transformers / ours", "rest: transformers / ours"}


def test_memory(run):
    stages = run("memory.py")["stages"]
    assert stages["varied steps"]["compiled anew"] == 0 and stages["fp32, GiB"]["parameters"] >= 0


def test_a_stage_that_fails_or_takes_too_long_leaves_the_others_and_says_why(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import time

    from measuring import Report

    report = Report(tmp_path / "report.json", torch.device("cpu"))
    report.run("slow", lambda: time.sleep(5), seconds=1)
    report.run("wrong", lambda: {}["no key"])
    report.run("right", lambda: {"ms": 1.23456})
    stages = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert "longer than 1 s" in stages["slow"]["not measured"] and "KeyError" in stages["wrong"]["not measured"]
    assert stages["right"] == {"ms": 1.235}


def test_bit_equality(run):
    stages = run("bit_equality.py", "--steps", "3")["stages"]
    assert stages["ahead"]["signatures"] > 100
    assert {stages[way]["differing"] for way in stages if way != "warm-up"} == {0}


def test_bit_equality_names_the_first_thing_that_differs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from bit_equality import Recorder, compare

    def recorder(values):
        made = Recorder.__new__(Recorder)
        made.names = [
            "features, taken",
            "labels, taken",
            "features, released",
            "labels, released",
            "end of step 1",
        ] * 2
        made.values = values
        return made

    def rows(*values):
        return [torch.tensor([value, 0]) for value in values]

    one, other = recorder(rows(*range(10))), recorder(rows(*range(8), 0, 9))
    assert compare(one, one) == {"signatures": 10, "differing": 0}
    first = "labels, released (1 of 2 rows, 0 to 0)"
    assert compare(one, other) == {"signatures": 10, "differing": 1, "first in step": 2, "first": first}
    still = recorder(rows(3, 4, 3, 4, 0, 5, 6, 5, 6, 0))
    changing = recorder(rows(3, 4, 3, 4, 0, 5, 6, 9, 8, 0))
    assert (still.changed_while_read(), changing.changed_while_read()) == (0, 1)
