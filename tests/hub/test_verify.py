# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import importlib.util

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_target
from transformers import PreTrainedTokenizerFast

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.cli import main
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.hub.layouts import export_drafter
from hf_dflash.hub.portability import ENGINES
from hf_dflash.hub.verify import verify_drafter


pytestmark = pytest.mark.compat

PROMPTS = [[7, 11, 13, 17, 19], [23]]


@pytest.fixture
def target_folder(tmp_path):
    make_target("qwen3_5").save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def save_drafter(target_folder, folder, **overrides):
    target = make_target("qwen3_5")
    config = create_drafter_config(
        target.config, num_hidden_layers=2, block_size=4, mask_token_id=95, num_target_features=2, **overrides
    )
    config.target_name_or_path = str(target_folder)
    DFlashForSpeculation(config).save_pretrained(folder)


def verify(drafter, target_folder):
    verdicts = verify_drafter(
        drafter, target_folder, prompts=PROMPTS, max_new_tokens=12, dtype=torch.float32, device="cpu"
    )
    assert sorted(verdict.engine for verdict in verdicts) == sorted(ENGINES)
    return {verdict.engine: verdict for verdict in verdicts}


def test_a_good_drafter_has_no_wrong_verdict_in_either_form(target_folder, tmp_path):
    save_drafter(target_folder, tmp_path / "native")
    export_drafter(tmp_path / "native", tmp_path / "serving", target=str(target_folder))
    for form in ("native", "serving"):
        verdicts = verify(tmp_path / form, target_folder)
        assert verdicts["transformers"].is_right, verdicts["transformers"]
        assert not [verdict for verdict in verdicts.values() if verdict.is_right is False]
        if importlib.util.find_spec("speculators") is not None:
            assert verdicts["speculators"].is_right


def test_tokens_that_tie_within_the_rounding_of_bf16_are_no_fault_and_others_are(target_folder, tmp_path, monkeypatch):
    save_drafter(target_folder, tmp_path / "native")
    prompts = [[seed, 11, 13, 17, 19] for seed in range(3, 9)]
    arguments = {"prompts": prompts, "max_new_tokens": 40, "dtype": torch.bfloat16, "device": "cpu"}
    verdict = verify_drafter(tmp_path / "native", target_folder, **arguments)[0]
    assert verdict.engine == "transformers" and verdict.is_right, verdict
    assert "tie within the rounding of bfloat16" in verdict.reason

    def decode_wrongly(*args, **kwargs):
        out = speculative_generate(*args, **kwargs)
        # Inside the second prompt's reply.
        if out.sequences[0, 0] == 4:
            out.sequences[0, 20] = (out.sequences[0, 20] + 1) % 90
        return out

    monkeypatch.setattr("hf_dflash.hub.verify.speculative_generate", decode_wrongly)
    verdict = verify_drafter(tmp_path / "native", target_folder, **arguments)[0]
    assert verdict.is_right is False and verdict.reason.endswith("alone: prompt 1 with hf_dflash")


def test_the_engines_that_would_compute_something_else_are_named(target_folder, tmp_path):
    save_drafter(target_folder, tmp_path / "native", sliding_window=6, is_causal=None)
    verdicts = verify(tmp_path / "native", target_folder)
    assert verdicts["transformers"].is_right, verdicts["transformers"]
    wrong = {engine for engine, verdict in verdicts.items() if verdict.is_right is False}
    assert wrong == {"llama.cpp", "speculators", "z-lab MLX"}


def test_a_peer_that_computes_something_else_is_found_out(target_folder, tmp_path, monkeypatch):
    pytest.importorskip("speculators")
    from speculators.models.dflash import core

    save_drafter(target_folder, tmp_path / "native")
    positions = core.get_base_indices_for_anchored_blocks
    monkeypatch.setattr(core, "get_base_indices_for_anchored_blocks", lambda *args: positions(*args) + 1)
    assert verify(tmp_path / "native", target_folder)["speculators"].is_right is False


@pytest.mark.parametrize(
    "chat_template", [None, "{% for message in messages %}w3 {{ message.content }}{% endfor %} w4"]
)
def test_the_command_prints_a_line_for_each_engine(chat_template, target_folder, tmp_path, capfd):
    save_drafter(target_folder, tmp_path / "native")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat_template).save_pretrained(target_folder)
    arguments = ["--target", str(target_folder), "--prompt", "w7 w11", "--max_new_tokens", "6", "--dtype", "float32"]
    assert main(["verify", str(tmp_path / "native"), *arguments]) == 0
    printed = capfd.readouterr()
    assert "| INFO" not in printed.err, "of speculators"
    lines = printed.out.splitlines()
    assert sorted(line.split("  ")[0] for line in lines) == sorted(ENGINES)
    assert "1 prompts decoded as the target alone does" in next(
        line for line in lines if line.startswith("transformers")
    )


def test_missing_tensors_are_an_error_not_random_numbers(target_folder, tmp_path, capsys):
    save_drafter(target_folder, tmp_path / "native")
    tensors = load_file(tmp_path / "native" / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "native" / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(tmp_path / "native"), "--target", str(target_folder)]) == 2
    assert "fc.weight" in capsys.readouterr().err
