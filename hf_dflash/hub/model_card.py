# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The model card of a drafter: what it is for, how it was made and measured, and commands that work for this very folder."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..markdown_table import table_cell
from .portability import find_problems


PACKAGE = Path(__file__).parents[1]
TEMPLATE_NAME = Path("model_card", "drafter_card.md.jinja")
# A wheel carries the folder `model_card/` inside the package, a checkout has it beside the package.
TEMPLATE = next(path for path in (PACKAGE / TEMPLATE_NAME, PACKAGE.parent / TEMPLATE_NAME) if path.is_file())
# Beside the card, where a run has drawn them.
CURVES_FILE = "training_curves.png"
# Where the card's metadata keeps the training record, for the cards of other forms of the same drafter.
_RECORD_KEY = "hf_dflash"


@dataclass
class AcceptanceFigure:
    """
    Args:
        prompts (`str`): which prompts.
        acceptance_length (`float`): tokens per verify pass, bonus token included.
        setting (`str`): how it was measured: temperature, thinking, number of prompts, really decoded or simulated.
    """

    prompts: str
    acceptance_length: float
    setting: str


@dataclass
class TrainingRecord:
    """
    What a card says about the making of a drafter.

    Args:
        data (`str`, *optional*): one sentence about the completions.
        datasets (`list[str]`, *optional*): Hub ids of data sets.
        hyperparameters (`dict`, *optional*): names and values.
        acceptance (`list[AcceptanceFigure]`, *optional*): measured figures.
        license (`str`, *optional*): of the drafter, as the Hub spells it.
        progress (`str`, *optional*): one sentence about how far training has come.
        versions (`dict[str, str]`, *optional*): what it was made with.
    """

    data: str | None = None
    datasets: list[str] = field(default_factory=list)
    hyperparameters: dict = field(default_factory=dict)
    acceptance: list[AcceptanceFigure] = field(default_factory=list)
    license: str | None = None
    progress: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


def create_drafter_card(
    config,
    *,
    form: str = "native",
    target_name: str | None = None,
    repo_id: str | None = None,
    serving_revision: str | None = None,
    native_revision: str | None = None,
    record: TrainingRecord | None = None,
    has_curves: bool = False,
    tags: list[str] | None = None,
) -> ModelCard:
    """
    Args:
        config ([`DFlashConfig`]):
            The drafter's.
        form (`str`, *optional*, defaults to `"native"`):
            `"native"` or `"serving"`, whichever folder the card lies in.
        target_name (`str`, *optional*):
            Hub id of the target; that of the config by default.
        repo_id (`str`, *optional*):
            Hub id of the drafter, for title and commands.
        serving_revision (`str`, *optional*):
            The revision of the repository that holds the serving form, if not its main one.
        native_revision (`str`, *optional*):
            The revision of the repository that holds the native form, if not its main one.
        record ([`TrainingRecord`], *optional*):
            How it was trained and measured.
        has_curves (`bool`, *optional*, defaults to `False`):
            Whether `training_curves.png` lies beside the card.
        tags (`list[str]`, *optional*):
            Further tags.

    Returns:
        `huggingface_hub.ModelCard`: `.save(folder / "README.md")` writes it.

    Raises:
        `ValueError`: if `form` is unknown.
    """
    if form not in ("native", "serving"):
        raise ValueError(f"`form` is {form!r}: a drafter is saved in the 'native' or the 'serving' form.")
    record = record or TrainingRecord()
    target_name = target_name or config.target_name_or_path or "TARGET"
    repo_id = repo_id or "DRAFTER"
    # What the engines are pointed at: this repository, or the folder that the export writes.
    served = "EXPORTED" if form == "native" and serving_revision is None else repo_id
    vllm_config = {"method": "dflash", "model": served, "num_speculative_tokens": config.block_size - 1}
    if serving_revision:
        vllm_config["revision"] = serving_revision
    target_is_on_hub = target_name != "TARGET" and not is_local_path(target_name)

    card_data = ModelCardData(
        base_model=target_name if target_is_on_hub else None,
        datasets=record.datasets or None,
        license=record.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(["dflash", "speculative-decoding", "hf_dflash", *(tags or [])])),
        **({_RECORD_KEY: asdict(record)} if record != TrainingRecord() else {}),
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        config=config,
        form=form,
        target_name=target_name,
        target_is_on_hub=target_is_on_hub,
        repo_id=repo_id,
        serving_revision=serving_revision,
        native_revision=native_revision,
        served=served,
        vllm_config=json.dumps(vllm_config),
        # Names of folders may hold spaces and quotes.
        shell=shlex.quote,
        cell=table_cell,
        layer_kinds=_describe_layers(config),
        causality=_describe_causality(config),
        warnings=[str(problem) for problem in find_problems(config)],
        record=record,
        has_curves=has_curves,
        curves_file=CURVES_FILE,
    )


def is_local_path(name: str) -> bool:
    """Whether a model's name says where it lies on some disk: such a name is no Hub id, and nothing for others to see."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return Path(name).is_dir()


def read_training_record(folder: Path) -> TrainingRecord | None:
    """The record that the card in a native folder carries, `None` where there is none.

    Args:
        folder (`Path`): of the drafter.

    Raises:
        `ValueError`: if the card's metadata was changed into something that cannot be read.
    """
    path = folder / "README.md"
    if not path.exists():
        return None
    try:
        values = ModelCard.load(path).data.to_dict().get(_RECORD_KEY)
        if values is None:
            return None
        values = {name: value for name, value in values.items() if value is not None}
        for figure in values.get("acceptance", []):
            figure["acceptance_length"] = float(figure["acceptance_length"])
        values["acceptance"] = [AcceptanceFigure(**figure) for figure in values.get("acceptance", [])]
        return TrainingRecord(**values)
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The metadata of the card {path}, between its lines `---`, cannot be read: mend it, or take the card away. "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def _describe_layers(config) -> str:
    sliding = config.layer_types.count("sliding_attention")
    if not sliding:
        return "full attention"
    if sliding == len(config.layer_types):
        return f"window of {config.sliding_window}"
    return (
        f"{sliding} with a window of {config.sliding_window}, {len(config.layer_types) - sliding} with full attention"
    )


def _describe_causality(config) -> str:
    if config.is_causal:
        return "a slot sees the slots before it"
    if config.is_causal is None and "sliding_attention" in config.layer_types:
        return "slots see all slots in full-attention layers, the slots before them in the others"
    return "slots see all slots"
