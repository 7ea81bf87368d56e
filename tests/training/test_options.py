# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Options: where they come from, what they do to a run, and that the documentation lists them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_drafters import make_drafter
from tiny_models import make_target
from tiny_training import (
    GradientRecorder,
    assert_same,
    make_dataset,
    make_trainer,
    relative_difference,
    training_state,
)

from hf_dflash import DFlashForSpeculation, DFlashTrainingArguments, create_drafter_config
from hf_dflash.training.muon import Muon, MuonWithAdamW
from hf_dflash.training.plan import check_launch, main, place_targets
from hf_dflash.training.run import describe_job, parse_job
from hf_dflash.training.run import main as train
from hf_dflash.training.target_loading import load_targets
from hf_dflash.training.warm_start import initialize_from_target


pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[2]


# ---- YAML and flags ----


@pytest.fixture
def job_file(tmp_path):
    make_target("qwen3").save_pretrained(tmp_path / "target")
    path = tmp_path / "job.yaml"
    path.write_text(
        f"target: {tmp_path / 'target'}\ncompletions: [a.jsonl, b.jsonl]\noutput_dir: {tmp_path / 'out'}\n"
        "learning_rate: 3.0e-4\nblock_size: 4\nmask_token_id: 5\ntarget_layer_ids: [1, 3]\nnum_hidden_layers: 2\n"
        "use_cpu: true\nlr_scheduler_kwargs: {num_cycles: 0.4}\nsave_each_epoch: true\ntarget_dtype: float32\n"
    )
    return path


def test_a_flag_beats_the_file_and_the_file_beats_the_default(job_file):
    job, args = parse_job(["--learning_rate", "1e-3", "--config", str(job_file), "--completions", "c.jsonl"])
    assert args.learning_rate == 1e-3 and job.completions == ["c.jsonl"]
    assert (job.block_size, job.target_layer_ids, args.save_each_epoch) == (4, [1, 3], True)
    assert args.lr_scheduler_kwargs == {"num_cycles": 0.4}
    assert args.num_train_epochs == 6


def test_words_that_yaml_takes_for_booleans_are_what_the_option_calls_them(job_file):
    words = "pipeline: off\ncompile_layers: on\neval_strategy: no\nsave_strategy: No\nbf16: off\nenable_thinking: no\n"
    job_file.write_text(job_file.read_text() + words)
    job, args = parse_job(["--config", str(job_file)])
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
        parse_job(argv)


@pytest.mark.parametrize("option", [["--config", "{}"], ["--config={}"]])
def test_a_file_is_named_in_two_words_or_one_and_a_later_file_beats_an_earlier_one(option, job_file, tmp_path):
    (tmp_path / "later.yaml").write_text("learning_rate: 5.0e-4\n")
    argv = [word.format(path) for path in (job_file, tmp_path / "later.yaml") for word in option]
    job, args = parse_job(argv)
    assert (args.learning_rate, job.block_size) == (5e-4, 4)
    with pytest.raises(ValueError, match="needs the name of a YAML file"):
        parse_job([*argv, "--config"])


@pytest.mark.parametrize(
    "command, needed",
    [(train, "--target TARGET --completions COMPLETIONS"), (main, "--target TARGET")],
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
    import yaml

    import hf_dflash.training.run as run

    monkeypatch.setattr(run, "load_targets", lambda *args, **kwargs: pytest.fail("loaded the target"))
    flags = ["--learning_rate", "1e-3", "--debug", "underflow_overflow", "--map_role", "critic=assistant"]
    flags += ["--chat_template_kwargs", '{"effort": "low"}', "--resume_from_checkpoint", "true", "--dry_run"]
    job, args = parse_job(["--config", str(job_file), *flags])
    assert job.dry_run
    text = describe_job(job, args)
    resolved, _, plan = text.partition("\n\n")
    options = yaml.safe_load(resolved)
    assert options["learning_rate"] == 1e-3 and options["save_each_epoch"] is True
    # What is printed is itself a job file.
    job_file.write_text(resolved)
    again, again_args = parse_job(["--config", str(job_file)])
    assert vars(again) == {**vars(job), "dry_run": False}
    assert again_args.to_dict() == args.to_dict()
    assert "rank 0: drafter cpu, target cpu" in plan and "optimizer, fp32" in plan
    assert not os.path.exists(args.output_dir)


def test_plan_shows_map_memory_and_balance_of_machines_that_are_not_here(job_file, capsys):
    assert main(["--config", str(job_file), "--num_processes", "2", "--num_devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "rank 1: drafter cuda:1, target cuda:3" in out
    assert "TFLOP" in out and "at equal speed" in out
    # Targets with devices of their own compute ahead; what they have ready stands with the drafter.
    assert out.count("drafter: features in flight") == 2
    assert (
        main(["--config", str(job_file), "--num_processes", "1", "--num_devices", "1", "--num_anchors", "auto"]) == 0
    )
    assert "features in flight" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="3 CUDA device"):
        main(["--config", str(job_file), "--num_processes", "2", "--num_devices", "3"])


def test_the_estimate_counts_what_is_really_there(job_file):
    from transformers import AutoConfig

    from hf_dflash.training.estimate import GIB, drafter_memory, measure_sizes, target_memory

    target, drafter = make_target("qwen3"), make_drafter(make_target("qwen3"))
    config = AutoConfig.from_pretrained(job_file.parent / "target")
    sizes = measure_sizes(config, drafter.config, torch.float32)
    assert sizes.target_parameters == target.num_parameters()
    ends = target.get_input_embeddings().weight.numel() + (
        0 if config.tie_word_embeddings else target.get_output_embeddings().weight.numel()
    )
    assert sizes.target_body_parameters == target.num_parameters() - ends
    assert target_memory(sizes, 64)["weights"] == 4 * target.num_parameters()
    memory = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=False)
    # fp32 weights, gradients and two moments.
    assert sum(memory[name] for name in list(memory)[:3]) == 16 * drafter.num_parameters()
    fewer = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=True)
    assert fewer["activations"] < memory["activations"] and GIB == 1024**3
    fp8 = drafter_memory(sizes, 64, 8, compute_bytes=4, is_distributed=False, checkpointing=False, head_fp8=True)
    weight = target.get_output_embeddings().weight
    assert sum(fp8.values()) - sum(memory.values()) == 2 * weight.numel()


def test_several_devices_may_share_a_target():
    devices = "cuda:2+cuda:3,cuda:4+cuda:5"
    assert place_targets(1, 2, 6, target_devices=devices) == ["cuda:4+cuda:5"]
    with pytest.raises(ValueError, match="5 CUDA device"):
        place_targets(1, 2, 5, target_devices=devices)
    with pytest.raises(ValueError, match="gpu3"):
        place_targets(0, 1, 5, target_devices="cuda:2+gpu3")


# ---- Launching ----


def test_a_launch_that_asked_for_several_processes_and_got_one_is_an_error():
    # What accelerate says about itself is the point, so it is really run.
    script = ROOT / "tests" / "training" / "launched.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    for processes, fails in (("1", False), ("2", True)):
        done = subprocess.run(
            [*launch, "--num_processes", processes, str(script)], env=environment, capture_output=True, text=True
        )
        assert (done.returncode != 0) is fails, done.stderr
        assert ("torchrun" in done.stderr) is fails
        assert ("went on" in done.stdout) is not fails


def test_a_world_of_several_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="4 processes were asked for and this one is alone"):
        check_launch(1)
    check_launch(4)


# ---- Optimizers and memory ----


def test_muon_takes_the_matrices_and_adamw_the_rest_with_one_schedule(tmp_path):
    trainer = make_trainer(tmp_path, matrix_optimizer="muon", num_train_epochs=3, weight_decay=0.1)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MuonWithAdamW)
    muon, adamw = optimizer.parts
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    vectors = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert matrices == {id(p) for p in trainer.model.parameters() if p.dim() == 2}
    assert vectors == {id(p) for p in trainer.model.parameters() if p.dim() == 1}
    rate = trainer.lr_scheduler.get_last_lr()[0]
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {rate} != {1e-2}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_muon_resumes_bit_equal(tmp_path):
    options = {"matrix_optimizer": "muon", "save_strategy": "steps", "save_steps": 6, "max_steps": 10}
    whole = make_trainer(tmp_path, **options)
    whole.train()
    resumed = make_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same(training_state(resumed), training_state(whole))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_recomputes_and_changes_nothing(tmp_path):
    gradients = {}
    for checkpointing in (False, True):
        recorder = GradientRecorder()
        trainer = make_trainer(
            tmp_path,
            dtype=torch.float64,
            gradient_checkpointing=checkpointing,
            max_steps=1,
            max_grad_norm=0.0,
            callbacks=[recorder],
        )
        calls = []
        trainer.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.train()
        gradients[checkpointing] = recorder.first
        assert len(calls) == (2 if checkpointing else 1)
    assert relative_difference(gradients[True], gradients[False]) <= 1e-12


def count(counts, i, *_):
    counts[i] += 1


def test_two_targets_that_take_turns_teach_what_one_does(tmp_path):
    states = []
    for number in (1, 2):
        targets = load_targets(make_target("qwen3"), [1, 3], ["cpu"] * number)
        assert len({id(target.model) for target in targets}) == number
        read = [0] * number
        for i, target in enumerate(targets):
            target.decoder.register_forward_hook(partial(count, read, i))
        drafter = make_drafter(make_target("qwen3"))
        trainer = make_trainer(
            tmp_path, target=targets, drafter=drafter, gradient_accumulation_steps=2, num_train_epochs=1
        )
        trainer.train()
        # Seven micro-batches in windows of two.
        assert read == ([7] if number == 1 else [4, 3])
        states.append(training_state(trainer))
    assert_same(*states)


# ---- The head in FP8 ----


def test_a_head_in_fp8_trains_nearly_as_well_and_measures_as_ever(tmp_path):
    first, logs, evaluations = {}, {}, {}
    for head_fp8 in (False, True):
        recorder = GradientRecorder()
        trainer = make_trainer(
            tmp_path,
            head_fp8=head_fp8,
            num_train_epochs=4,
            max_grad_norm=0.0,
            callbacks=[recorder],
            eval_dataset=make_dataset(5, 20),
        )
        evaluations[head_fp8] = {name: v for name, v in trainer.evaluate().items() if "loss" in name or "acc" in name}
        trainer.train()
        first[head_fp8], logs[head_fp8] = recorder.first, trainer.state.log_history[-2]["loss"]
    assert evaluations[True] == evaluations[False], "an evaluation takes the head as it is"
    assert 1e-4 < relative_difference(first[True], first[False]) < 0.1
    assert abs(logs[True] / logs[False] - 1) < 0.05


# ---- Warm starts ----


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_5"])
def test_a_drafter_starts_from_the_last_layers_of_its_target(kind):
    target = make_target(kind)
    drafter = DFlashForSpeculation(
        create_drafter_config(target.config, num_hidden_layers=2, mask_token_id=5, block_size=4)
    )
    copied = initialize_from_target(drafter, target)
    source = target.get_decoder().layers[-1]
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, source.mlp.up_proj.weight)
    assert ("layers.1.self_attn.q_proj.weight" in copied) is (kind != "qwen3_5")
    assert "norm.weight" in copied
    # The drafter's norm does what the target's does, however each stores its scale.
    states = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(
        drafter.layers[0].input_layernorm(states), target.get_decoder().layers[-2].input_layernorm(states)
    )
    torch.testing.assert_close(drafter.norm(states), target.get_decoder().norm(states))


def test_a_target_of_other_shapes_is_no_start():
    target = make_target("qwen3")
    config = create_drafter_config(
        target.config,
        num_hidden_layers=2,
        mask_token_id=5,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with pytest.raises(ValueError, match="No matrix of Qwen3ForCausalLM"):
        initialize_from_target(DFlashForSpeculation(config), target)
    deep = create_drafter_config(target.config, num_hidden_layers=7, mask_token_id=5)
    with pytest.raises(ValueError, match="has 7 layers .* Qwen3ForCausalLM, which has 6"):
        initialize_from_target(DFlashForSpeculation(deep), target)


# ---- Documentation ----


def test_the_table_of_options_is_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "write_options.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_best_checkpoint_is_one_of_acceptance(tmp_path):
    args = DFlashTrainingArguments(str(tmp_path))
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_acceptance_length", True)
