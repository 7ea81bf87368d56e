# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from tiny_training import assert_same, make_trainer, training_state


peft = pytest.importorskip("peft")

from hf_dflash import DFlashForSpeculation  # noqa: E402
from hf_dflash.target.frozen_target import FrozenTarget  # noqa: E402
from hf_dflash.training.adapters import apply_target_adapter  # noqa: E402
from hf_dflash.training.target_loading import load_targets  # noqa: E402


pytestmark = pytest.mark.compat


def lora(**options):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)


@pytest.fixture
def base(tmp_path):
    """A drafter on the disk, to adapt."""
    make_drafter(make_target("qwen3")).save_pretrained(tmp_path / "base")
    return DFlashForSpeculation.from_pretrained(tmp_path / "base", dtype=torch.float32)


def test_an_adapter_learns_while_the_drafter_and_the_target_stay_as_they_are(base, tmp_path):
    before = {name: value.clone() for name, value in base.state_dict().items()}
    target = make_target("qwen3")
    target_before = {name: value.clone() for name, value in target.state_dict().items()}
    trainer = make_trainer(tmp_path / "run", drafter=base, target=target, peft_config=lora())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for name, p in trainer.model.named_parameters() if "lora_" in name}
    merged_names = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): value
        for name, value in trainer.model.state_dict().items()
        if "lora_" not in name
    }
    assert_same({name: merged_names[name] for name in before}, before)
    assert_same(dict(target.state_dict()), target_before)


def test_what_is_saved_is_the_adapter_which_loads_on_the_drafter(base, tmp_path):
    trainer = make_trainer(tmp_path / "run", drafter=base, peft_config=lora(), max_steps=3)
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    again = DFlashForSpeculation.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "run")
    saved = {name: value for name, value in trainer.model.state_dict().items() if "lora_" in name}
    assert saved
    assert_same({name: loaded.state_dict()[name] for name in saved}, saved)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert type(DFlashForSpeculation.from_pretrained(tmp_path / "merged")) is DFlashForSpeculation


def test_a_drafter_that_is_saved_where_an_adapter_was_is_what_loads(base, tmp_path):
    make_trainer(tmp_path / "run", drafter=base, peft_config=lora(), max_steps=1).save_model()
    assert (tmp_path / "run" / "adapter_config.json").exists()
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    with torch.no_grad():
        trainer.model.fc.weight.fill_(0.5)
    trainer.save_model()
    loaded = DFlashForSpeculation.from_pretrained(tmp_path / "run")
    assert_same(
        dict(loaded.state_dict()),
        {name: value.to(loaded.dtype) for name, value in trainer.model.to(torch.bfloat16).state_dict().items()},
    )


def test_a_resumed_adapter_is_bit_equal_dropout_included(base, tmp_path):
    def trainer(folder, **options):
        drafter = DFlashForSpeculation.from_pretrained(tmp_path / "base", dtype=torch.float32)
        return make_trainer(tmp_path / folder, drafter=drafter, peft_config=lora(lora_dropout=0.1), **options)

    undisturbed = trainer("a")
    undisturbed.train()
    trainer("b", save_strategy="steps", save_steps=5, max_steps=5, lr_scheduler_type="constant")
    stopped = trainer("b", save_strategy="steps", save_steps=5)
    stopped.train()
    import shutil

    shutil.rmtree(tmp_path / "b" / "checkpoint-14")
    shutil.rmtree(tmp_path / "b" / "checkpoint-10")
    resumed = trainer("b")
    resumed.train(resume_from_checkpoint=True)
    assert_same(training_state(resumed), training_state(undisturbed))


def test_a_drafter_with_an_adapter_gets_no_second_one(base, tmp_path):
    adapted = peft.get_peft_model(base, lora())
    with pytest.raises(ValueError, match="has an adapter already"):
        make_trainer(tmp_path, drafter=adapted, peft_config=lora())


# ---- A target that is served with an adapter ----


@pytest.fixture
def adapter(tmp_path):
    model = peft.get_peft_model(make_target("qwen3"), lora())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter")


def features(model):
    target = FrozenTarget(model, [1, 3])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 90, (2, 12), generator=generator)
    return target(ids, torch.tensor([12, 9]), torch.arange(21), return_label_hidden_states=True)


def test_a_target_adapter_means_the_same_merged_or_beside_the_weights(adapter):
    plain = features(make_target("qwen3"))
    merged = features(apply_target_adapter(make_target("qwen3"), adapter, merge=True))
    beside = features(apply_target_adapter(make_target("qwen3"), adapter, merge=False))
    assert (plain.context_hidden_states - merged.context_hidden_states).abs().max() > 0.01
    torch.testing.assert_close(beside.context_hidden_states, merged.context_hidden_states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(beside.label_hidden_states, merged.label_hidden_states, rtol=1e-4, atol=1e-4)
    assert torch.equal(beside.label_ids, merged.label_ids)


def test_an_adapter_on_the_head_must_be_merged(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    peft.get_peft_model(make_target("qwen3"), config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="changes the target's head"):
        apply_target_adapter(make_target("qwen3"), str(tmp_path), merge=False)


def test_an_adapted_target_trains_and_is_no_other_run_by_accident(adapter, tmp_path):
    make_target("qwen3").save_pretrained(tmp_path / "target")
    name = str(tmp_path / "target")

    def trainer(**options):
        targets = load_targets(name, [1, 3], ["cpu"], dtype=torch.float32, **options)
        drafter = make_drafter(make_target("qwen3"))
        return make_trainer(tmp_path / "run", target=targets, drafter=drafter, max_steps=2, save_strategy="steps")

    trainer(adapter=adapter).train()
    with pytest.raises(ValueError, match="target is "):
        trainer().train(resume_from_checkpoint=True)


def test_an_adapter_goes_on_only_as_it_was_and_on_the_drafter_that_it_was_made_for(base, tmp_path):
    make_trainer(tmp_path / "run", drafter=base, peft_config=lora(), max_steps=2, save_strategy="epoch").train()

    def go_on(peft_config, scale=1.0):
        drafter = DFlashForSpeculation.from_pretrained(tmp_path / "base", dtype=torch.float32)
        with torch.no_grad():
            drafter.layers[0].mlp.up_proj.weight.mul_(scale)
        trainer = make_trainer(tmp_path / "run", drafter=drafter, peft_config=peft_config, max_steps=3)
        trainer.train(resume_from_checkpoint=True)
        return trainer.state.global_step

    other_scaling = lora()
    other_scaling.lora_alpha = 16
    for changed in ({"peft_config": lora(), "scale": 1.5}, {"peft_config": other_scaling}, {"peft_config": None}):
        with pytest.raises(ValueError, match="adapter is .*, the checkpoint has [0-9a-f]{16}"):
            go_on(**changed)
    assert go_on(lora()) == 3
