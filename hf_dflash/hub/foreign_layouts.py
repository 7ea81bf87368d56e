# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Reading the drafters of z-lab, SpecForge, Model-Optimizer and speculators, and our own serving form.

Their weight names are ours, behind a prefix and beside copies of what the target owns. Their configs say the same things under
other keys, and where they say nothing, what vLLM and SGLang assume holds.
"""

import functools
import logging
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen3Config

from ..drafter.configuration_dflash import DFlashConfig
from ..drafter.modeling_dflash import DFlashForSpeculation
from .drafter_files import check_tensors, open_folder, read_config, read_native_drafter, read_tensors
from .target_copies import check_target_copies


logger = logging.getLogger(__name__)

# Fields of DFlashConfig that mean the same, under the same name, in a Qwen3 config.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

# What the target owns. Other trainers save copies of it beside the drafter.
_TARGET_WEIGHTS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
# Buffers that are computed, not learned; vocabulary maps are judged by the config.
_IGNORED_WEIGHTS = ("rotary_emb.", "t2d", "d2t")

# Keys of `dflash_config` that change what the drafter computes, and that DFlashForSpeculation does not have.
_FOREIGN_FEATURES = {
    "conv_kernel_size": "grouped convolutions (DFlash2)",
    "selector_rank": "a candidate selector (DFlash2)",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "a scale of the attention values",
    "output_multiplier": "a scale of the output",
    "input_embedding_scale": "a scale of the embeddings",
    "projector_type": "a correction head",
    "sample_from_anchor": "a prediction at the anchor slot (DSpark)",
}


def read_foreign_drafter(source: str | Path, *, target: str | None = None) -> DFlashForSpeculation:
    """
    Reads any layout that [`import_drafter`] knows, without writing anything.

    Args:
        source (`str` or `Path`), target (`str`, *optional*): as in [`import_drafter`].
    """
    folder = open_folder(source)
    config_dict = read_config(folder)
    if config_dict.get("model_type") == "dflash":
        raise ValueError(f"{source} is a native drafter already: load it with `AutoModel.from_pretrained`.")
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            f"{source} has `mask_embedding.pt`, an embedding of the mask token that was trained apart: hf_dflash's drafters use "
            "the target's own embedding row."
        )
    config = read_foreign_config(config_dict, source=str(source), target=target)
    tensors = read_tensors(folder)
    if target is not None:
        check_target_copies(tensors, target, config.mask_token_id, str(source))
    tensors = strip_foreign_weights(tensors, source=str(source))
    check_tensors(tensors, config)

    # Some trainers keep norms in fp32 beside matrices in bf16: the wider one holds both exactly.
    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
    drafter = DFlashForSpeculation(config).to(dtype)
    drafter.load_state_dict(tensors)
    return drafter.eval()


def read_drafter(source: str | Path, *, target: str | None = None) -> DFlashForSpeculation:
    """A drafter in any layout: ours as [`read_native_drafter`] reads it, another project's as [`read_foreign_drafter`] does.

    Args:
        source (`str` or `Path`): folder or Hub id.
        target (`str`, *optional*): the target's, for layouts that do not name it.

    Raises:
        `ValueError`, `OSError`: as both.
    """
    if read_config(open_folder(source)).get("model_type") == DFlashConfig.model_type:
        return read_native_drafter(source)
    return read_foreign_drafter(source, target=target)


def read_foreign_config(config_dict: dict, *, source: str = "config.json", target: str | None = None) -> DFlashConfig:
    """
    The [`DFlashConfig`] that means what another layout's `config.json` means to vLLM and SGLang.

    Args:
        config_dict (`dict`): the parsed file.
        source (`str`, *optional*): named in errors.
        target (`str`, *optional*): as in [`import_drafter`].

    Raises:
        `ValueError`: as [`import_drafter`].
    """
    for key in ("dflash_config", "transformer_layer_config", "speculators_config"):
        if not isinstance(config_dict.get(key) or {}, dict):
            raise ValueError(f"{source}: `{key}` is {config_dict[key]!r}, which holds no keys.")
    nested = config_dict.get("dflash_config") or {}
    kind = config_dict.get("speculators_model_type")
    if kind not in (None, "dflash"):
        raise ValueError(f"{source} is a {kind!r} drafter of speculators: only 'dflash' ones can be imported.")
    # Our serving form carries speculators' keys too; what engines serve it by are z-lab's.
    is_speculators = kind == "dflash" and not nested
    architecture = (config_dict.get("architectures") or ["DFlashDraftModel"])[0]
    if not is_speculators and architecture != "DFlashDraftModel":
        raise ValueError(f"{source} is a {architecture}: only DFlashDraftModel checkpoints can be imported.")
    for key, feature in _FOREIGN_FEATURES.items():
        value = nested.get(key, config_dict.get(key))
        is_neutral = value in (None, False, 0) or (value == 1 and key.endswith(("scale", "multiplier")))
        if not is_neutral:
            raise ValueError(f"{source} has {feature} (`{key}` is {value!r}), which hf_dflash's drafters do not have.")

    body = (config_dict.get("transformer_layer_config") or {}) if is_speculators else config_dict
    for key in ("vocab_size", "num_hidden_layers"):
        if body.get(key) is None:
            raise ValueError(f"{source} does not say its `{key}`: add it to `config.json`.")
    vocab_size = body["vocab_size"]
    if config_dict.get("draft_vocab_size", vocab_size) not in (None, vocab_size):
        raise ValueError(
            f"{source} drafts from a reduced vocabulary ({config_dict['draft_vocab_size']} of {vocab_size} tokens, mapped by "
            "`d2t`): hf_dflash's drafters use the target's whole head. Train one with the full vocabulary."
        )

    if is_speculators:
        layer_ids = [layer_id - 1 for layer_id in config_dict.get("aux_hidden_state_layer_ids") or []]
    else:
        layer_ids = nested.get("target_layer_ids", config_dict.get("target_layer_ids"))
        if layer_ids is None:
            raise ValueError(f"{source} has no `dflash_config.target_layer_ids`: it is not a DFlash drafter.")
    block_size = nested.get("block_size", config_dict.get("block_size"))
    mask_token_id = nested.get("mask_token_id", config_dict.get("mask_token_id"))
    for key, value in (("block_size", block_size), ("mask_token_id", mask_token_id)):
        if value is None:
            raise ValueError(f"{source} does not say its `{key}`: add it to `config.json`.")

    verifier = (config_dict.get("speculators_config") or {}).get("verifier") or {}
    target = target or verifier.get("name_or_path")
    num_target_layers = nested.get("num_target_layers", config_dict.get("num_target_layers"))
    if num_target_layers is None:
        if target is None:
            raise ValueError(f"{source} does not say how many layers its target has: pass `--target`.")
        num_target_layers = AutoConfig.from_pretrained(target).get_text_config(decoder=True).num_hidden_layers

    layer_types, sliding_window = _read_windows(body, nested, source)
    is_causal = _read_causality(config_dict, body, nested, layer_types, is_speculators)
    if is_speculators and "sliding_attention" in layer_types:
        logger.warning(
            "%s was trained with speculators' window, which reaches up to %d keys further back than the one that engines and "
            "hf_dflash apply. That is how engines serve it, too.",
            source,
            block_size - 1,
        )
    return DFlashConfig(
        **{name: body[name] for name in SHARED_FIELDS if body.get(name) is not None},
        rope_parameters={"rope_type": "default", "rope_theta": _read_rope_theta(body, source)},
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=is_causal,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=list(layer_ids),
        num_target_layers=num_target_layers,
        target_name_or_path=target,
    )


def _read_windows(body: dict, nested: dict, source: str) -> tuple[list[str], int | None]:
    layer_types = body.get("layer_types")
    if not layer_types:
        # Engines see the layers that a Qwen3 config makes of its flag.
        names = ("num_hidden_layers", "use_sliding_window", "sliding_window", "max_window_layers")
        layer_types = Qwen3Config(**{name: body[name] for name in names if body.get(name) is not None}).layer_types
    window = nested.get("swa_window_size", body.get("sliding_window"))
    # Model-Optimizer leaves the layer types at full attention and lets this flag speak for all layers.
    if nested.get("use_swa") and "sliding_attention" not in layer_types:
        layer_types = ["sliding_attention"] * len(layer_types)
    elif "sliding_attention" in layer_types and not body.get("use_sliding_window", True):
        raise ValueError(
            f"{source} has sliding layers but `use_sliding_window` false, which engines refuse: set it to true in `config.json` if "
            "the drafter was trained with its window."
        )
    is_sliding = "sliding_attention" in layer_types
    if is_sliding and not window:
        raise ValueError(f"{source} has sliding layers but no `sliding_window`: add it to `config.json`.")
    return list(layer_types), window if is_sliding else None


def _read_causality(config_dict, body, nested, layer_types, is_speculators) -> bool | None:
    """In the order in which vLLM looks: the explicit key, `dflash_config.causal`, the layer types."""
    is_causal = body.get("is_causal", config_dict.get("is_causal"))
    if is_causal is None:
        is_causal = nested.get("causal")
    if is_causal is None:
        # Full attention is bidirectional where nothing is said; speculators says it of sliding layers by a flag of its own.
        is_bidirectional = "sliding_attention" not in layer_types
        if is_speculators:
            is_bidirectional |= bool(config_dict.get("sliding_window_non_causal", False))
        return False if is_bidirectional else None
    return bool(is_causal)


def _read_rope_theta(body: dict, source: str) -> float:
    rope = body.get("rope_parameters") or {}
    scaling = body.get("rope_scaling") or {}
    for values in (rope, scaling):
        kind = values.get("rope_type", values.get("type", "default"))
        if kind != "default" or {"mrope_section", "partial_rotary_factor"} & set(values):
            raise ValueError(
                f"{source} has a rotary embedding of type {kind!r} ({values}): only the plain one can be imported."
            )
    # Where both are there, the nested one is what transformers 5 trained with.
    theta = rope.get("rope_theta", body.get("rope_theta"))
    if theta is None:
        raise ValueError(f"{source} states no `rope_theta`: add the one it was trained with to `config.json`.")
    return theta


def strip_foreign_weights(tensors: dict[str, torch.Tensor], *, source: str = "the checkpoint") -> dict:
    """
    The drafter's own tensors under bare names: without the prefix of a wrapping module, without what the target owns.

    Args:
        tensors (`dict[str, torch.Tensor]`): of a whole checkpoint.
        source (`str`, *optional*): named in errors.

    Raises:
        `ValueError`: if there is no `fc.weight`, by which a DFlash drafter is known.
    """
    # torch.compile puts its name before whatever it wraps, inside a path too.
    tensors = {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}
    prefixes = [
        name.removesuffix("fc.weight") for name in tensors if name == "fc.weight" or name.endswith(".fc.weight")
    ]
    if len(prefixes) != 1:
        raise ValueError(
            f"{source} has {len(prefixes)} tensors called `fc.weight`, which projects the target's features: a DFlash drafter has "
            "one."
        )
    prefix = prefixes[0]
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    target_owned = [name for name in own if name.startswith(_TARGET_WEIGHTS)]
    if target_owned:
        logger.info("Left out of %s, because the target brings them: %s", source, ", ".join(target_owned))
    return {
        name: tensor
        for name, tensor in own.items()
        if name not in target_owned and not name.startswith(_IGNORED_WEIGHTS) and "rotary_emb." not in name
    }
