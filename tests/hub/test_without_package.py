# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Saved drafters in a process that cannot import hf_dflash: one process for all tests, for starting one takes seconds."""

import os
import subprocess
import sys

import pytest
import torch
from tiny_models import make_target
from transformers import AutoModel

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.hub.layouts import export_drafter


pytestmark = pytest.mark.compat

KINDS = {"dense": "qwen3", "hybrid": "qwen3_5"}

SCRIPT = """
import sys

# The package may be installed in this environment: such an entry makes every import of it fail.
sys.modules["hf_dflash"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM

seen = {}
for kind in ("dense", "hybrid"):
    try:
        seen[kind, "plain native"] = type(AutoModel.from_pretrained(f"{kind}/native")).__name__
    except Exception as error:
        seen[kind, "plain native"] = error
    native = AutoModel.from_pretrained(f"{kind}/native", trust_remote_code=True)
    seen[kind, "native"] = type(native).__name__, type(native).__module__

    target = AutoModelForCausalLM.from_pretrained(f"{kind}/target", dtype=torch.float64)
    drafter = AutoModel.from_pretrained(f"{kind}/serving", trust_remote_code=True, dtype=torch.float64).eval()
    seen[kind, "serving"] = type(drafter).__name__, type(drafter).__module__
    torch.manual_seed(0)
    for length in (1, 9):
        prompt = torch.randint(3, 90, (1, length))
        greedy = target.generate(prompt, max_new_tokens=24, do_sample=False)
        ours = drafter.spec_generate(input_ids=prompt, max_new_tokens=24, temperature=0.0, target=target)
        seen[kind, "greedy", length] = greedy, ours
        seen[kind, "custom_generate", length] = greedy, target.generate(
            prompt,
            max_new_tokens=24,
            do_sample=False,
            custom_generate=f"{kind}/serving",
            trust_remote_code=True,
            assistant_model=drafter,
        )
        stop = [int(greedy[0, length + 5])]
        stopped = drafter.spec_generate(input_ids=prompt, max_new_tokens=24, target=target, stop_token_ids=stop)
        seen[kind, "stopped", length] = target.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=stop), stopped
    seen[kind, "sampled"] = prompt, drafter.spec_generate(prompt, target, max_new_tokens=8, temperature=0.7)
    with torch.no_grad():
        seen[kind, "hidden states"] = drafter(*torch.load("inputs.pt")).last_hidden_state
torch.save(seen, "seen.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`target`, `native` and `serving` of each kind of target."""
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    for kind, name in KINDS.items():
        target = make_target(name)
        target.save_pretrained(folder / kind / "target")
        config = create_drafter_config(
            target.config, num_hidden_layers=2, block_size=4, mask_token_id=95, num_target_features=2
        )
        DFlashForSpeculation(config).save_pretrained(folder / kind / "native")
        export_drafter(folder / kind / "native", folder / kind / "serving", target=str(folder / kind / "target"))
    inputs = (torch.randn(1, 4, 32).double(), torch.randn(1, 7, 64).double(), torch.arange(11)[None])
    torch.save(inputs, folder / "inputs.pt")
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "seen.pt", weights_only=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 9])
def test_spec_generate_of_the_serving_form_is_lossless(kind, length, seen):
    name, module = seen[kind, "serving"]
    assert name == "DFlashDraftModel" and module.startswith("transformers_modules")
    for what in ("greedy", "stopped", "custom_generate"):
        expected, ours = seen[kind, what, length]
        assert torch.equal(ours, expected)
    assert seen[kind, "stopped", length][1].shape[1] <= length + 6
    prompt, sampled = seen[kind, "sampled"]
    assert torch.equal(sampled[:, : prompt.shape[1]], prompt)
    assert prompt.shape[1] < sampled.shape[1] <= prompt.shape[1] + 8


@pytest.mark.parametrize("kind", KINDS)
def test_serving_form_computes_what_we_compute(kind, folder, seen):
    # The export rounds to bf16, which is the one difference.
    drafter = DFlashForSpeculation.from_pretrained(folder / kind / "native", dtype=torch.bfloat16).double()
    with torch.no_grad():
        ours = drafter(*torch.load(folder / "inputs.pt")).last_hidden_state
    torch.testing.assert_close(seen[kind, "hidden states"], ours, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_auto_model_refuses_a_native_drafter_and_says_what_to_do(kind, seen):
    error = seen[kind, "plain native"]
    assert isinstance(error, ValueError), error
    assert "trust_remote_code=True" in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_native_drafter_loads_with_its_own_code(kind, seen):
    name, module = seen[kind, "native"]
    assert name == "DFlashForSpeculation" and module.startswith("transformers_modules")


def test_plain_auto_model_takes_the_serving_form_for_a_qwen3_model_and_the_card_warns_of_it(folder):
    """The price of the `model_type` that engines look for."""
    wrong = AutoModel.from_pretrained(folder / "dense" / "serving")
    assert type(wrong).__name__ == "Qwen3Model"
    card = (folder / "dense" / "serving" / "README.md").read_text()
    assert "plain `AutoModel` gives a `Qwen3Model`" in card
    assert "trust_remote_code=True" in card
