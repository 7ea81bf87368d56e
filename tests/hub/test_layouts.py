# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.hub.layouts import export_drafter, import_drafter, make_serving_config


pytestmark = pytest.mark.compat

TARGET_NAME = "some-org/tiny-target"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A hybrid target with partial rotary embedding, none of which may reach the drafter."""
    folder = tmp_path_factory.mktemp("target")
    make_target("qwen3_5").save_pretrained(folder)
    return folder


def make_drafter(target, **overrides) -> DFlashForSpeculation:
    values = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 95, "num_target_features": 2, **overrides}
    config = create_drafter_config(target.config, **values)
    config.target_name_or_path = TARGET_NAME
    return DFlashForSpeculation(config).to(torch.bfloat16)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
VARIANTS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding, causal in the window": {**SLIDING, "is_causal": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_and_imported_drafter_is_bit_equal(variant, tiny_qwen3_5, tmp_path):
    drafter = make_drafter(tiny_qwen3_5, **VARIANTS[variant])
    drafter.save_pretrained(tmp_path / "native")
    export_drafter(tmp_path / "native", tmp_path / "serving", target=tiny_qwen3_5.config, engines=("vllm", "sglang"))
    import_drafter(tmp_path / "serving", tmp_path / "again")
    again = DFlashForSpeculation.from_pretrained(tmp_path / "again", dtype="auto")
    assert again.dtype == torch.bfloat16
    ours, theirs = drafter.config.to_dict(), again.config.to_dict()
    assert {**theirs, "_name_or_path": None} == {**ours, "_name_or_path": None}
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_exported_folder_holds_exactly_the_tensors_and_files_that_engines_read(tiny_qwen3_5, tmp_path):
    drafter = make_drafter(tiny_qwen3_5)
    folder = export_drafter(drafter.float(), tmp_path / "serving", target=tiny_qwen3_5.config)
    tensors = load_file(folder / "model.safetensors")
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        expected |= {
            f"layers.{i}.self_attn.{part}.weight" for part in "q_proj k_proj v_proj o_proj q_norm k_norm".split()
        }
        expected |= {f"layers.{i}.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")}
        expected |= {f"layers.{i}.{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")}
    assert set(tensors) == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {"config.json", "model.safetensors", "README.md", "dflash.py"} <= {file.name for file in folder.iterdir()}
    assert not list(tmp_path.glob(".serving*")), "the folder in which the export was written is gone"


def test_serving_config_says_each_thing_under_every_name_that_an_engine_reads(tiny_qwen3_5):
    config = make_drafter(tiny_qwen3_5, rope_parameters={"rope_type": "default", "rope_theta": 5e6}).config
    serving = make_serving_config(config, tiny_qwen3_5.config, TARGET_NAME)
    layers = serving["transformer_layer_config"]
    assert serving["target_layer_ids"] == serving["dflash_config"]["target_layer_ids"] == config.target_layer_ids
    assert serving["aux_hidden_state_layer_ids"] == [layer_id + 1 for layer_id in config.target_layer_ids]
    assert serving["block_size"] == serving["dflash_config"]["block_size"] == 4
    assert serving["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert serving["mask_token_id"] == serving["dflash_config"]["mask_token_id"] == 95
    for place in (serving, layers):
        assert place["rope_theta"] == place["rope_parameters"]["rope_theta"] == 5e6
        assert set(place["rope_parameters"]) == {"rope_type", "rope_theta"}, "nothing of the target's mrope"
        assert place["is_causal"] is False
        assert place["model_type"] == "qwen3"
    assert "eagle_aux_hidden_state_layer_ids" not in serving, "vLLM would take these instead, unshifted"
    json.dumps(serving)


def test_context_is_at_least_the_targets(tiny_qwen3_5):
    drafter_config = make_drafter(tiny_qwen3_5, max_position_embeddings=64).config
    assert make_serving_config(drafter_config, tiny_qwen3_5.config, TARGET_NAME)["max_position_embeddings"] == 512
    assert make_serving_config(drafter_config, None, TARGET_NAME)["max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        ({**SLIDING, "is_causal": None}, "llama.cpp"),
        ({"attention_bias": True}, "llama.cpp"),
        ({"hidden_act": "gelu"}, "vllm"),
        ({"hidden_act": "gelu"}, "sglang"),
    ],
)
def test_what_an_engine_would_serve_wrongly_is_refused_for_that_engine(overrides, engine, tiny_qwen3_5, tmp_path):
    drafter = make_drafter(tiny_qwen3_5, **overrides)
    with pytest.raises(ValueError, match=engine):
        export_drafter(drafter, tmp_path / "serving", target=tiny_qwen3_5.config)
    assert not (tmp_path / "serving").exists()
    if engine == "llama.cpp":
        export_drafter(drafter, tmp_path / "serving", target=tiny_qwen3_5.config, engines=("vllm", "sglang"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 64}, "`hidden_size` is 32, the target's is 64"),
        ({"vocab_size": 128}, "`vocab_size` is 96, the target's is 128"),
        ({"num_hidden_layers": 12}, "`num_target_layers` is 6, the target's is 12"),
    ],
)
def test_another_targets_drafter_is_refused(overrides, message, tiny_qwen3, tmp_path):
    other = make_target("qwen3", **{"layer_types": None, **overrides})
    with pytest.raises(ValueError, match=message):
        export_drafter(make_drafter(tiny_qwen3), tmp_path / "serving", target=other.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"), "Missing .*layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 32)}), "Not part .*lm_head.weight"),
        (lambda tensors: tensors["norm.weight"].fill_(torch.nan), "Not finite .*norm.weight"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}), r"`fc.weight` has shape \[32, 32\]"),
    ],
)
def test_broken_weights_are_refused(change, message, tiny_qwen3, tmp_path):
    make_drafter(tiny_qwen3).save_pretrained(tmp_path / "native")
    tensors = load_file(tmp_path / "native" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "native" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        export_drafter(tmp_path / "native", tmp_path / "serving", target=tiny_qwen3.config)
    assert not (tmp_path / "serving").exists()


def test_id_of_the_last_layer_is_refused_when_only_the_target_knows_that_it_is_the_last(tiny_qwen3, tmp_path):
    drafter = make_drafter(tiny_qwen3)
    drafter.config.num_target_layers = None
    drafter.config.target_layer_ids = [1, 5]
    with pytest.raises(ValueError, match="SGLang"):
        export_drafter(drafter, tmp_path / "serving", target=tiny_qwen3.config)


def test_a_folder_with_files_is_left_alone(tiny_qwen3, tmp_path):
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another"):
        export_drafter(make_drafter(tiny_qwen3), tmp_path / "serving", target=tiny_qwen3.config)
    assert [file.name for file in (tmp_path / "serving").iterdir()] == ["notes.txt"]


def test_native_drafters_are_not_imported(tiny_qwen3, tmp_path):
    make_drafter(tiny_qwen3).save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match="native drafter already"):
        import_drafter(tmp_path / "native", tmp_path / "again")


def test_a_drafter_for_another_target_than_the_one_that_is_given_is_not_imported(tiny_qwen3, target_folder, tmp_path):
    folder = export_drafter(make_drafter(tiny_qwen3, block_size=4), tmp_path / "serving", target=tiny_qwen3.config)
    make_target("qwen3", vocab_size=128).config.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="`vocab_size` is 96, the target's is 128"):
        import_drafter(folder, tmp_path / "native", target=str(tmp_path / "other"))
    assert not (tmp_path / "native").exists()


def test_norms_in_fp32_beside_matrices_in_bf16_are_imported_exactly_and_codes_are_refused(tiny_qwen3, tmp_path):
    folder = export_drafter(make_drafter(tiny_qwen3), tmp_path / "serving", target=tiny_qwen3.config)
    tensors = load_file(folder / "model.safetensors")
    mixed = {name: tensor.float() + 1e-6 if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, folder / "model.safetensors")
    imported = import_drafter(folder, tmp_path / "native").state_dict()
    assert all(torch.equal(imported[name], tensor.float()) for name, tensor in mixed.items())
    for dtype in (torch.float8_e4m3fn, torch.int8):
        codes = {name: tensor.to(dtype) if "proj" in name else tensor for name, tensor in tensors.items()}
        save_file(codes, folder / "model.safetensors")
        with pytest.raises(ValueError, match=f"Quantized .as {dtype}"):
            import_drafter(folder, tmp_path / "codes")


def test_of_one_file_beside_older_shards_the_same_weights_are_read_as_by_auto_model(tiny_qwen3, tmp_path):
    make_drafter(tiny_qwen3).save_pretrained(tmp_path / "native", max_shard_size="20KB")
    make_drafter(tiny_qwen3).save_pretrained(tmp_path / "newer")
    (tmp_path / "newer" / "model.safetensors").rename(tmp_path / "native" / "model.safetensors")
    exported = export_drafter(tmp_path / "native", tmp_path / "serving", target=tiny_qwen3.config)
    loaded = DFlashForSpeculation.from_pretrained(tmp_path / "native", dtype="auto").state_dict()
    served = load_file(exported / "model.safetensors")
    assert all(torch.equal(served[name], tensor) for name, tensor in loaded.items())
