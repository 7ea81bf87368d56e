# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One training job from completions to a saved drafter: what `hf-dflash train` and the recipes run.

    accelerate launch recipes/train_qwen36.py --completions completions/*.jsonl
    hf-dflash train --target Qwen/Qwen3-0.6B --completions completions.jsonl --output_dir drafter
    hf-dflash train --config job.yaml --learning_rate 3e-4

Options come from a YAML file (`--config`) and from flags; a flag beats the file, and an unknown key is an error.
"""

import argparse
import difflib
import json
import os
import re
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser
from transformers.trainer_utils import set_seed

from ..data.dataset_gates import DatasetGates
from ..data.tokenization_options import TokenizationOptions
from ..data.tokenized_dataset import is_tokenized_dataset
from ..drafter.configuration_dflash import DFlashConfig, create_drafter_config
from ..drafter.modeling_dflash import DFlashForSpeculation
from ..object_store import is_object_uri
from ..target.frozen_target import FrozenTarget
from .adapters import make_lora_config
from .arguments import BEST_METRIC, DFlashTrainingArguments
from .checkpoint import check_whole, find_last_checkpoint
from .checks import check_can_train
from .evaluation import METRICS
from .host_group import HostGroup
from .plan import check_launch, describe_plan, place_targets_of_this_process
from .run_lock import only_run_in
from .s3_checkpoints import check_can_upload, locate_checkpoint
from .target_loading import load_targets
from .trainer import DFlashTrainer
from .warm_start import initialize_from_target, load_drafter


def _gate(name: str):
    """A gate as an option: with the default and the help that it has."""
    gate = DatasetGates.__dataclass_fields__[name]
    return field(default=gate.default, metadata=gate.metadata)


@dataclass
class JobData:
    """
    What is read.

    Args:
        target (`str`): Hub id or folder of the target.
        completions (`list[str]`): what the target wrote: JSONL files, folders, globs, `s3://` prefixes, `hub://` datasets.
        eval_completions (`list[str]`, *optional*): held-out completions.
        dataset_dir (`str`, *optional*): where tokenized completions are kept; `output_dir`/dataset by default.
    """

    target: str = field(metadata={"help": "Hub id or folder of the target."})
    completions: list[str] = field(
        metadata={"help": "What the target wrote: JSONL files, folders, globs, s3:// prefixes, hub:// datasets."}
    )
    eval_completions: list[str] | None = field(default=None, metadata={"help": "Held-out completions."})
    dataset_dir: str | None = field(
        default=None, metadata={"help": "Where tokenized completions are kept; OUTPUT_DIR/dataset by default."}
    )


@dataclass
class JobArguments(TokenizationOptions, JobData):
    """
    What is trained on what: [`JobData`], [`~data.tokenization_options.TokenizationOptions`] and the options below. How it is
    trained is in [`DFlashTrainingArguments`].

    Args:
        max_short_share, max_reply_share, min_supervised_share (`float`, *optional*): gates that the training set must pass,
            see [`~data.dataset_gates.DatasetGates`].
        drafter (`str`, *optional*): a drafter to go on from, ours or another project's; a new one is made if not given.
        init_from_target (`bool`, *optional*, defaults to `False`): see [`initialize_from_target`].
        lora_rank (`int`, *optional*): train a LoRA adapter of this rank on `drafter`.
        target_adapter (`str`, *optional*), merge_target_adapter (`bool`, *optional*, defaults to `True`): see
            [`apply_target_adapter`].
        dry_run (`bool`, *optional*, defaults to `False`): print the resolved run, load nothing.
        num_hidden_layers, block_size, mask_token_id, target_layer_ids, num_target_features, sliding_window,
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of a new drafter, see [`create_drafter_config`].
        target_dtype (`str`, *optional*, defaults to `"auto"`): dtype of the target's weights.
    """

    max_short_share: float = _gate("max_short_share")
    max_reply_share: float = _gate("max_reply_share")
    min_supervised_share: float = _gate("min_supervised_share")
    drafter: str | None = field(
        default=None, metadata={"help": "A drafter to go on from, ours or another project's; a new one if not given."}
    )
    init_from_target: bool = field(
        default=False, metadata={"help": "Start a new drafter from layers of the target, where shapes agree."}
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train a LoRA adapter of this rank on --drafter instead of all of it."}
    )
    target_adapter: str | None = field(
        default=None, metadata={"help": "A PEFT adapter that the target is served with."}
    )
    merge_target_adapter: bool = field(
        default=True, metadata={"help": "Add that adapter to the target's weights; else it is computed beside them."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Print the resolved run and what it needs; load and train nothing."}
    )
    num_hidden_layers: int = field(default=5, metadata={"help": "Layers of a new drafter (paper: 5)."})
    block_size: int = field(default=16, metadata={"help": "Slots of a block, anchor included (paper: 16)."})
    mask_token_id: int | None = field(default=None, metadata={"help": "An unused token; found if not given."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Target layers that the drafter reads; evenly spaced if not given."}
    )
    num_target_features: int = field(default=5, metadata={"help": "How many target layers to choose (paper: 5)."})
    sliding_window: int | None = field(
        default=None, metadata={"help": "Window of all drafter layers; none if not given."}
    )
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP width of a new drafter; the target's."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Query heads of a new drafter."})
    num_key_value_heads: int | None = field(default=None, metadata={"help": "Key and value heads of a new drafter."})
    head_dim: int | None = field(default=None, metadata={"help": "Width of a head of a new drafter."})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the target's weights."})

    @property
    def gates(self) -> DatasetGates:
        """What the training set must fulfil before a model is loaded."""
        return DatasetGates(self.block_size, self.max_short_share, self.max_reply_share, self.min_supervised_share)

    def __post_init__(self):
        super().__post_init__()
        for path in (self.target, self.drafter):
            if path is not None and path.startswith((".", "/", "~")) and not os.path.isdir(os.path.expanduser(path)):
                raise ValueError(f"There is no folder {path}: give a Hub id or the folder of a saved model.")
        if self.target_dtype != "auto" and not isinstance(getattr(torch, self.target_dtype, None), torch.dtype):
            raise ValueError(f"`--target_dtype {self.target_dtype}`: give auto, or a dtype of torch such as bfloat16.")
        if self.lora_rank is not None and self.drafter is None:
            raise ValueError("`--lora_rank` adapts a drafter that is trained already: name it with `--drafter`.")
        if self.init_from_target and self.drafter is not None:
            raise ValueError(
                "`--init_from_target` is for a new drafter, and `--drafter` goes on from one: give one of them."
            )


def parse_job(
    argv: list[str] | None = None, *also: type, prog: str = "hf-dflash train", needs_completions: bool = True
) -> tuple:
    """Reads a job from flags and, with `--config`, from YAML files.

    Args:
        argv (`list[str]`, *optional*): flags.
        also (`type`): dataclasses of further flags.
        prog (`str`, *optional*, defaults to `"hf-dflash train"`): the command that help and errors name.
        needs_completions (`bool`, *optional*, defaults to `True`): whether a job without `--completions` is an error.

    Returns:
        `(JobArguments, DFlashTrainingArguments, ...)`.

    Raises:
        `ValueError`: if the file has an unknown key or a flag is unknown, naming it, or an option is unusable.
    """
    parser = HfArgumentParser((JobArguments, DFlashTrainingArguments, *also), prog=prog, allow_abbrev=False)
    # For its help: the files are read before, and their options put in front, so that flags beat them. Suppressed, as what is no
    # field of a dataclass would come back as one more result.
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of options; a flag beats it."
    )
    # HfArgumentParser makes these of switches that are on by default only.
    parser.add_argument(
        "--no_enable_thinking",
        "--no-enable-thinking",
        dest="enable_thinking",
        action="store_false",
        default=argparse.SUPPRESS,
        help="The chat template is told not to think.",
    )
    for action in parser._actions:
        if action.dest == "completions":
            action.required = needs_completions
    # The list of 200 options is for `--help`, not for every error.
    required = [f"{action.option_strings[0]} {action.dest.upper()}" for action in parser._actions if action.required]
    parser.usage = " ".join(["%(prog)s", *required, "[--config FILE]", "[--OPTION VALUE ...]"])
    argv = _with_options_of_files(argv if argv is not None else [], parser)
    *parsed, unused = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unused:
        known = {f.name for dataclass_type in parser.dataclass_types for f in fields(dataclass_type)} | {"config"}
        # Without their values, unless values are all there is.
        names = [name for name in unused if name.startswith("-")] or unused
        raise ValueError(f"unknown option(s) {_name_unknown(names, known)}: see `{prog} --help`.")
    return tuple(parsed)


def _name_unknown(names: list[str], known: set[str]) -> str:
    """Each of them, with the option that it may be meant to be."""
    named = []
    for name in names:
        option = name.removeprefix("--").partition("=")[0].replace("-", "_")
        alike = difflib.get_close_matches(option, known, n=1)
        prefix = "--" if name.startswith("--") else ""
        named.append(f"{name} (did you mean {prefix}{alike[0]}?)" if alike else name)
    return ", ".join(named)


def _with_options_of_files(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The flags, and in front of them the options of the files that `--config` names: of two the last one counts."""
    of_files, flags = [], []
    words = iter(argv)
    for word in words:
        name, equals, path = word.partition("=")
        if name != "--config":
            flags.append(word)
            continue
        path = path if equals else next(words, None)
        if not path:
            raise ValueError("`--config` needs the name of a YAML file.")
        of_files += _flags_of_file(path, parser)
    return of_files + flags


def _flags_of_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    options = yaml.safe_load(text) or {}
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold `option: value` lines, not {type(options).__name__}.")
    known = {f.name for dataclass_type in (JobArguments, DFlashTrainingArguments) for f in fields(dataclass_type)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(
            f"{path} has unknown option(s) {_name_unknown(unknown, known)}: see `hf-dflash train --help`."
        )
    # To YAML `off` and `no` are false; to `--pipeline off` and `--eval_strategy no` they are words.
    words = yaml.load(text, Loader=yaml.BaseLoader)
    choices = {action.dest: action.choices or () for action in parser._actions}
    flags = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) and words[name].lower() in choices.get(name, ()):
            value = words[name].lower()
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def describe_job(job: JobArguments, args: DFlashTrainingArguments) -> str:
    """The resolved run: every option of the job, those of training that are not the default, and what it all needs."""
    defaults = DFlashTrainingArguments(args.output_dir, use_cpu=args.use_cpu)
    options = {f.name: getattr(job, f.name) for f in fields(job) if f.name != "dry_run"}
    for f in fields(args):
        value = getattr(args, f.name)
        if f.init and value != getattr(defaults, f.name) and not callable(value):
            values = [getattr(item, "value", item) for item in (value if isinstance(value, list) else [value])]
            options[f.name] = values if isinstance(value, list) else values[0]
    options |= {"output_dir": args.output_dir, "use_cpu": args.use_cpu}
    resolved = yaml.safe_dump({k: v for k, v in options.items() if v is not None}, sort_keys=False)
    num_devices = 0 if args.device.type == "cpu" else torch.cuda.device_count()
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return resolved + "\n" + describe_plan(job, args, num_processes, num_devices, *read_document_sizes(job, args))


def dataset_folder(job: JobArguments, args: DFlashTrainingArguments, name: str) -> str:
    """Where the tokenized completions `"train"` or `"eval"` are kept."""
    return os.path.join(job.dataset_dir or os.path.join(args.output_dir, "dataset"), name)


def read_document_sizes(job: JobArguments, args: DFlashTrainingArguments) -> tuple:
    """Lengths and supervised tokens of the documents, or nothing if they are not tokenized yet, or not all of them."""
    folder = dataset_folder(job, args, "train")
    if not is_tokenized_dataset(folder):
        return ()
    from datasets import load_from_disk

    dataset = load_from_disk(folder)
    if not len(dataset) or "num_supervised" not in dataset.column_names:
        return ()
    return dataset["length"], dataset["num_supervised"]


def prepare_dataset(job: JobArguments, args: DFlashTrainingArguments, sources: list[str], name: str):
    """Tokenizes completions, or takes what an earlier start has tokenized with the same options.

    Args:
        job ([`JobArguments`]), args ([`DFlashTrainingArguments`]): the job.
        sources (`list[str]`): completions.
        name (`str`): folder under `dataset_dir`.

    Returns:
        `datasets.Dataset`: with `input_ids`, `loss_mask`, `length`, `row_id`.
    """
    from datasets import load_from_disk

    from ..data.tokenization import tokenize_completions

    folder = dataset_folder(job, args, name)
    if args.process_index == 0:
        # Held-out sets are small and chosen: shares say little about them.
        gates = job.gates if name == "train" else None
        tokenize_completions(
            sources, job.target, folder, **job.for_tokenizing(), gates=gates, disable_tqdm=args.disable_tqdm
        )
    # Not `main_process_first`: tokenizing a corpus takes longer than a collective may.
    HostGroup(args.world_size).wait()
    return load_from_disk(folder)


def load_target(job: JobArguments, layer_ids: list[int], places: list[str]) -> list[FrozenTarget]:
    """Loads this process's targets onto their devices."""
    return load_targets(
        job.target,
        layer_ids,
        places,
        dtype=job.target_dtype,
        adapter=job.target_adapter,
        merge_adapter=job.merge_target_adapter,
    )


def make_drafter_config(job: JobArguments) -> DFlashConfig:
    """The configuration of the job's drafter."""
    if job.drafter is not None:
        return _load_drafter(job).config
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return create_drafter_config(
        AutoConfig.from_pretrained(job.target),
        num_hidden_layers=job.num_hidden_layers,
        block_size=job.block_size,
        mask_token_id=job.mask_token_id,
        tokenizer=AutoTokenizer.from_pretrained(job.target) if job.mask_token_id is None else None,
        target_layer_ids=job.target_layer_ids,
        num_target_features=job.num_target_features,
        sliding_window=job.sliding_window,
        target_name_or_path=job.target,
        **{name: getattr(job, name) for name in sizes if getattr(job, name) is not None},
    )


def make_drafter(job: JobArguments, args: DFlashTrainingArguments) -> DFlashForSpeculation:
    """A new drafter for the target, the same on every rank, or the one that the job goes on from. In fp32."""
    if job.drafter is not None:
        return _load_drafter(job)
    set_seed(args.seed)
    return DFlashForSpeculation(make_drafter_config(job))


# Options of a new drafter that its config has by the same name.
_OF_A_NEW_DRAFTER = (
    "num_hidden_layers",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "sliding_window",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def _load_drafter(job: JobArguments) -> DFlashForSpeculation:
    """The drafter that the job goes on from, which keeps its sizes."""
    drafter = load_drafter(job.drafter, job.target)
    for name in _OF_A_NEW_DRAFTER:
        wanted, value = getattr(job, name), getattr(drafter.config, name)
        # A default says nothing about what was asked for.
        if wanted != JobArguments.__dataclass_fields__[name].default and wanted != value:
            raise ValueError(
                f"`--{name} {wanted}` is for a new drafter, and {job.drafter} has {value}: leave the option out, or give that "
                "where a recipe sets it."
            )
    return drafter


def check_held_out(job: JobArguments, args: DFlashTrainingArguments) -> None:
    """Refuses options that need held-out completions where there are none, and a metric that no evaluation has.

    Raises:
        `ValueError`: naming the option.
    """
    if job.eval_completions:
        metric = (args.metric_for_best_model or BEST_METRIC).removeprefix("eval_")
        if metric not in METRICS and not re.fullmatch(r"accuracy_slot_\d+", metric):
            raise ValueError(
                f"`--metric_for_best_model {args.metric_for_best_model}`: choose one of {', '.join(METRICS)}, accuracy_slot_K."
            )
        return
    if args.eval_strategy != "no":
        raise ValueError(
            f"`--eval_strategy {args.eval_strategy.value}` evaluates on held-out completions: give `--eval_completions`."
        )
    if args.acceptance_steps:
        raise ValueError("`--acceptance_steps` decodes held-out prompts: give `--eval_completions`.")


def choose_checkpoint(args: DFlashTrainingArguments) -> str | None:
    """The checkpoint that a job goes on from: a folder or an `s3://` URI; `None` for a new run.

    Raises:
        `FileNotFoundError`, `ValueError`: if it is not as `--resume_from_checkpoint` says, naming the fix.
    """
    wish = args.resume_from_checkpoint
    word = "auto" if wish is None else str(wish).lower()
    if word not in ("auto", "true", "false"):
        if is_object_uri(wish):
            return locate_checkpoint(wish)
        check_whole(wish)
        return wish
    newest = find_last_checkpoint(args.output_dir)
    if word == "true" and newest is None:
        raise ValueError(
            f"`--resume_from_checkpoint {wish}`: there is no whole checkpoint in {args.output_dir}. Leave the option out to "
            "start a new run."
        )
    if word == "false" and newest is not None:
        # Of two runs in a folder the next start would go on with that which is further.
        raise ValueError(
            f"`--resume_from_checkpoint {wish}` is for a new run, and {newest} is there: give another `--output_dir`, or "
            "delete the old run's checkpoints."
        )
    return newest


def make_trainer(job: JobArguments, args: DFlashTrainingArguments) -> DFlashTrainer:
    """Makes the drafter, tokenizes, loads the target: everything before training.

    Tokenizing can take hours. What can be refused without it is refused before, and nothing is written then; the held-out set
    comes first, because it is small.
    """
    check_launch(args.world_size)
    check_held_out(job, args)
    # Found once: `latest.json` of an S3 prefix is not asked again when training begins.
    args.resume_from_checkpoint = choose_checkpoint(args)
    if args.checkpoint_uri:
        HostGroup(args.world_size).on_first_rank(lambda: check_can_upload(args.checkpoint_uri))
    places = place_targets_of_this_process(args.target_devices, args.targets_per_process, args.device.type == "cpu")
    drafter = make_drafter(job, args)
    check_can_train(drafter, args)
    eval_dataset = prepare_dataset(job, args, job.eval_completions, "eval") if job.eval_completions else None
    train_dataset = prepare_dataset(job, args, job.completions, "train")
    targets = load_target(job, drafter.config.target_layer_ids, places)
    if job.init_from_target:
        initialize_from_target(drafter, targets[0].model)
    return DFlashTrainer(
        drafter,
        targets,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=make_lora_config(job.lora_rank) if job.lora_rank is not None else None,
    )


def _evaluation_of_these_weights(trainer: DFlashTrainer) -> dict[str, float]:
    """What `Trainer` evaluated behind the last step, if the weights are still those: once is enough."""
    if trainer.args.load_best_model_at_end:
        return {}
    last = [entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step]
    return {name: value for entry in last for name, value in entry.items() if name.startswith("eval_")}


def train_and_save(trainer: DFlashTrainer) -> dict[str, float]:
    """Trains, going on from a checkpoint (see [`choose_checkpoint`]), evaluates and saves the drafter in `output_dir`.

    Returns:
        `dict[str, float]`: the last evaluation, empty without held-out completions.
    """
    args = trainer.args
    trainer.train(resume_from_checkpoint=choose_checkpoint(args))
    metrics = {}
    if trainer.eval_dataset is not None:
        metrics = _evaluation_of_these_weights(trainer) or trainer.evaluate()
        trainer.save_metrics("eval", metrics)
    trainer.save_model()
    trainer.save_state()
    trainer.create_model_card()
    return metrics


def run_job(job: JobArguments, args: DFlashTrainingArguments) -> DFlashTrainer | None:
    """Runs the whole job: tokenize, load, train, evaluate, save. With `dry_run` it only says what that would be.

    Returns:
        [`DFlashTrainer`]: after training; nothing after a dry run.
    """
    if job.dry_run:
        print(describe_job(job, args))
        return None
    # Before the lock: several processes that are not one launch would be told that they keep one another out.
    check_launch(args.world_size)
    # From here on, as tokenizing and loading write there too, or take long.
    with only_run_in(args.output_dir, HostGroup(args.world_size)):
        trainer = make_trainer(job, args)
        train_and_save(trainer)
    return trainer


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash train`."""
    job, args = parse_job(argv)
    try:
        run_job(job, args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
