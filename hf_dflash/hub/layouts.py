# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The two saved forms of a drafter, and the way from one to the other.

Native: what `save_pretrained` writes (`model_type: "dflash"`). Serving: one folder that vLLM, SGLang, llama.cpp's converter,
speculators and z-lab's code all read (`model_type: "qwen3"`, every key under every name that one of them looks for). Weight
names are the same in both. A layer id k means the output of decoder layer k everywhere except in speculators' keys, which
count boundaries and therefore hold k + 1.
"""

import copy
import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from ..decoding.custom_generate_files import copy_custom_generate
from ..drafter.configuration_dflash import DFlashConfig, check_target_layer_ids
from ..drafter.modeling_dflash import DFlashForSpeculation
from .drafter_files import (
    ADAPTER_FILES,
    WEIGHTS_FILE,
    check_is_free,
    check_tensors,
    complete_or_absent,
    merge_adapter,
    open_folder,
    read_native_form,
)
from .foreign_layouts import SHARED_FIELDS, read_foreign_drafter
from .model_card import CURVES_FILE, create_drafter_card, read_training_record
from .portability import SERVING_ENGINES, find_problems


logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
# The release of speculators whose format the serving form carries.
SPECULATORS_FORMAT = "0.9.0"


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
        drafter (`str`, `Path`, [`DFlashForSpeculation`] or `peft.PeftModel`):
            Native folder, Hub id or model. An adapter is merged, in fp32 as that of a folder; the model stays as it is.
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
    output_dir = check_is_free(output_dir)
    unknown = set(engines) - set(SERVING_ENGINES)
    if unknown:
        raise ValueError(f"There is no serving engine {sorted(unknown)}: choose from {', '.join(SERVING_ENGINES)}.")
    record = curves = None
    if hasattr(drafter, "merge_and_unload"):
        drafter = merge_adapter(drafter)
    if isinstance(drafter, DFlashForSpeculation):
        config, tensors = drafter.config, drafter.state_dict()
    else:
        folder = open_folder(drafter)
        config, tensors = read_native_form(folder)
        record = read_training_record(folder)
        curves = folder / CURVES_FILE if (folder / CURVES_FILE).is_file() else None

    target_config, target_name = _find_target(config, target, target_name)
    check_fits_target(config, target_config)
    _check_portable(config, engines)
    check_tensors(tensors, config)

    with complete_or_absent(output_dir) as folder:
        write_serving_form(folder, config, tensors, target_config, target_name)
        card = create_drafter_card(
            config,
            form="serving",
            target_name=target_name,
            repo_id=repo_id or output_dir.name,
            serving_revision=revision,
            record=record,
            has_curves=curves is not None,
        )
        card.save(folder / "README.md")
        if curves is not None:
            shutil.copyfile(curves, folder / CURVES_FILE)
    return output_dir


def write_native_form(folder: Path, config: DFlashConfig, tensors: dict) -> None:
    """
    Config, bf16 weights, remote code and `custom_generate/`: what `AutoModel` loads, with the package or without it.

    Args:
        folder (`Path`): where to; other files in it stay, but for an adapter of an earlier run.
        config ([`DFlashConfig`]), tensors (`dict[str, torch.Tensor]`): the drafter's, which stay as they are.
    """
    with torch.device("meta"):
        drafter = DFlashForSpeculation(copy.deepcopy(config))
    drafter.load_state_dict(
        {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in tensors.items()}, assign=True
    )
    for name in ADAPTER_FILES:
        (folder / name).unlink(missing_ok=True)
    drafter.save_pretrained(folder)
    copy_custom_generate(folder)


def write_serving_form(folder: Path, config: DFlashConfig, tensors: dict, target_config, target_name: str) -> None:
    """
    Config, weights and code, whatever engines make of them; [`export_drafter`] is the function that asks.

    Args:
        folder (`Path`): an empty folder.
        config ([`DFlashConfig`]), tensors (`dict[str, torch.Tensor]`): the drafter's.
        target_config, target_name: as in [`make_serving_config`].
    """
    serving_config = make_serving_config(config, target_config, target_name)
    (folder / "config.json").write_text(json.dumps(serving_config, indent=2) + "\n")
    save_file(
        {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    # Flat beside one another, as the loader of remote code wants it.
    for file in (PACKAGE / "drafter" / "modeling_dflash.py", PACKAGE / "decoding" / "speculative.py"):
        for part in (file, *get_relative_import_files(file)):
            shutil.copyfile(part, folder / Path(part).name)
    shutil.copyfile(PACKAGE / "hub" / "serving_code" / "dflash.py", folder / "dflash.py")
    copy_custom_generate(folder)


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
        **{name: getattr(config, name, None) for name in SHARED_FIELDS},
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
            lacks a tensor; if it is not for `target`, or holds another embedding or head than that has.
        `FileExistsError`: if `output_dir` holds files.
        `OSError`: if the source cannot be read.
    """
    output_dir = check_is_free(output_dir)
    drafter = read_foreign_drafter(source, target=target)
    if target is not None:
        check_fits_target(drafter.config, AutoConfig.from_pretrained(target))
    with complete_or_absent(output_dir) as folder:
        drafter.save_pretrained(folder)
        create_drafter_card(drafter.config, form="native", repo_id=output_dir.name).save(folder / "README.md")
    return drafter


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


def check_fits_target(config: DFlashConfig, target_config: PreTrainedConfig | None) -> None:
    """Refuses a drafter that was made for another target; without the target's config, layer ids alone are looked at.

    Raises:
        `ValueError`: naming what differs, with both values.
    """
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
