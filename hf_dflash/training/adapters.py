# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""PEFT adapters: one trained on an existing drafter, or one that the target is served with."""

from transformers import PreTrainedModel, set_seed

from ..hub.drafter_files import import_peft


def add_adapter(drafter: PreTrainedModel, peft_config, seed: int):
    """Freezes a drafter and puts a new adapter on it, the same on every rank.

    Args:
        drafter ([`DFlashForSpeculation`]): a trained drafter.
        peft_config (`peft.PeftConfig`): with `target_modules`, for example `"all-linear"`.
        seed (`int`): of the adapter's weights.

    Returns:
        `peft.PeftModel`.

    Raises:
        `ImportError`: if peft is missing, saying what to install.
        `ValueError`: if the drafter has an adapter already.
    """
    peft = import_peft()
    if isinstance(drafter, peft.PeftModel):
        raise ValueError("The drafter has an adapter already: pass either that or `peft_config`.")
    set_seed(seed)
    return peft.get_peft_model(drafter, peft_config)


def make_lora_config(rank: int):
    """LoRA on every matrix of the drafter."""
    return import_peft().LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


def apply_target_adapter(target: PreTrainedModel, adapter: str, merge: bool) -> PreTrainedModel:
    """The target as it is served with a LoRA adapter.

    Args:
        target (`PreTrainedModel`): the base model, on its device.
        adapter (`str`): Hub id or folder of the adapter.
        merge (`bool`): add it to the weights, as an engine that serves merged weights does; else it is computed beside them.

    Returns:
        `PreTrainedModel`: of the same class.

    Raises:
        `ImportError`: if peft is missing.
        `ValueError`: if an adapter that is not merged changes embedding or head, which the drafter borrows.
    """
    peft = import_peft()
    adapted = peft.PeftModel.from_pretrained(target, adapter)
    if merge:
        return adapted.merge_and_unload()
    model = adapted.get_base_model()
    for name, module in (("embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        if hasattr(module, "base_layer") or hasattr(module, "modules_to_save"):
            raise ValueError(
                f"{adapter} changes the target's {name}, of which the drafter takes a plain copy: merge it "
                "(`--merge_target_adapter true`)."
            )
    return model
