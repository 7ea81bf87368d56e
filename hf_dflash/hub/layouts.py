# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The two saved forms of a drafter, and the way from one to the other.

Native: what `save_pretrained` writes (`model_type: "dflash"`). Serving: one folder that vLLM, SGLang, llama.cpp's converter,
speculators and z-lab's code all read (`model_type: "qwen3"`, every key under every name that one of them looks for). Weight
names are the same in both. A layer id k means the output of decoder layer k everywhere except in speculators' keys, which
count boundaries and therefore hold k + 1.
"""

import argparse
import json
import logging
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from ..drafter.configuration_dflash import DFlashConfig, check_target_layer_ids
from ..drafter.modeling_dflash import DFlashForSpeculation
from .model_card import create_drafter_card, read_training_record
from .portability import SERVING_ENGINES, find_problems


logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
WEIGHTS_FILE = "model.safetensors"
# The release of speculators whose format the serving form carries.
SPECULATORS_FORMAT = "0.9.0"

# Fields of DFlashConfig that mean the same, under the same name, in a Qwen3 config.
_SHARED_FIELDS = (
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


def export_drafter(
    drafter,
    output_dir: str | Path,
    *,
    target: str | PreTrainedConfig | None = None,
    target_name: str | None = None,
    engines: tuple[str, ...] = SERVING_ENGINES,
    repo_id: str | None = None,
    revision: str | None = None,
) -> Path:
    """
    Writes the serving form of a drafter: bf16, one weights file, remote code, `custom_generate/` and a card.

    Args:
        drafter (`str`, `Path` or [`DFlashForSpeculation`]):
            Native folder, Hub id or model.
        output_dir (`str` or `Path`):
            A folder that does not exist yet, or an empty one. It appears complete or not at all.
        target (`str` or `PreTrainedConfig`, *optional*):
            Folder, Hub id or config of the target; by default the one that the drafter's config names.
        target_name (`str`, *optional*):
            The target's Hub id, where `target` is a folder: `vllm serve DRAFTER` and speculators look it up by this name.
        engines (`tuple[str]`, *optional*, defaults to `("vllm", "sglang", "llama.cpp")`):
            The engines that must compute what was trained.
        repo_id (`str`, *optional*):
            The drafter's Hub id, for the commands on the card; the folder's name by default.
        revision (`str`, *optional*):
            The revision of that repository which will hold the serving form, for the same commands.

    Returns:
        `Path`: `output_dir`.

    Raises:
        `ValueError`: if one of `engines` would compute something else than was trained; if sizes, layers or vocabulary differ
            from the target's; if a tensor is missing, unknown, misshapen or not finite.
        `FileExistsError`: if `output_dir` holds files.
        `OSError`: if the drafter or target cannot be read.
    """
    output_dir = _check_is_free(output_dir)
    unknown = set(engines) - set(SERVING_ENGINES)
    if unknown:
        raise ValueError(f"There is no serving engine {sorted(unknown)}: choose from {', '.join(SERVING_ENGINES)}.")
    if isinstance(drafter, DFlashForSpeculation):
        config, tensors, record = drafter.config, drafter.state_dict(), None
    else:
        folder = open_folder(drafter)
        config_dict = read_config(folder)
        if config_dict.get("model_type") != "dflash":
            raise ValueError(
                f"{drafter} is not in hf_dflash's own layout (`model_type` is {config_dict.get('model_type')!r}): "
                "`hf-dflash import` it first."
            )
        config = DFlashConfig.from_dict(config_dict)
        tensors, record = read_tensors(folder), read_training_record(folder)

    target_config, target_name = _find_target(config, target, target_name)
    _check_fits_target(config, target_config)
    _check_portable(config, engines)
    _check_tensors(tensors, config)

    with _complete_or_absent(output_dir) as folder:
        serving_config = make_serving_config(config, target_config, target_name)
        (folder / "config.json").write_text(json.dumps(serving_config, indent=2) + "\n")
        save_file(
            {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()},
            folder / WEIGHTS_FILE,
            metadata={"format": "pt"},
        )
        _copy_code(folder)
        card = create_drafter_card(
            config,
            form="serving",
            target_name=target_name,
            repo_id=repo_id or output_dir.name,
            revision=revision,
            record=record,
        )
        card.save(folder / "README.md")
    return output_dir


def make_serving_config(config: DFlashConfig, target_config: PreTrainedConfig | None, target_name: str) -> dict:
    """
    The `config.json` that every engine reads the same way: z-lab's keys, mirrored at the top level, and speculators' overlay.

    Args:
        config ([`DFlashConfig`]): the drafter's.
        target_config (`PreTrainedConfig`, *optional*): the target's, whose context length SGLang wants and whose
            architecture speculators records.
        target_name (`str`): the target's Hub id.

    Returns:
        `dict`: ready for `json.dumps`.
    """
    rope_theta = config.rope_parameters["rope_theta"]
    is_sliding = "sliding_attention" in config.layer_types
    max_positions = config.max_position_embeddings
    if target_config is not None:
        # SGLang refuses a drafter with a shorter context than its target; plain rotary embedding has no length of its own.
        max_positions = max(max_positions, target_config.get_text_config(decoder=True).max_position_embeddings)
    body = {
        **{name: getattr(config, name, None) for name in _SHARED_FIELDS},
        "max_position_embeddings": max_positions,
        "attention_dropout": 0.0,
        "layer_types": list(config.layer_types),
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        # transformers 5 reads the first spelling, transformers 4, z-lab's MLX code and SGLang's fallback the others.
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "rope_scaling": None,
        # Without `use_sliding_window` a Qwen3 config erases the window and keeps the layer types.
        "sliding_window": config.sliding_window if is_sliding else None,
        "use_sliding_window": is_sliding,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    # An explicit key overrides what engines guess from the layer types. `None` is their own rule for sliding layers (causal
    # inside the block), which they only follow if the key is absent.
    is_causal = config.is_causal if is_sliding or config.is_causal else False
    if is_causal is not None:
        body["is_causal"] = is_causal

    layers = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **body,
        "dtype": "bfloat16",
        **layers,
        "dflash_config": layers,
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_FORMAT,
        "draft_vocab_size": config.vocab_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "sample_from_anchor": False,
        # True says "bidirectional"; False would make vLLM's reading of this overlay causal in every layer.
        "sliding_window_non_causal": is_causal is False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(getattr(target_config, "architectures", None) or []),
            },
        },
        "transformer_layer_config": body,
    }


def import_drafter(source: str | Path, output_dir: str | Path, *, target: str | None = None) -> DFlashForSpeculation:
    """
    Makes a drafter of z-lab, SpecForge, Model-Optimizer or speculators, or one in our serving form, a native one.

    Args:
        source (`str` or `Path`): folder or Hub id.
        output_dir (`str` or `Path`): a folder that does not exist yet, or an empty one.
        target (`str`, *optional*): folder or Hub id of the target; needed where the source names none, to know its layers.

    Returns:
        [`DFlashForSpeculation`]: in the source's dtype, as it was saved to `output_dir`.

    Raises:
        `ValueError`: if the source is another kind of drafter, has a feature that [`DFlashForSpeculation`] does not have, or
            lacks a tensor.
        `FileExistsError`: if `output_dir` holds files.
        `OSError`: if the source cannot be read.
    """
    output_dir = _check_is_free(output_dir)
    drafter = read_foreign_drafter(source, target=target)
    with _complete_or_absent(output_dir) as folder:
        drafter.save_pretrained(folder)
        create_drafter_card(drafter.config, form="native", repo_id=output_dir.name).save(folder / "README.md")
    return drafter


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
    tensors = strip_foreign_weights(read_tensors(folder), source=str(source))
    _check_tensors(tensors, config)

    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise ValueError(
            f"{source} holds tensors of {sorted(map(str, dtypes))}: a quantized drafter cannot be imported."
        )
    drafter = DFlashForSpeculation(config).to(dtypes.pop())
    drafter.load_state_dict(tensors)
    return drafter.eval()


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

    body = config_dict["transformer_layer_config"] if is_speculators else config_dict
    vocab_size = body["vocab_size"]
    if config_dict.get("draft_vocab_size", vocab_size) not in (None, vocab_size):
        raise ValueError(
            f"{source} drafts from a reduced vocabulary ({config_dict['draft_vocab_size']} of {vocab_size} tokens, mapped by "
            "`d2t`): hf_dflash's drafters use the target's whole head. Train one with the full vocabulary."
        )

    if is_speculators:
        layer_ids = [layer_id - 1 for layer_id in config_dict["aux_hidden_state_layer_ids"]]
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
        **{name: body[name] for name in _SHARED_FIELDS if body.get(name) is not None},
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
    layer_types = body.get("layer_types") or ["full_attention"] * body["num_hidden_layers"]
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


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    target: str | PreTrainedConfig | None = None,
    target_name: str | None = None,
    serving_revision: str = "serving",
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """
    Publishes both forms of a drafter in one repository: the native one on `main`, the serving one on a revision.

    Args:
        folder (`str` or `Path`): a native drafter; its checkpoints are left out.
        repo_id (`str`): where to.
        target, target_name: as in [`export_drafter`], whose checks come first: nothing is uploaded if one fails.
        serving_revision (`str`, *optional*, defaults to `"serving"`): the branch that engines are pointed at.
        private (`bool`, *optional*), token (`str`, *optional*): as in `huggingface_hub`.

    Returns:
        `str`: the repository's address.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as temporary:
        serving = export_drafter(
            folder,
            Path(temporary) / "serving",
            target=target,
            target_name=target_name,
            repo_id=repo_id,
            revision=serving_revision,
        )
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            ignore_patterns=["checkpoint-*", "_*"],
            commit_message="The drafter, in hf_dflash's own form",
        )
        # A branch starts as a copy of main: what the serving form does not have must go.
        api.create_branch(repo_id, branch=serving_revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=serving,
            revision=serving_revision,
            delete_patterns="*",
            commit_message="The same drafter, in the form that serving engines read",
        )
    return str(url)


def open_folder(name_or_path: str | Path) -> Path:
    """A local folder with a drafter's files, downloaded first if it is a Hub id.

    Raises:
        `OSError`: if there is neither a folder nor a repository of that name.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        return Path(
            snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors", "*.pt", "README.md"])
        )
    except Exception as error:
        raise OSError(f"{name_or_path} is neither a folder nor a Hub repository that can be read: {error}") from error


def read_config(folder: Path) -> dict:
    """The parsed `config.json` of a folder.

    Raises:
        `FileNotFoundError`: if there is none.
        `ValueError`: if it is no JSON.
    """
    path = folder / "config.json"
    if not path.exists():
        adapter = (
            " It holds a PEFT adapter: merge it first (`merge_and_unload`)."
            * (folder / "adapter_config.json").exists()
        )
        raise FileNotFoundError(f"{folder} has no config.json.{adapter}")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, sharded or not.

    Raises:
        `FileNotFoundError`: if there are none, or the index names a shard that is missing.
    """
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / WEIGHTS_FILE]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: a drafter's weights are expected there.")
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


def _find_target(config, target, target_name) -> tuple[PreTrainedConfig | None, str]:
    """The target's config and Hub id. A target that only the drafter's config names need not be readable here."""
    named_by_config = target is None
    if named_by_config:
        target = config.target_name_or_path
        if target is None:
            raise ValueError("The drafter's config does not name its target: pass `--target`.")
    if isinstance(target, PreTrainedConfig):
        target_config, name = target, config.target_name_or_path or target._name_or_path
    else:
        name = str(target)
        try:
            target_config = AutoConfig.from_pretrained(target)
        except Exception as error:
            if not named_by_config:
                raise OSError(f"The target {target} cannot be read: {error}") from error
            logger.warning(
                "%s, the target that the drafter's config names, cannot be read, so sizes were not compared: pass `--target`.",
                target,
            )
            target_config = None
        if Path(name).is_dir() and config.target_name_or_path and not Path(config.target_name_or_path).is_dir():
            name = config.target_name_or_path
    name = target_name or name
    if not name or Path(name).is_dir():
        logger.warning(
            "The exported config names the target as %r, which `vllm serve DRAFTER` cannot look up: pass its Hub id with "
            "`--target_name`.",
            name,
        )
    return target_config, name


def _check_fits_target(config, target_config) -> None:
    if target_config is None:
        check_target_layer_ids(config.target_layer_ids, config.num_target_layers)
        return
    text_config = target_config.get_text_config(decoder=True)
    wrong = [
        f"`{name}` is {ours}, the target's is {theirs}"
        for name, ours, theirs in (
            ("hidden_size", config.hidden_size, text_config.hidden_size),
            ("vocab_size", config.vocab_size, text_config.vocab_size),
            ("num_target_layers", config.num_target_layers, text_config.num_hidden_layers),
        )
        if ours is not None and ours != theirs
    ]
    if wrong:
        raise ValueError(
            f"This drafter is not for this target, and every engine would serve it wrongly: {'; '.join(wrong)}."
        )
    check_target_layer_ids(config.target_layer_ids, text_config.num_hidden_layers)


def _check_portable(config, engines) -> None:
    problems = find_problems(config)
    refused = [problem for problem in problems if problem.engine in engines]
    if refused:
        raise ValueError("This drafter would be served otherwise than it was trained. " + " ".join(map(str, refused)))
    for problem in problems:
        logger.warning("Not for %s", problem)


def _check_tensors(tensors, config) -> None:
    with torch.device("meta"):
        expected = DFlashForSpeculation(config).state_dict()
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise ValueError(
            f"Missing from the drafter's weights: {_shorten(missing)}. vLLM and SGLang would not notice and serve noise."
        )
    if unknown:
        raise ValueError(
            f"Not part of a DFlash drafter: {_shorten(unknown)}. vLLM refuses them, SGLang skips them silently."
        )
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"`{name}` has shape {list(tensor.shape)}, the config makes it {list(expected[name].shape)}."
            )
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"Not finite (NaN or infinity): {_shorten(broken)}. Take an earlier checkpoint.")


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _copy_code(folder: Path) -> None:
    """The remote code, flat beside one another, as the loader of transformers wants it."""
    for file in (PACKAGE / "drafter" / "modeling_dflash.py", PACKAGE / "decoding" / "speculative.py"):
        for part in (file, *get_relative_import_files(file)):
            shutil.copyfile(part, folder / Path(part).name)
    shutil.copyfile(PACKAGE / "hub" / "serving_code" / "dflash.py", folder / "dflash.py")


def _check_is_free(output_dir: str | Path) -> Path:
    output_dir = Path(output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise FileExistsError(f"{output_dir} exists and is not an empty folder: choose another one.")
    return output_dir


class _complete_or_absent:
    """A folder to write in, which takes its final name only if everything went well."""

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir

    def __enter__(self) -> Path:
        self.output_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(
            tempfile.mkdtemp(prefix=f".{self.output_dir.name}-", dir=self.output_dir.absolute().parent)
        )
        return self.temporary

    def __exit__(self, kind, *_):
        if kind is not None:
            shutil.rmtree(self.temporary)
            return
        # mkdtemp makes folders that only their owner may read.
        self.temporary.chmod(0o755)
        self.temporary.replace(self.output_dir)


def main_export(argv: list[str]) -> int:
    """`hf-dflash export DRAFTER OUT`."""
    parser = argparse.ArgumentParser(
        prog="hf-dflash export", description="Write the form of a drafter that serving engines read."
    )
    parser.add_argument("drafter", help="native drafter: folder or Hub id")
    parser.add_argument("output", help="folder to write, new or empty")
    parser.add_argument("--target", help="the target: folder or Hub id (default: what the drafter's config names)")
    parser.add_argument("--target_name", help="the target's Hub id, if --target is a folder")
    parser.add_argument(
        "--for",
        dest="engines",
        action="append",
        choices=SERVING_ENGINES,
        help="only this engine must serve it rightly; may be repeated (default: all)",
    )
    parser.add_argument("--repo_id", help="the drafter's Hub id, for the commands on the card")
    parser.add_argument("--revision", help="the revision that will hold this form, for the same commands")
    arguments = parser.parse_args(argv)
    folder = export_drafter(
        arguments.drafter,
        arguments.output,
        target=arguments.target,
        target_name=arguments.target_name,
        engines=tuple(arguments.engines or SERVING_ENGINES),
        repo_id=arguments.repo_id,
        revision=arguments.revision,
    )
    print(f"Exported to {folder}. Its README.md has the commands for each engine.")
    return 0


def main_import(argv: list[str]) -> int:
    """`hf-dflash import SOURCE OUT`."""
    parser = argparse.ArgumentParser(
        prog="hf-dflash import",
        description="Make a drafter of z-lab, SpecForge, Model-Optimizer or speculators, or an exported one, a native one.",
    )
    parser.add_argument("source", help="folder or Hub id")
    parser.add_argument("output", help="folder to write, new or empty")
    parser.add_argument("--target", help="the target: folder or Hub id (default: what the source names)")
    arguments = parser.parse_args(argv)
    drafter = import_drafter(arguments.source, arguments.output, target=arguments.target)
    config = drafter.config
    print(
        f"Imported to {arguments.output}: {config.num_hidden_layers} layers, block {config.block_size}, target layers "
        f"{config.target_layer_ids}."
    )
    return 0
