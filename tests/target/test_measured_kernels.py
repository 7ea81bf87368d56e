# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Kept configurations are in `fla`'s own form. `fla` needs Triton, so a stand-in takes its place here; the real one reads them in
tests/gpu/test_compiled_target.py."""

import hashlib
import json
import os
import sys
from enum import Enum
from types import ModuleType

import pytest

from hf_dflash.target import measured_kernels


@pytest.fixture
def fla_cache(monkeypatch):
    class FlaCacheMode(Enum):
        DISABLED = "disabled"
        STRICT = "strict"

    cache = ModuleType("fla.ops.utils.cache")
    cache.FlaCacheMode, cache.FLA_CACHE_MODE = FlaCacheMode, FlaCacheMode.DISABLED
    cache.get_gpu_info = lambda: "NVIDIA_H200"
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.utils"].cache = cache
    monkeypatch.setitem(sys.modules, "fla.ops.utils.cache", cache)
    monkeypatch.delenv("FLA_CACHE_MODE", raising=False)
    # Set and taken away: so that it is away again behind the test.
    monkeypatch.setenv("FLA_CONFIG_DIR", "")
    monkeypatch.delenv("FLA_CONFIG_DIR")
    return cache


@pytest.mark.parametrize("path", sorted(measured_kernels.FOLDER.glob("*/*.json")), ids=lambda path: path.stem)
def test_each_configuration_stands_under_the_hash_of_its_key(path):
    kernel = json.loads(path.read_text())
    assert kernel["kernel_name"] == path.stem and kernel["autotune_entries"]
    for name, entry in kernel["autotune_entries"].items():
        key = json.dumps(entry["autotune_key"], separators=(",", ":"), sort_keys=True)
        assert name == hashlib.md5(key.encode()).hexdigest()
        assert set(entry["config"]) == {"kwargs", "num_warps", "num_ctas", "num_stages", "maxnreg"}


def test_fla_is_sent_to_the_folder_of_its_gpu(fla_cache):
    assert measured_kernels.use_measured_kernels()
    assert os.environ["FLA_CONFIG_DIR"] == str(measured_kernels.FOLDER / "NVIDIA_H200")
    assert fla_cache.FLA_CACHE_MODE is fla_cache.FlaCacheMode.STRICT


@pytest.mark.parametrize("variable", ["FLA_CACHE_MODE", "FLA_CONFIG_DIR"])
def test_a_users_own_choice_stays(variable, fla_cache, monkeypatch):
    monkeypatch.setenv(variable, "mine")
    assert not measured_kernels.use_measured_kernels()
    assert os.environ[variable] == "mine" and fla_cache.FLA_CACHE_MODE is fla_cache.FlaCacheMode.DISABLED


def test_other_gpus_and_older_releases_measure_for_themselves(fla_cache):
    fla_cache.get_gpu_info = lambda: "NVIDIA_RTX_4090"
    assert not measured_kernels.use_measured_kernels()
    del fla_cache.FlaCacheMode
    assert not measured_kernels.use_measured_kernels()
    assert "FLA_CONFIG_DIR" not in os.environ
