# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What `hf-dflash train` makes of its options, does before it trains, and leaves behind when it fails there."""

import gzip
import json
import os
from itertools import islice
from pathlib import Path

import pytest
import yaml

import hf_dflash.training.run as run
from hf_dflash import DFlashForSpeculation
from hf_dflash.data import tokenization
from hf_dflash.data.sources import digest_of
from hf_dflash.object_store import ObjectStore
from hf_dflash.training.checkpoint import mark_whole
from hf_dflash.training.plan import main as plan


pytestmark = pytest.mark.compat

POCKET = Path(__file__).parents[2] / "recipes" / "pocket"


# ---- Where options come from ----


def test_a_flag_beats_the_file_and_the_file_beats_the_default(job_file):
    job, args = run.parse_job(["--learning_rate", "1e-3", "--config", str(job_file), "--completions", "c.jsonl"])
    assert args.learning_rate == 1e-3 and job.completions == ["c.jsonl"]
    assert (job.block_size, job.target_layer_ids, args.save_each_epoch) == (4, [1, 3], True)
    assert args.lr_scheduler_kwargs == {"num_cycles": 0.4}
    assert args.num_train_epochs == 6


def test_words_that_yaml_takes_for_booleans_are_what_the_option_calls_them(job_file):
    words = "pipeline: off\ncompile_layers: on\neval_strategy: no\nsave_strategy: No\nbf16: off\nenable_thinking: no\n"
    job_file.write_text(job_file.read_text() + words)
    job, args = run.parse_job(["--config", str(job_file)])
    assert (args.pipeline, args.compile_layers, args.bf16, job.enable_thinking) == ("off", "on", False, False)
    assert args.eval_strategy == args.save_strategy == "no"


@pytest.mark.parametrize("how", ["file", "flag"])
def test_an_unknown_key_is_an_error_that_names_it_and_the_one_that_is_meant(how, job_file):
    argv = ["--config", str(job_file)]
    if how == "file":
        job_file.write_text(job_file.read_text() + "lerning_rate: 1\n")
    else:
        argv += ["--lerning-rate", "1"]
    with pytest.raises(ValueError, match=r"lerning.rate \(did you mean (--)?learning_rate\?\)"):
        run.parse_job(argv)


@pytest.mark.parametrize("option", [["--config", "{}"], ["--config={}"]])
def test_a_file_is_named_in_two_words_or_one_and_a_later_file_beats_an_earlier_one(option, job_file, tmp_path):
    (tmp_path / "later.yaml").write_text("learning_rate: 5.0e-4\n")
    argv = [word.format(path) for path in (job_file, tmp_path / "later.yaml") for word in option]
    job, args = run.parse_job(argv)
    assert (args.learning_rate, job.block_size) == (5e-4, 4)
    with pytest.raises(ValueError, match="needs the name of a YAML file"):
        run.parse_job([*argv, "--config"])


@pytest.mark.parametrize(
    "command, needed",
    [(run.main, "--target TARGET --completions COMPLETIONS"), (plan, "--target TARGET")],
    ids=["train", "plan"],
)
def test_help_and_errors_show_what_a_command_needs_and_where_options_may_stand(command, needed, capsys):
    with pytest.raises(SystemExit):
        command(["--help"])
    out = capsys.readouterr().out
    assert f"{needed} [--config FILE]" in out.splitlines()[0] and "--config FILE " in out
    with pytest.raises(SystemExit):
        command(["--learning_rate", "1"])
    usage, error = capsys.readouterr().err.splitlines()
    assert needed in usage and error.endswith("required: " + ", ".join(needed.split()[::2]))


def test_a_dry_run_prints_the_resolved_run_and_the_memory_and_loads_nothing(job_file, monkeypatch):
    monkeypatch.setattr(run, "load_targets", lambda *args, **kwargs: pytest.fail("loaded the target"))
    flags = ["--learning_rate", "1e-3", "--debug", "underflow_overflow", "--map_role", "critic=assistant"]
    flags += ["--chat_template_kwargs", '{"effort": "low"}', "--resume_from_checkpoint", "true", "--dry_run"]
    job, args = run.parse_job(["--config", str(job_file), *flags])
    assert job.dry_run
    text = run.describe_job(job, args)
    resolved, _, placement = text.partition("\n\n")
    options = yaml.safe_load(resolved)
    assert options["learning_rate"] == 1e-3 and options["save_each_epoch"] is True
    # What is printed is itself a job file.
    job_file.write_text(resolved)
    again, again_args = run.parse_job(["--config", str(job_file)])
    assert vars(again) == {**vars(job), "dry_run": False}
    assert again_args.to_dict() == args.to_dict()
    assert "rank 0: drafter cpu, target cpu" in placement and "optimizer, fp32" in placement
    assert not os.path.exists(args.output_dir)


# ---- Before it trains ----


@pytest.fixture
def arguments(tmp_path):
    """A job of 30 completions that would train; more options may follow."""
    completions = tmp_path / "completions.jsonl"
    with gzip.open(POCKET / "completions_train.jsonl.gz", "rt", encoding="utf-8") as source:
        completions.write_text("".join(islice(source, 30)), encoding="utf-8")
    options = (
        "--use_cpu true --num_hidden_layers 1 --block_size 4 --token_budget 512 --max_steps 1 --max_reply_share 1"
    )
    options += f" --target {POCKET} --completions {completions} --output_dir {tmp_path / 'out' / 'run'}"
    return [*options.split(), "--report_to", "none"]


@pytest.mark.parametrize(
    "mistake, message",
    [
        ("--lerning_rate 1", "unknown option"),
        ("--target ./nowhere", "There is no folder"),
        ("--completions nowhere.jsonl", "nowhere.jsonl"),
        ("--eval_completions nowhere.jsonl", "nowhere.jsonl"),
        ("--eval_strategy epoch", "--eval_strategy epoch.*--eval_completions"),
        ("--acceptance_steps 1", "--acceptance_steps.*--eval_completions"),
        (
            "--metric_for_best_model acceptance --eval_completions nowhere.jsonl",
            "--metric_for_best_model acceptance.*accuracy",
        ),
        ("--fp16 true", "--fp16.*--bf16"),
        ("--target_dtype floaty", "--target_dtype floaty"),
        ("--mask_token_id 99999999", "mask_token_id"),
        ("--target_layer_ids 500", "target_layer_ids"),
        ("--num_attention_heads 3 --num_key_value_heads 2", "num_attention_heads"),
        ("--num_hidden_layers 0", "num_hidden_layers.*at least 1"),
        ("--num_attention_heads 0", "num_attention_heads.*at least 1"),
        ("--intermediate_size 0", "intermediate_size.*at least 1"),
        ("--head_dim 3", "head_dim.*even"),
        ("--num_target_features 0", "num_target_features"),
        ("--attention_backend flex", "--attention_backend flex"),
        ("--lora_rank 4", "--lora_rank.*--drafter"),
        (f"--init_from_target --drafter {POCKET}", "--init_from_target.*--drafter"),
        (f"--drafter {POCKET}", "can be imported"),
        ("--max_length 1", "max_length"),
        ("--chat_template nowhere.jinja", "nowhere.jinja"),
        ("--map_role critic=robot", "'critic' cannot be read as 'robot'"),
        ("--resume_from_checkpoint true", "--resume_from_checkpoint true.*no whole checkpoint in .*run"),
        ("--resume_from_checkpoint nowhere", "no checkpoint nowhere"),
    ],
)
def test_a_mistake_that_can_be_seen_at_once_leaves_nothing_behind(mistake, message, arguments, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        run.main([*arguments, *mistake.split()])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "option", ["--block_size 8", "--num_hidden_layers 2", "--target_layer_ids 1 2", "--sliding_window 8"]
)
def test_a_drafter_to_go_on_from_is_not_taken_for_one_of_other_sizes(option, arguments, tmp_path):
    run.run_job(*run.parse_job(arguments))
    go_on = [*arguments, "--output_dir", str(tmp_path / "more"), "--drafter", str(tmp_path / "out" / "run")]
    with pytest.raises(ValueError, match=f"`{option.split()[0]} .* is for a new drafter, and .*run has "):
        run.run_job(*run.parse_job([*go_on, *option.split()]))
    assert not (tmp_path / "more").exists()


def test_a_launch_of_several_processes_that_gave_one_leaves_nothing_behind(arguments, tmp_path, monkeypatch):
    job, args = run.parse_job(arguments)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes were asked for and this one is alone"):
        run.make_trainer(job, args)
    assert not (tmp_path / "out").exists()


def test_completions_are_read_as_the_target_was_served_and_roles_as_they_are_mapped(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_job", run.make_trainer)
    template = tmp_path / "template.jinja"
    own = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    template.write_text("{# another one #}" + own, encoding="utf-8")
    options = ["--chat_template", str(template), "--chat_template_kwargs", '{"effort": "low"}']
    options += ["--map_role", "critic=assistant", "--map_role", "judge=user", "--min_supervised_tokens", "3"]
    assert run.main([*arguments, *options]) == 0
    manifest = json.loads((tmp_path / "out" / "run" / "dataset" / "train" / "manifest.json").read_text())
    assert manifest["tokenizer"]["chat_template_digest"] == digest_of(template.read_text(encoding="utf-8"))
    assert manifest["options"]["chat_template_kwargs"] == {"effort": "low"}
    assert manifest["options"]["extra_roles"] == {"critic": "assistant", "judge": "user"}
    assert manifest["options"]["min_supervised_tokens"] == 3


@pytest.fixture
def args_of(tmp_path):
    """Options of a run that left `checkpoint-<step>` for some steps, and half of another one."""

    def make(wish, *steps, from_file=False):
        for step in steps:
            (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
            mark_whole(tmp_path / "run" / f"checkpoint-{step}", {})
        (tmp_path / "run" / "checkpoint-11").mkdir(parents=True, exist_ok=True)
        argv = ["--target", "t", "--completions", "c", "--use_cpu", "true", "--output_dir", str(tmp_path / "run")]
        if from_file:
            (tmp_path / "job.yaml").write_text(f"resume_from_checkpoint: {wish}\n")
            argv += ["--config", str(tmp_path / "job.yaml")]
        elif wish is not None:
            argv += ["--resume_from_checkpoint", wish]
        return run.parse_job(argv)[1]

    return make


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("wish", ["true", "True", "auto"])
def test_a_job_goes_on_from_the_newest_whole_checkpoint(wish, from_file, args_of, tmp_path):
    args = args_of(wish, 2, 10, from_file=from_file)
    assert run.choose_checkpoint(args) == str(tmp_path / "run" / "checkpoint-10")


@pytest.mark.parametrize("wish", [None, "auto", "false"])
def test_a_job_without_a_whole_checkpoint_is_a_new_run(wish, args_of):
    assert run.choose_checkpoint(args_of(wish)) is None


def test_a_new_run_is_not_begun_among_the_checkpoints_of_another(args_of):
    with pytest.raises(ValueError, match="--resume_from_checkpoint False.*checkpoint-2 is there.*--output_dir"):
        run.choose_checkpoint(args_of("false", 2, from_file=True))


def test_a_checkpoint_that_is_named_is_taken_if_it_is_whole(args_of, tmp_path):
    folder = str(tmp_path / "run" / "checkpoint-")
    assert run.choose_checkpoint(args_of(f"{folder}2", 2, 10)) == f"{folder}2"
    with pytest.raises(ValueError, match="checkpoint-11 is no whole checkpoint"):
        run.choose_checkpoint(args_of(f"{folder}11"))


def test_the_latest_checkpoint_of_an_s3_prefix_is_looked_up_once(arguments, tmp_path, monkeypatch):
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    from s3_server import running_s3

    asked = []
    with running_s3():
        read_latest = ObjectStore.read_latest
        run.run_job(*run.parse_job([*arguments, "--save_steps", "1", "--checkpoint_uri", "s3://bucket/run"]))
        monkeypatch.setattr(ObjectStore, "read_latest", lambda *args: asked.append(args[1]) or read_latest(*args))
        more = ["--max_steps", "2", "--resume_from_checkpoint", "s3://bucket/run", "--output_dir", str(tmp_path / "b")]
        trainer = run.run_job(*run.parse_job([*arguments, *more]))
    assert trainer.state.global_step == 2
    assert asked == ["s3://bucket/run"]


def test_a_bucket_that_does_not_exist_is_refused_before_anything_is_tokenized(arguments, tmp_path):
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    from s3_server import running_s3

    with (
        running_s3(),
        pytest.raises(FileNotFoundError, match="`--checkpoint_uri s3://nowhere/run`: create the bucket"),
    ):
        run.main([*arguments, "--checkpoint_uri", "s3://nowhere/run"])
    assert not (tmp_path / "out").exists()


def test_data_that_is_refused_gives_way_to_what_was_mended(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_job", run.make_trainer)
    completions = tmp_path / "completions.jsonl"
    good = completions.read_text(encoding="utf-8")
    completions.write_text("{broken", encoding="utf-8")
    with pytest.raises(ValueError, match="bad_json"):
        run.main(arguments)
    completions.write_text(good, encoding="utf-8")
    assert run.main(arguments) == 0


def test_a_dataset_that_was_tokenized_is_kept_when_the_target_cannot_be_loaded(arguments, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the target's weights are not there")

    monkeypatch.setattr(run, "load_targets", fail)
    with pytest.raises(OSError, match="weights are not there"):
        run.main(arguments)
    monkeypatch.undo()
    monkeypatch.setattr(tokenization, "_run_units", lambda *args: pytest.fail("tokenized again"))
    assert run.main(arguments) == 0
    assert DFlashForSpeculation.from_pretrained(tmp_path / "out" / "run").config.block_size == 4


@pytest.mark.parametrize("left", ["a stopped run", "not one sample"])
def test_a_plan_does_not_take_half_a_dataset_for_the_documents(left, arguments, tmp_path, capsys):
    if left == "a stopped run":
        folder = tmp_path / "out" / "run" / "dataset" / "train"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"status": "running"}))
    else:
        (tmp_path / "completions.jsonl").write_text("{broken", encoding="utf-8")
        with pytest.raises(ValueError, match="bad_json"):
            run.main(arguments)
    assert plan(arguments) == 0
    assert "documents assumed" in capsys.readouterr().out
