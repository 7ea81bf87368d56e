# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import re
import shlex

import pytest
from huggingface_hub import ModelCard

from hf_dflash import DFlashForSpeculation, create_drafter_config
from hf_dflash.hub.layouts import export_drafter
from hf_dflash.hub.model_card import (
    TEMPLATE,
    AcceptanceFigure,
    TrainingRecord,
    create_drafter_card,
    read_training_record,
)


pytestmark = pytest.mark.compat

RECORD = TrainingRecord(
    data="902,087 completions that the target wrote with thinking on",
    datasets=["some-org/completions"],
    hyperparameters={"learning_rate": 6e-4, "num_anchors": 512},
    acceptance=[AcceptanceFigure("GSM8K", 5.317, "128 prompts, greedy, really decoded")],
    license="apache-2.0",
    progress="Under way: step 5000 of 28000.",
    versions={"hf_dflash": "0.1.0", "PyTorch": "2.13.0"},
)


@pytest.fixture
def config(tiny_qwen3_5):
    config = create_drafter_config(
        tiny_qwen3_5.config, num_hidden_layers=2, block_size=16, mask_token_id=95, num_target_features=2
    )
    config.target_name_or_path = "some-org/target"
    return config


def commands(card: ModelCard) -> dict[str, list[str]]:
    """The words of each command on the card, by the engine that it starts."""
    blocks = re.findall(r"```bash\n(.*?)\n```", card.content, re.DOTALL)
    return dict(zip(("vllm", "sglang", "llama.cpp"), map(shlex.split, blocks), strict=True))


def test_card_states_target_data_hyperparameters_and_how_acceptance_was_measured(config):
    card = create_drafter_card(config, repo_id="some-org/drafter", record=RECORD)
    assert card.data.base_model == "some-org/target"
    assert card.data.datasets == ["some-org/completions"]
    assert card.data.license == "apache-2.0"
    for words in (
        RECORD.data,
        "| num_anchors | 512 |",
        "Under way: step 5000 of 28000.",
        "Made with hf_dflash 0.1.0, PyTorch 2.13.0.",
        "| GSM8K | 5.32 | 128 prompts, greedy, really decoded |",
        "2602.06036",
    ):
        assert words in card.content


@pytest.mark.parametrize("form", ["native", "serving"])
@pytest.mark.parametrize("revision", [None, "serving"])
def test_commands_of_both_engines_name_the_form_that_they_can_read(form, revision, config):
    card = create_drafter_card(config, form=form, repo_id="some-org/drafter", serving_revision=revision)
    served = "EXPORTED" if form == "native" and revision is None else "some-org/drafter"
    vllm, sglang = commands(card)["vllm"], commands(card)["sglang"]
    assert vllm[:3] == ["vllm", "serve", "some-org/target"]
    expected = {"method": "dflash", "model": served, "num_speculative_tokens": 15}
    assert json.loads(vllm[-1]) == {**expected, **({"revision": revision} if revision else {})}
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == served
    assert ("--speculative-draft-model-revision" in sglang) == (revision is not None)
    llama_cpp = commands(card)["llama.cpp"]
    assert llama_cpp[llama_cpp.index("--spec-draft-n-max") + 1] == "15"
    if served == "EXPORTED":
        assert "hf-dflash export some-org/drafter EXPORTED" in card.content


@pytest.mark.parametrize("form", ["native", "serving"])
def test_python_on_the_card_compiles_and_trusts_code_where_it_must(form, config):
    card = create_drafter_card(config, form=form, repo_id="some-org/drafter", serving_revision="serving")
    first, *others = re.findall(r"```python\n(.*?)\n```", card.content, re.DOTALL)
    assert len(others) == (form == "native"), "only the native form has a way with the package and one without"
    for code in (first, *others):
        compile(code, "card", "exec")
    assert ("trust_remote_code=True" in first) == (form == "serving")
    assert ('revision="serving"' in first) == (form == "serving")
    assert ("import hf_dflash" in first) == (form == "native")
    assert all("trust_remote_code=True" in code for code in others)


def test_a_native_form_beside_main_is_named_where_it_is_loaded(config):
    card = create_drafter_card(config, repo_id="some-org/drafter", native_revision="v2", serving_revision="serving-v2")
    assert 'from_pretrained("some-org/drafter", revision="v2"' in card.content
    assert json.loads(commands(card)["vllm"][-1])["revision"] == "serving-v2"
    assert "custom_generate" not in card.content, "`generate` would look for the code on main"


@pytest.mark.parametrize("target_name", ["/data/models/target", "./target", "~/target"])
def test_a_folder_is_no_base_model_and_no_link(target_name, config):
    config.target_name_or_path = target_name
    card = create_drafter_card(config, repo_id="some-org/drafter")
    assert card.data.base_model is None
    assert f"huggingface.co/{target_name}" not in card.content


def test_a_card_holds_no_placeholder_and_shows_curves_only_where_there_are_some(config):
    plain = create_drafter_card(config, repo_id="some-org/drafter", serving_revision="serving", record=RECORD)
    drawn = create_drafter_card(config, repo_id="some-org/drafter", record=RECORD, has_curves=True)
    for card in (plain, drawn):
        assert not re.search(r"\b(TODO|TARGET|DRAFTER|None|undefined|More information needed)\b|{{|{%", card.content)
        assert "## Licence" in card.content and "`apache-2.0`" in card.content
    assert "training_curves.png" not in plain.content
    assert "![Loss, acceptance length and accuracy by slot](training_curves.png)" in drawn.content


def test_the_template_stands_in_the_folder_of_its_name():
    assert TEMPLATE.parts[-2:] == ("model_card", "drafter_card.md.jinja")


def test_engines_that_would_compute_something_else_are_named(config):
    config.layer_types, config.sliding_window, config.is_causal = ["sliding_attention"] * 2, 32, None
    assert "Not for llama.cpp" in create_drafter_card(config).content
    assert "Not for" not in create_drafter_card(config.__class__(target_layer_ids=[1])).content


def test_export_carries_the_training_record_over(config, tiny_qwen3_5, tmp_path):
    DFlashForSpeculation(config).save_pretrained(tmp_path / "native")
    create_drafter_card(config, repo_id="some-org/drafter", record=RECORD).save(tmp_path / "native" / "README.md")
    assert read_training_record(tmp_path / "native") == RECORD
    export_drafter(tmp_path / "native", tmp_path / "serving", target=tiny_qwen3_5.config)
    assert read_training_record(tmp_path / "serving") == RECORD
    assert "5.32" in (tmp_path / "serving" / "README.md").read_text()


def test_unknown_forms_are_refused(config):
    with pytest.raises(ValueError, match="'native' or the 'serving'"):
        create_drafter_card(config, form="gguf")


@pytest.mark.parametrize("form", ["native", "serving"])
def test_commands_hold_names_with_spaces_and_quotes_together(form, config):
    config.target_name_or_path = "/data/My Models/alice's target"
    card = create_drafter_card(config, form=form, repo_id="alice's drafter")
    words = commands(card)
    assert words["vllm"][:3] == ["vllm", "serve", config.target_name_or_path]
    served = "EXPORTED" if form == "native" else "alice's drafter"
    assert json.loads(words["vllm"][4])["model"] == served
    assert {config.target_name_or_path, served} < set(words["sglang"])


@pytest.mark.parametrize("name", ["outputs/models/target", "my target", "/data/target", "./target", "~/target"])
def test_what_cannot_be_a_hub_id_is_a_path_wherever_the_card_is_written(name, config):
    assert create_drafter_card(config, target_name=name).data.base_model is None


@pytest.mark.parametrize(
    "metadata",
    [
        b"license: [x",
        b"- a",
        b"license: caf\xe9",
        b"hf_dflash: 3",
        b"hf_dflash: {unknown: 1}",
        b"hf_dflash: {acceptance: [{prompts: a}]}",
        b"hf_dflash: {acceptance: [{prompts: a, acceptance_length: null, setting: b}]}",
    ],
)
def test_metadata_that_cannot_be_read_is_an_error_that_names_the_card(metadata, tmp_path):
    (tmp_path / "README.md").write_bytes(b"---\n" + metadata + b"\n---\nA drafter.\n")
    with pytest.raises(ValueError, match=r"README\.md.* cannot be read: mend it"):
        read_training_record(tmp_path)


def test_names_with_bars_and_line_breaks_stay_in_their_cells(config):
    record = TrainingRecord(
        hyperparameters={"optim_args": "a|b\nc"}, acceptance=[AcceptanceFigure("`x|y`\nz", 2.0, "greedy | of 3")]
    )
    content = create_drafter_card(config, record=record).content
    assert "\n| optim_args | a\\|b c |\n" in content
    assert "\n| `x\\|y` z | 2.00 | greedy \\| of 3 |\n" in content
