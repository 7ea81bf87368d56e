# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_drafters import make_drafter

from hf_dflash import DFlashForSpeculation
from hf_dflash.cli import main
from hf_dflash.hub.layouts import export_drafter


pytestmark = pytest.mark.compat


def test_the_command_makes_an_exported_drafter_a_native_one(tiny_qwen3, tmp_path, capsys):
    drafter = make_drafter(tiny_qwen3, torch.bfloat16)
    serving = export_drafter(drafter, tmp_path / "serving", target=tiny_qwen3.config)
    assert main(["import", str(serving), str(tmp_path / "native")]) == 0
    assert "2 layers, block 4, target layers [1, 3]" in capsys.readouterr().out
    imported = DFlashForSpeculation.from_pretrained(tmp_path / "native", dtype="auto").state_dict()
    assert all(torch.equal(imported[name], tensor) for name, tensor in drafter.state_dict().items())
