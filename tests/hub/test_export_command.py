# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
from tiny_drafters import make_drafter

from hf_dflash.cli import main


pytestmark = pytest.mark.compat


def test_what_the_command_exports_names_the_target_of_the_drafters_config(tiny_qwen3_5, tmp_path, capsys):
    tiny_qwen3_5.save_pretrained(tmp_path / "target")
    make_drafter(tiny_qwen3_5, target_name_or_path="some-org/tiny-target").save_pretrained(tmp_path / "native")
    serving = tmp_path / "serving"
    assert main(["export", str(tmp_path / "native"), str(serving), "--target", str(tmp_path / "target")]) == 0
    assert f"Exported to {serving}" in capsys.readouterr().out
    verifier = json.loads((serving / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some-org/tiny-target", "architectures": ["Qwen3_5ForCausalLM"]}


def test_a_drafter_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "serving"), "--target", "t"]) == 2
    assert "nowhere" in capsys.readouterr().err
