# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A drafter's folder: read whole or not at all, written whole or not at all."""

import copy
import json
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from ..drafter.configuration_dflash import DFlashConfig
from ..drafter.modeling_dflash import DFlashForSpeculation


WEIGHTS_FILE = "model.safetensors"
# Where they lie beside a drafter, `AutoModel` loads another one with this adapter in its place.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# How the names of their architectures end.
_TARGETS = ("ForCausalLM", "ForConditionalGeneration")


def open_folder(name_or_path: str | Path) -> Path:
    """A local folder with a drafter's files, downloaded first if it is a Hub id.

    Raises:
        `OSError`: if there is neither a folder nor a repository of that name.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        # A pattern's `*` stands for slashes too: not the checkpoints of the run that lie in folders of the repository.
        return Path(
            snapshot_download(
                str(name_or_path),
                allow_patterns=["*.json", "*.safetensors", "*.pt", "README.md"],
                ignore_patterns="*/*",
            )
        )
    except Exception as error:
        raise OSError(f"{name_or_path} is neither a folder nor a Hub repository that can be read: {error}") from error


def read_config(folder: Path) -> dict:
    """The parsed `config.json` of a folder; of an adapter's, that of the drafter it was trained on.

    Raises:
        `FileNotFoundError`: if there is none.
        `ValueError`: if it is no JSON object, or a target's, or there is a drafter and an adapter, or adapters name each other.
        `OSError`: if the drafter below an adapter cannot be read.
    """
    adapters = []
    while is_adapter(folder):
        if folder.resolve() in adapters:
            raise ValueError(
                f"There is no drafter below the adapter in {folder}: following `base_model_name_or_path` in {ADAPTER_FILES[0]} leads "
                "back to it. Put the folder or Hub id of the drafter there."
            )
        adapters.append(folder.resolve())
        folder = _open_base(folder)
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json.")
    config = _read_object(path)
    architecture = str((config.get("architectures") or [None])[0])
    if architecture.endswith(_TARGETS) and "speculators_model_type" not in config:
        raise ValueError(
            f"{folder} is a {architecture}, a target and no drafter: only DFlash drafters can be imported, exported, measured or "
            "gone on from."
        )
    return config


def _read_object(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object but a {type(content).__name__}.")
    return content


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter instead of a drafter.

    Raises:
        `ValueError`: if it holds both.
    """
    if not (folder / ADAPTER_FILES[0]).exists():
        return False
    if (folder / "config.json").exists():
        raise ValueError(
            f"{folder} holds a drafter and a PEFT adapter ({', '.join(ADAPTER_FILES)}), and loaders differ in what they make of it: "
            "move one of them elsewhere."
        )
    return True


def _open_base(folder: Path) -> Path:
    """The folder of the drafter that an adapter was trained on."""
    base = _read_object(folder / ADAPTER_FILES[0]).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{folder / ADAPTER_FILES[0]} does not name the drafter below the adapter (`base_model_name_or_path`)."
        )
    try:
        return open_folder(base)
    except OSError as error:
        raise OSError(
            f"{folder} holds an adapter for the drafter {base}, which cannot be read: put its folder or Hub id into "
            f"{ADAPTER_FILES[0]} (`base_model_name_or_path`). {error}"
        ) from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, sharded or not. Of a folder that holds both, the single file, as in transformers;
    of an adapter's folder, those of the drafter that it makes, in fp32.

    Raises:
        `FileNotFoundError`: if there are none, or the index names a shard that is missing.
        `ValueError`: if a file is damaged.
        `ImportError`: if peft is needed and missing, saying what to install.
    """
    if is_adapter(folder):
        base = read_native_drafter(_open_base(folder))
        return dict(import_peft().PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict())
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if index.exists() and not (folder / WEIGHTS_FILE).exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / WEIGHTS_FILE]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing)}: a drafter's weights are expected there.")
    tensors = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{file} is damaged or was not copied whole: take it from its source again. {error}"
            ) from error
    return tensors


def check_tensors(tensors: dict[str, torch.Tensor], config) -> None:
    """Refuses weights that are not those of a drafter of this config.

    Raises:
        `ValueError`: naming tensors that are missing, unknown, of another shape, quantized or not finite.
    """
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
    # Of fewer than 16 bits, or whole numbers: codes, which mean something with their scales only.
    codes = [name for name, tensor in tensors.items() if not tensor.is_floating_point() or tensor.dtype.itemsize < 2]
    if codes:
        raise ValueError(
            f"Quantized (as {tensors[codes[0]].dtype}): {_shorten(codes)}. Take the drafter before it was quantized."
        )
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"Not finite (NaN or infinity): {_shorten(broken)}. Take an earlier checkpoint.")


def read_native_form(folder: Path) -> tuple[DFlashConfig, dict[str, torch.Tensor]]:
    """Config and tensors of a folder in our own form.

    Raises:
        `ValueError`: if it is in another project's form.
        `FileNotFoundError`: if a file is missing.
    """
    config_dict = read_config(folder)
    if config_dict.get("model_type") != "dflash":
        raise ValueError(
            f"{folder} is not in hf_dflash's own layout (`model_type` is {config_dict.get('model_type')!r}): "
            "`hf-dflash import` it first."
        )
    return DFlashConfig.from_dict(config_dict), read_tensors(folder)


def read_native_drafter(name_or_path: str | Path) -> DFlashForSpeculation:
    """
    A whole drafter of our own layout, in fp32. `from_pretrained` fills what is missing with random numbers, and such a drafter
    is measured, or trained on, like any other.

    Args:
        name_or_path (`str` or `Path`): Hub id or folder.

    Raises:
        `ValueError`: if it is in another project's layout, or its weights are not those of its config, or not finite.
        `OSError`: if it cannot be read.
    """
    folder = open_folder(name_or_path)
    config, tensors = read_native_form(folder)
    check_tensors(tensors, config)
    model = DFlashForSpeculation(config)
    model.load_state_dict(tensors)
    model.config._name_or_path = model.name_or_path = str(name_or_path)
    return model.eval()


def merge_adapter(model) -> DFlashForSpeculation:
    """
    The drafter that an adapter makes, in fp32. The model stays as it is: it may be in training.

    Args:
        model (`peft.PeftModel`): on a [`DFlashForSpeculation`].
    """
    return copy.deepcopy(model).float().merge_and_unload()


def import_peft():
    """
    Raises:
        `ImportError`: if peft is missing, saying what to install.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters need peft: `pip install 'hf-dflash[peft]'`.") from error
    return peft


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_is_free(output_dir: str | Path) -> Path:
    """
    Raises:
        `FileExistsError`: if there is anything that would be overwritten.
    """
    output_dir = Path(output_dir)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise FileExistsError(f"{output_dir} exists and is not an empty folder: choose another one.")
    return output_dir


class complete_or_absent:
    """A folder to write in, which takes its final name only if everything went well."""

    def __init__(self, output_dir: Path):
        # Where a link leads, for a folder does not take the place of a link.
        self.output_dir = output_dir.resolve()

    def __enter__(self) -> Path:
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.output_dir.name}-", dir=self.output_dir.parent))
        return self.temporary

    def __exit__(self, kind, *_):
        if kind is not None:
            shutil.rmtree(self.temporary)
            return
        # mkdtemp makes folders that only their owner may read.
        self.temporary.chmod(0o755)
        self.temporary.replace(self.output_dir)
