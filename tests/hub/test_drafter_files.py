# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import shutil

import pytest
import torch
from oracle_drafter import make_drafter
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from hf_dflash.cli import main as hf_dflash
from hf_dflash.hub.drafter_files import check_is_free, complete_or_absent, read_native_drafter
from hf_dflash.hub.layouts import export_drafter
from hf_dflash.training.warm_start import load_drafter


@pytest.fixture
def saved(tmp_path):
    make_target("qwen3").save_pretrained(tmp_path / "target")
    drafter = make_drafter(make_target("qwen3"))
    drafter.save_pretrained(tmp_path / "drafter")
    return drafter, tmp_path / "drafter"


@pytest.mark.compat
def test_a_native_drafter_is_read_as_it_was_saved(saved):
    drafter, folder = saved
    read = read_native_drafter(folder)
    assert read.name_or_path == str(folder) and not read.training
    state = drafter.state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name].float()) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize(
    ("damage", "message"), [("missing", "Missing from .* fc.weight"), ("nan", "Not finite .* fc.wei")]
)
def test_a_drafter_that_is_not_whole_is_neither_measured_nor_gone_on_from(saved, tmp_path, capsys, damage, message):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("fc.weight")
    if damage == "nan":
        tensors["fc.weight"] = weight * float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_drafter(str(folder))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    options = ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert hf_dflash(["evaluate", "--drafter", str(folder), *options]) == 2
    assert "fc.weight" in capsys.readouterr().err


@pytest.fixture
def adapter(saved, tmp_path):
    """An adapter on the saved drafter, and the drafter that it makes."""
    peft = pytest.importorskip("peft")
    drafter = read_native_drafter(saved[1])
    torch.manual_seed(0)
    model = peft.get_peft_model(drafter, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model.merge_and_unload()


def test_commands_read_the_drafter_that_an_adapter_makes(adapter, saved, tmp_path):
    folder, merged = adapter
    read = load_drafter(str(folder))
    assert type(read) is type(merged) and read.config.block_size == saved[0].config.block_size
    assert all(torch.equal(tensor, merged.state_dict()[name]) for name, tensor in read.state_dict().items())
    options = ["--target", str(tmp_path / "target"), "--target-name", "org/target"]
    assert hf_dflash(["export", str(folder), str(tmp_path / "serving"), *options]) == 0
    served = load_file(tmp_path / "serving" / "model.safetensors")
    assert torch.equal(served["fc.weight"], merged.fc.weight.to(served["fc.weight"].dtype))


def test_an_adapter_whose_drafter_is_gone_says_which_and_where_to_put_another(adapter, saved, tmp_path):
    saved[1].rename(tmp_path / "elsewhere")
    with pytest.raises(
        OSError, match=r"adapter for the drafter .*drafter, which cannot be read: put .*base_model_name_or_path"
    ):
        read_native_drafter(adapter[0])


@pytest.mark.parametrize("names", [["own"], ["own", "other"]])
def test_adapters_that_name_each_other_are_refused(adapter, tmp_path, names):
    for name, below in zip(names, names[1:] + names[:1], strict=True):
        shutil.copytree(adapter[0], tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps({**values, "base_model_name_or_path": str(tmp_path / below)}))
    with pytest.raises(
        ValueError, match=r"no drafter below the adapter in .*own: following `base_model_name_or_path`"
    ):
        load_drafter(str(tmp_path / "own"))


def test_a_model_with_an_adapter_is_exported_as_its_folder_is_and_stays_as_it_was(adapter, saved, tmp_path):
    peft = pytest.importorskip("peft")
    # Merged in bf16, some weights would be rounded otherwise.
    drafter = read_native_drafter(saved[1]).bfloat16()
    drafter.save_pretrained(saved[1])
    model = peft.PeftModel.from_pretrained(drafter, str(adapter[0])).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"target": make_target("qwen3").config, "target_name": "org/target"}
    export_drafter(adapter[0], tmp_path / "of_folder", **options)
    export_drafter(model, tmp_path / "of_model", **options)
    expected = load_file(tmp_path / "of_folder" / "model.safetensors")
    exported = load_file(tmp_path / "of_model" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
    after = model.state_dict()
    assert after.keys() == before.keys() and model.training
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in after.items()
    )


@pytest.mark.parametrize("size", [0, 5000])
def test_weights_that_were_not_copied_whole_are_refused_by_name(saved, size):
    path = saved[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or was not copied whole"):
        read_native_drafter(saved[1])


def test_a_target_in_a_drafters_place_is_named_as_such(saved, tmp_path):
    for read in (read_native_drafter, load_drafter):
        with pytest.raises(ValueError, match="target is a Qwen3ForCausalLM, a target and no drafter"):
            read(tmp_path / "target")


def test_a_folder_with_a_drafter_and_an_adapter_is_neither(adapter, saved):
    (adapter[0] / "adapter_config.json").rename(saved[1] / "adapter_config.json")
    with pytest.raises(ValueError, match="holds a drafter and a PEFT adapter"):
        load_drafter(str(saved[1]))


def test_a_link_to_an_empty_folder_is_written_through(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with complete_or_absent(check_is_free(tmp_path / "link")) as folder:
        (folder / "file").touch()
    assert (tmp_path / "disk" / "file").is_file() and (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
