# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What every test relies on: no network, no telemetry, fixed seeds, and tiny frozen targets."""

import os


# Before anything imports huggingface_hub, datasets or tokenizers: they read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
from tiny_models import make_target
from transformers import set_seed


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


# No deadline: a busy machine is no failure. The same examples in every run, as with every other seed here.
hypothesis.settings.register_profile("hf_dflash", deadline=None, derandomize=True)
hypothesis.settings.load_profile("hf_dflash")


@pytest.fixture(autouse=True)
def fixed_seed():
    set_seed(0)


# Shared by all tests of a session: not to be changed. A test that changes a target makes its own with `make_target`.
@pytest.fixture(scope="session")
def tiny_llama():
    return make_target("llama")


@pytest.fixture(scope="session")
def tiny_qwen3():
    return make_target("qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_5():
    return make_target("qwen3_5")
