# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""An exported drafter as vLLM 0.33.0 and SGLang 0.5.23 read it: their own functions, out of their wheels (375 MB), which need
neither the engine nor a GPU. Run with `pytest -m slow tests/hub/test_engine_wheels.py`.

What is taken out of a file runs in a namespace of this test's: logging, tensor parallelism and attention kernels are stand-ins,
the reading of configs and the naming of weights are theirs.
"""

import ast
import collections.abc
import dataclasses
import enum
import json
import logging
import numbers
import re
import subprocess
import sys
import types
import typing
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_target
from transformers import AutoConfig, PreTrainedConfig

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.hub.layouts import export_drafter


pytestmark = pytest.mark.slow

TARGET_NAME = "some-org/tiny-target"
THETA = 5_000_000.0
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
# What each layer must come out as: window W (None: full attention), causal inside the block.
VARIANTS = {
    "full": ({}, [(None, False), (None, False)]),
    "causal": ({"is_causal": True}, [(None, True), (None, True)]),
    "sliding": (SLIDING, [(8, False), (None, False)]),
    "sliding, causal in the window": ({**SLIDING, "is_causal": None}, [(8, True), (None, False)]),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The Python files of both wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run(
        [*command, "--dest", str(folder), "vllm==0.33.0", "sglang==0.5.23"], capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"the engines' wheels cannot be downloaded: {result.stderr.strip().splitlines()[-1]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
    return folder


def take(path, names: list[str], **namespace) -> types.SimpleNamespace:
    """Functions, classes and constants of a file, `Class.method` too, without running the rest of it."""
    tree = ast.parse(path.read_text())
    found = {}
    for node in tree.body:
        targets = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        for name in [getattr(node, "name", None), *targets]:
            if name in names:
                found[name] = node
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    is_assigned = isinstance(part, ast.Assign) and part.targets[0].id
                    part_name = f"{name}.{getattr(part, 'name', is_assigned)}"
                    if part_name in names:
                        found[part_name] = part
    assert found.keys() == set(names), f"{path.name} has no {set(names) - found.keys()}"
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(future + [found[name] for name in names], type_ignores=[])
    namespace = {
        "Any": typing.Any,
        "Optional": typing.Optional,
        "torch": torch,
        "logger": logging.getLogger(),
        **namespace,
    }
    # Dataclasses look their module up.
    namespace["__name__"] = __name__
    exec(compile(module, str(path), "exec"), namespace)
    return types.SimpleNamespace(**{name.split(".")[-1]: namespace[name.split(".")[-1]] for name in names})


@pytest.fixture(params=VARIANTS)
def exported(request, tmp_path):
    """The folder, what its layers must be, and the drafter."""
    overrides, layers = VARIANTS[request.param]
    target = make_target("qwen3_5")
    config = create_drafter_config(
        target.config,
        num_hidden_layers=2,
        block_size=6,
        mask_token_id=95,
        num_target_features=2,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        **overrides,
    )
    config.target_name_or_path = TARGET_NAME
    drafter = DFlashForSpeculation(config)
    folder = export_drafter(drafter, tmp_path / "serving", target=target.config, engines=("vllm", "sglang"))
    return folder, layers, drafter


def expected_weights(num_layers: int, prefix: str) -> set[str]:
    names = {"fc", "hidden_norm", "norm"}
    for i in range(num_layers):
        names |= {f"layers.{i}.{part}" for part in ("input_layernorm", "post_attention_layernorm", "mlp.down_proj")}
        names |= {f"layers.{i}.self_attn.{part}" for part in ("o_proj", "q_norm", "k_norm")}
        names |= {f"layers.{i}.self_attn.qkv_proj[{shard}]" for shard in "qkv"}
        names |= {f"layers.{i}.mlp.gate_up_proj[{shard}]" for shard in (0, 1)}
    return {re.sub(r"(\[.\])?$", r".weight\1", prefix + name, count=1) for name in names}


# vLLM


def read_as_vllm(wheels, hf_config, layers) -> None:
    """All that vLLM's model and proposer take from a draft config."""
    vllm = wheels / "vllm"
    eagle = take(vllm / "transformers_utils/configs/eagle.py", ["EAGLEConfig"], PreTrainedConfig=PreTrainedConfig)
    config = eagle.EAGLEConfig(hf_config, method="dflash", model_type="eagle")
    assert config.architectures == ["DFlashDraftModel"]

    model = take(
        vllm / "model_executor/models/qwen3_dflash.py",
        ["_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention", "dflash_has_any_non_causal"],
        get_current_vllm_config=lambda: types.SimpleNamespace(use_v2_model_runner=True),
    )
    assert [model._resolve_layer_attention(config, i) for i in range(2)] == layers
    assert model.dflash_has_any_non_causal(config) == (not all(causal for _, causal in layers))

    aux = take(vllm / "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py", ["get_eagle3_aux_layers_from_config"])
    speculative_config = types.SimpleNamespace(draft_model_config=types.SimpleNamespace(hf_config=config))
    # Index 0 is the embedding, so output of layer k is index k + 1.
    assert aux.get_eagle3_aux_layers_from_config(speculative_config) == (2, 4)

    mask = take(vllm / "v1/worker/gpu/spec_decode/utils.py", ["get_parallel_drafting_token_id"])
    assert mask.get_parallel_drafting_token_id(config) == 95

    rope = take(vllm / "transformers_utils/config.py", ["set_default_rope_theta"])
    rope.set_default_rope_theta(config, default_theta=1_000_000)
    assert config.rope_parameters["rope_theta"] == THETA
    assert not {"mrope_section", "partial_rotary_factor"} & set(config.rope_parameters)


def test_vllm_reads_the_config(wheels, exported):
    folder, layers, drafter = exported
    assert drafter.config.target_layer_ids == [1, 3]
    read_as_vllm(wheels, AutoConfig.from_pretrained(folder), layers)


def take_speculators_config(wheels):
    folder = wheels / "vllm/transformers_utils/configs/speculators"
    algorithms = take(folder / "algos.py", ["SUPPORTED_SPECULATORS_TYPES", "register_speculator", "update_dflash"])
    return take(
        folder / "base.py",
        ["SpeculatorsConfig"],
        PreTrainedConfig=PreTrainedConfig,
        fields=dataclasses.fields,
        SUPPORTED_SPECULATORS_TYPES=algorithms.SUPPORTED_SPECULATORS_TYPES,
    ).SpeculatorsConfig


def test_vllm_serve_of_the_drafter_alone_finds_target_and_speculative_tokens(wheels, exported):
    folder, _, _ = exported
    config_dict = json.loads((folder / "config.json").read_text())
    speculative = take_speculators_config(wheels).extract_vllm_speculative_config(config_dict)
    assert speculative == {"method": "dflash", "num_speculative_tokens": 5}
    assert config_dict["speculators_config"]["verifier"]["name_or_path"] == TARGET_NAME


def test_vllm_reads_the_same_through_the_speculators_overlay(wheels, exported):
    """The way that vLLM goes if `model_type` is taken away."""
    folder, layers, drafter = exported
    config_dict = json.loads((folder / "config.json").read_text())
    config = take_speculators_config(wheels)(
        **take_speculators_config(wheels).extract_transformers_pre_trained_config(config_dict)
    )
    if drafter.config.is_causal is None:
        # Known trap of vLLM 0.33.0: one causality for all layers, taken from the flag of the sliding ones.
        layers = [(8, True), (None, True)]
    read_as_vllm(wheels, config, layers)


def test_vllm_finds_every_weight_and_no_other(wheels, exported):
    folder, _, drafter = exported
    models = wheels / "vllm/model_executor/models"
    common = {"re": re, "dataclass": dataclasses.dataclass, "field": dataclasses.field, "replace": dataclasses.replace}
    mapper_class = take(models / "utils.py", ["WeightsMapper"], **common).WeightsMapper
    seen = []

    class Loader:
        """Records instead of loading; `AutoWeightsLoader` passes names through the mapper of the module that it reaches."""

        def __init__(self, model):
            pass

        def load_weights(self, weights, mapper):
            seen.extend(mapper.apply(weights))

    taken = take(
        models / "qwen3_dflash.py",
        ["DFlashQwen3Model.hf_to_vllm_mapper", "DFlashQwen3ForCausalLM.load_weights"],
        re=re,
        WeightsMapper=mapper_class,
        AutoWeightsLoader=Loader,
        process_eagle_weight=lambda model, name: None,
    )
    inner = types.SimpleNamespace(
        use_aux_hidden_state=True, has_separate_mask_embedding=False, _build_fused_kv_buffers=lambda: None
    )
    tensors = load_file(folder / "model.safetensors")
    taken.load_weights(types.SimpleNamespace(model=inner, _read_mask_embedding=lambda: None), tensors.items())
    names = []
    for name, tensor in taken.hf_to_vllm_mapper.apply(seen):
        shard = getattr(tensor, "shard_id", None)
        names.append(name if shard is None else f"{name}[{shard}]")
    assert len(names) == len(tensors)
    assert set(names) == expected_weights(2, prefix="model.")


# SGLang


def take_from_sglang(wheels) -> types.SimpleNamespace:
    srt = wheels / "sglang/srt"
    common = {
        "dataclass": dataclasses.dataclass,
        "Sequence": collections.abc.Sequence,
        "Integral": numbers.Integral,
        "List": list,
        "Tuple": tuple,
        "Iterable": collections.abc.Iterable,
    }
    reading = take(
        srt / "speculative/dflash_utils.py",
        [
            "DEFAULT_DFLASH_MASK_TOKEN",
            "build_target_layer_ids",
            "get_dflash_layer_types",
            "get_dflash_attention_sliding_window_size",
            "_cfg_get",
            "_get_text_config",
            "_get_dflash_config",
            "is_nemotron_35_draft_config",
            "_parse_optional_int",
            "DFlashDraftConfig",
            "parse_dflash_draft_config",
        ],
        **common,
    )
    attention = take(srt / "layers/radix_attention.py", ["AttentionType"], Enum=enum.Enum)
    model = take(
        srt / "models/dflash.py",
        ["_get_dflash_attention_type", "_get_dflash_layer_attention_params", "DFlashDraftModel.load_weights"],
        **common,
        **vars(reading),
        AttentionType=attention.AttentionType,
        default_weight_loader=None,
    )
    rope = take(srt / "utils/hf_transformers/common.py", ["get_rope_config"])
    return types.SimpleNamespace(**vars(reading), **vars(attention), **vars(model), **vars(rope))


def test_sglang_reads_the_config(wheels, exported):
    folder, layers, _ = exported
    sglang = take_from_sglang(wheels)
    config = AutoConfig.from_pretrained(folder)
    parsed = sglang.parse_dflash_draft_config(draft_hf_config=config)
    assert parsed.resolve_target_layer_ids(target_num_layers=6) == [1, 3]
    assert parsed.block_size == 6
    assert parsed.mask_token_id == 95
    assert parsed.num_target_layers == 6
    assert not parsed.is_domino and parsed.attention_value_scale is None and parsed.output_multiplier == 1.0
    kinds = {True: sglang.AttentionType.DECODER, False: sglang.AttentionType.ENCODER_ONLY}
    # SGLang counts the keys to the left of the current one, and -1 is no window.
    expected = [(-1 if window is None else window - 1, kinds[causal]) for window, causal in layers]
    assert [sglang._get_dflash_layer_attention_params(config, i) for i in range(2)] == expected
    theta, rope = sglang.get_rope_config(config)
    assert theta == THETA
    assert not {"mrope_section", "partial_rotary_factor", "rope_dim"} & set(rope)
    assert config.max_position_embeddings >= 512, "a shorter drafter is refused"


def test_sglang_captures_the_outputs_of_the_same_layers_and_refuses_the_last(wheels, exported):
    taken = take(
        wheels / "sglang/srt/models/qwen3_5_text.py",
        ["Qwen3_5ForCausalLM.set_dflash_layers_to_capture"],
    )
    captured = []
    model = types.SimpleNamespace(
        pp_group=types.SimpleNamespace(world_size=1),
        model=types.SimpleNamespace(layers=[None] * 6, set_dflash_layers_to_capture=captured.extend),
    )
    taken.set_dflash_layers_to_capture(model, exported[2].config.target_layer_ids)
    # "Before layer k + 1" is the output of layer k.
    assert captured == [2, 4]
    with pytest.raises(ValueError, match="target_layer_ids"):
        taken.set_dflash_layers_to_capture(model, [1, 5])


def test_sglang_finds_every_weight_and_skips_none(wheels, exported):
    folder, _, drafter = exported
    sglang = take_from_sglang(wheels)
    seen = []
    hidden_size, num_features = drafter.config.hidden_size, len(drafter.config.target_layer_ids)

    class Parameter:
        def __init__(self, name):
            self.name = name
            self.shape = (hidden_size, num_features * hidden_size) if name == "fc.weight" else None

        def weight_loader(self, parameter, tensor, shard=None):
            seen.append(self.name if shard is None else f"{self.name}[{shard}]")

    expected = expected_weights(2, prefix="")
    parameters = {name: Parameter(name) for name in {re.sub(r"\[.\]$", "", name) for name in expected}}
    model = types.SimpleNamespace(
        named_parameters=parameters.items, projector_type=None, is_nemotron_35_draft=False, config=drafter.config
    )
    tensors = load_file(folder / "model.safetensors")
    sglang.load_weights(model, tensors.items())
    assert len(seen) == len(tensors)
    assert set(seen) == expected
