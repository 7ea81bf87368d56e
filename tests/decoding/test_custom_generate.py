# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A saved drafter brings its decoding code along, and that code is ours: same tokens, same acceptance lengths."""

import os
import subprocess
import sys

import pytest
import torch
from oracle_drafter import make_drafter
from tiny_models import make_target

from hf_dflash.decoding.custom_generate_files import copy_custom_generate
from hf_dflash.decoding.speculative import speculative_generate


pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A hybrid target and a drafter on disk, the drafter with its decoding code."""
    folder = tmp_path_factory.mktemp("saved")
    target = make_target("qwen3_5")
    drafter = make_drafter(target, block_size=4)
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    copy_custom_generate(folder / "drafter")
    return target, drafter, folder


def test_files_are_flat_and_import_nothing_of_the_package(saved):
    _, _, folder = saved
    files = sorted((folder / "drafter" / "custom_generate").iterdir())
    assert {"generate.py", "speculative.py", "target_cache.py"} <= {file.name for file in files}
    for file in files:
        text = file.read_text()
        assert "hf_dflash." not in text.replace("hf_dflash.decoding", "")
        assert "from .." not in text


def test_generate_with_the_drafters_folder_gives_our_output(saved):
    target, drafter, folder = saved
    input_ids = torch.randint(3, 95, (2, 9))
    attention_mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    out = target.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=15,
        custom_generate=str(folder / "drafter"),
        trust_remote_code=True,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    ours = speculative_generate(target, drafter, input_ids, attention_mask, max_new_tokens=15)
    assert out.sequences.tolist() == ours.sequences.tolist()
    assert out.acceptance_lengths == ours.acceptance_lengths
    plain = target.generate(input_ids, attention_mask=attention_mask, max_new_tokens=15)
    assert out.sequences.tolist() == plain.tolist()


def test_generate_without_a_drafter_says_what_to_pass(saved):
    target, _, folder = saved
    with pytest.raises(ValueError, match="assistant_model=AutoModel"):
        target.generate(
            torch.tensor([[5, 6]]), custom_generate=str(folder / "drafter"), trust_remote_code=True, max_new_tokens=2
        )


WITHOUT_PACKAGE = """
import sys
import torch
from transformers import AutoModel, AutoModelForCausalLM

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_dflash":
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
folder = sys.argv[1]
target = AutoModelForCausalLM.from_pretrained(folder + "/target")
drafter = AutoModel.from_pretrained(folder + "/drafter", trust_remote_code=True)
input_ids = torch.tensor([[11, 12, 13]])
arguments = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 12}
out = target.generate(
    input_ids, custom_generate=folder + "/drafter", trust_remote_code=True, assistant_model=drafter, **arguments
)
assert not any(name.split(".")[0] == "hf_dflash" for name in sys.modules)
assert torch.equal(out, target.generate(input_ids, **arguments))
print(*out[0].tolist())
"""


def test_generate_works_in_a_process_without_the_package(saved, tmp_path):
    target, drafter, folder = saved
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(folder)],
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    ours = speculative_generate(target, drafter, torch.tensor([[11, 12, 13]]), max_new_tokens=12)
    assert result.stdout.split() == [str(token) for token in ours.sequences[0].tolist()]
