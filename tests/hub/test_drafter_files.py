# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from oracle_drafter import make_drafter
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from hf_dflash.cli import main as hf_dflash
from hf_dflash.hub.drafter_files import read_native_drafter
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
