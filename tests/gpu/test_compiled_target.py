# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""On CUDA: the compiled target against stock transformers, `fla`'s kernels, FP8 products."""

import json

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_target
from torch import nn
from torch._dynamo.utils import counters

from hf_dflash.target.fp8 import Fp8Linear
from hf_dflash.target.frozen_target import FrozenTarget
from hf_dflash.target.measured_kernels import FOLDER, use_measured_kernels


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IDS = [0, 2, 4]
# `fla` takes head widths from 16 on.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def make_frozen(kind, dtype=torch.bfloat16):
    """The same weights in either precision."""
    if kind == "qwen3_5":
        pytest.importorskip("fla")
    overrides = WIDE if kind == "qwen3_5" else {"hidden_size": 128, "head_dim": 32}
    return FrozenTarget(make_target(kind, torch.bfloat16, **overrides).to(dtype).cuda(), IDS)


def make_batch(rows, length):
    generator = torch.Generator().manual_seed(rows * length)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    return torch.randint(6, VOCAB_SIZE, (rows, length), generator=generator), lengths


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3", "llama"])
def test_features_are_as_near_to_those_in_fp32_as_those_of_stock_transformers(kind):
    exact, stock, compiled = make_frozen(kind, torch.float32), make_frozen(kind), make_frozen(kind).compile_layers()
    for rows, length in ((3, 200), (1, 65), (4, 513)):
        batch = make_batch(rows, length)
        positions = torch.arange(int(batch[1].sum()))
        three = [target(*batch, positions, return_label_hidden_states=True) for target in (exact, stock, compiled)]
        for name in ("context_hidden_states", "label_hidden_states"):
            expected, one, two = (getattr(features, name).float() for features in three)
            assert (two - expected).norm() < 1.1 * (one - expected).norm(), name
        # How far the label is from the best token in fp32: of two that are as good, either may be taken.
        logits = three[0].label_hidden_states @ exact.head.weight.T
        behind = [(logits.max(-1).values - logits.gather(-1, f.label_ids[:, None])[:, 0]).mean() for f in three[1:]]
        assert behind[1] < 1.5 * behind[0] + 0.01 * logits.std()


def test_fla_finds_the_kept_configurations(monkeypatch):
    pytest.importorskip("fla")
    from fla.ops.utils import cache

    for variable in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(cache, "FLA_CACHE_MODE", cache.FlaCacheMode.DISABLED)
    monkeypatch.setattr(cache, "get_gpu_info", lambda: "NVIDIA_H200")
    assert use_measured_kernels()
    for path in sorted((FOLDER / "NVIDIA_H200").iterdir()):
        for entry in json.loads(path.read_text())["autotune_entries"].values():
            key = cache.AutotuneKey(tuple(entry["autotune_key"]))
            assert cache.load_cached_config(path.stem, key) == entry["config"]


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3"])
def test_nothing_is_compiled_anew_for_other_lengths(kind):
    target = make_frozen(kind).compile_layers()
    for rows, length in ((3, 200), (1, 100), (2, 70)):
        target(*make_batch(rows, length))
    known = counters["stats"]["unique_graphs"]
    for index in range(20):
        target(*make_batch(1 + index % 5, 50 + 37 * index))
    assert counters["stats"]["unique_graphs"] == known


def test_the_host_never_waits_for_the_target():
    target = make_frozen("qwen3").compile_layers()
    input_ids, lengths = make_batch(3, 100)
    positions = torch.arange(20)
    for wanted in (None, positions):
        target(input_ids, lengths, wanted)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            target(input_ids, lengths, wanted)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fp8_products_are_those_of_the_reference_on_the_cpu():
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=True).bfloat16()
    states = torch.randn(2, 37, 256).bfloat16()
    reduced = Fp8Linear(linear)
    expected = reduced(states)
    out = reduced.cuda()(states.cuda()).cpu()
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0.02)
    error = (expected.float() - linear(states).float()).norm() / linear(states).float().norm()
    assert error < 0.06
