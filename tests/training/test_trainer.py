# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import math

import brute_force
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny_drafters import TARGET_LAYER_IDS, make_drafter, make_rows
from tiny_models import make_target
from tiny_training import BrokenTarget, GradientRecorder, make_dataset, make_trainer, relative_difference
from transformers import AutoModel, TrainerCallback
from transformers.training_args import ParallelMode

from hf_dflash import DFlashForSpeculation, DFlashTrainer, DFlashTrainingArguments, FrozenTarget


pytestmark = pytest.mark.compat


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def quiet(tmp_path, **options):
    return DFlashTrainingArguments(
        str(tmp_path), use_cpu=True, disable_tqdm=True, report_to="none", save_strategy="no", **options
    )


# ---- The target stays as it is ----


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("loss_type", ["ce", "lk"])
def test_training_changes_every_drafter_parameter_and_nothing_of_the_target(kind, loss_type, tmp_path):
    target = make_target(kind).train().requires_grad_(True)
    before = weights_of(target)
    trainer = make_trainer(tmp_path, target=target, loss_type=loss_type, num_train_epochs=1, save_strategy="epoch")
    drafter_before = weights_of(trainer.model)
    trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not target.training and not any(p.requires_grad or p.grad is not None for p in target.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad and not torch.equal(parameter, drafter_before[name]), name

    # Nothing of it is in the module tree, the optimizer, or a checkpoint.
    own = {id(p) for p in trainer.model.parameters()}
    assert {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} == own
    assert not own & {id(p) for p in target.parameters()}
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    saved = load_file(checkpoint / "model.safetensors")
    assert saved.keys() == drafter_before.keys() == trainer.model.state_dict().keys()
    optimizer = torch.load(checkpoint / "optimizer.pt")
    assert len(optimizer["state"]) == len(saved)


def test_a_drafter_shares_no_weight_with_the_target_even_where_both_are_on_one_device(tmp_path):
    trainer = make_trainer(tmp_path)
    embedding = trainer.target.embedding.weight
    assert embedding.data_ptr() == trainer.target.model.get_input_embeddings().weight.data_ptr()
    assert not any(p.data_ptr() == embedding.data_ptr() for p in trainer.model.parameters())
    assert len(list(trainer.model.modules())) == len(list(make_drafter(trainer.target.model).modules()))


# ---- Devices ----


def test_several_visible_gpus_never_become_a_data_parallel(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    trainer = make_trainer(tmp_path, max_steps=1)
    assert trainer.args.n_gpu == 1 and trainer.args.parallel_mode == ParallelMode.NOT_PARALLEL
    trainer.train()
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert not isinstance(trainer._wrap_model(trainer.model), torch.nn.DataParallel)
    assert trainer.target.device.type == "cpu"


# ---- Saving ----


def test_checkpoints_hold_fp32_and_the_final_save_bf16_and_the_drafter_itself_stays(tmp_path):
    trainer = make_trainer(tmp_path, num_train_epochs=1, save_strategy="epoch")
    trainer.train()
    trained = weights_of(trainer.model)
    trainer.save_model()
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    for folder, dtype in ((checkpoint, torch.float32), (tmp_path, torch.bfloat16)):
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == trained.keys()
        assert all(torch.equal(saved[name], tensor.to(dtype)) for name, tensor in trained.items())
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert config["model_type"] == "dflash" and config["auto_map"]["AutoModel"].endswith("DFlashForSpeculation")
        assert (folder / "modeling_dflash.py").is_file() and (folder / "configuration_dflash.py").is_file()
        loaded = AutoModel.from_pretrained(folder)
        assert type(loaded) is DFlashForSpeculation and loaded.dtype == dtype
    assert all(torch.equal(tensor, trained[name]) for name, tensor in trainer.model.state_dict().items())
    assert trainer.model.config.dtype != torch.bfloat16
    # A drafter that was saved in bf16 trains in fp32 again when the trainer loads it.
    again = DFlashTrainer(str(tmp_path), trainer.target, quiet(tmp_path / "again"))
    assert again.model.dtype == torch.float32


def test_what_push_to_hub_would_upload_is_bf16_too(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(_internal_call=True)  # as `Trainer.push_to_hub` calls it
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


# ---- Micro-batches ----


def test_empty_micro_batches_at_the_end_of_an_epoch_learn_nothing_and_break_nothing(tmp_path):
    """One micro-batch with rows and three without in the only step: the gradients are those of the first alone."""
    dataset = Dataset.from_list(make_rows(["0011111", "0111111"]))
    recorders = GradientRecorder(), GradientRecorder()
    for name, recorder, accumulation in (("one", recorders[0], 1), ("four", recorders[1], 4)):
        trainer = make_trainer(
            tmp_path / name,
            dataset=dataset,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            callbacks=[recorder],
        )
        trainer.train()
        assert trainer.state.global_step == 1
    assert relative_difference(recorders[1].first, recorders[0].first) == 0.0
    assert max(float(g.abs().max()) for g in recorders[0].first.values()) > 0


def test_a_step_in_which_nothing_can_be_learned_gives_zero_gradients_for_every_parameter(tmp_path):
    dataset = Dataset.from_list(make_rows(["0" * 30, "0" * 20, "0011"]))
    recorder = GradientRecorder()
    steps = []
    trainer = make_trainer(tmp_path, dataset=dataset, token_budget=30, num_train_epochs=1, callbacks=[recorder])
    trainer.get_batch_samples = recording(trainer.get_batch_samples, steps)
    trainer.train()
    assert trainer.state.global_step == 3
    zero = [norm == 0 for norm in recorder.norms]
    assert zero == [not any(bool(batch.supervised.any()) for batch in batches) for batches in steps]
    assert zero.count(True) == 2
    assert all(math.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def recording(function, results):
    def wrapper(*args):
        result = function(*args)
        results.append(result[0])
        return result

    return wrapper


# ---- Samples that come out non-finite ----


@pytest.mark.parametrize(("loss_type", "value"), [("ce", math.inf), ("ce", math.nan), ("lk", math.nan)])
def test_a_non_finite_sample_is_left_out_and_counted_and_keeps_its_share(loss_type, value, tmp_path):
    target = make_target("qwen3")
    rows = make_rows(["00111111", "0011111111", "0111111"])
    rows[1]["input_ids"][0] = 95
    options = {"loss_type": loss_type, "num_train_epochs": 2, "anchor_ratio": 0.0}

    broken = BrokenTarget(target, TARGET_LAYER_IDS)
    broken.first_token, broken.value = 95, value
    recorder = GradientRecorder()
    trainer = make_trainer(
        tmp_path / "broken",
        target=broken,
        drafter=make_drafter(target),
        dataset=Dataset.from_list(rows),
        callbacks=[recorder],
        **options,
    )
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    skipped = len(brute_force.eligible_anchors(rows[1]["loss_mask"]))
    others = sum(len(brute_force.eligible_anchors(rows[i]["loss_mask"])) for i in (0, 2))
    assert [(entry["skipped_nonfinite_blocks"], entry["blocks"]) for entry in logs] == [(skipped, others)] * 2

    # The other two documents alone, divided by what all three supervise.
    whole = make_trainer(tmp_path / "whole", target=target, dataset=Dataset.from_list(rows), **options)
    denominators = []
    whole.get_batch_samples = recording(whole.get_batch_samples, denominators)
    whole.train()
    share = sum(batch.denominator("decay", 4.0) for batch in denominators[0])
    reference_recorder = GradientRecorder()
    reference = make_trainer(
        tmp_path / "reference",
        target=target,
        dataset=Dataset.from_list([rows[0], rows[2]]),
        callbacks=[reference_recorder],
        **options,
    )
    original = reference.get_batch_samples

    def with_the_whole_denominator(*args):
        result = original(*args)
        reference._step_denominator.fill_(share)
        return result

    reference.get_batch_samples = with_the_whole_denominator
    reference.train()
    assert relative_difference(recorder.first, reference_recorder.first) <= 2e-6
    expected = [entry["loss"] for entry in reference.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logs] == pytest.approx(expected, rel=1e-5)


class OverflowingTarget(FrozenTarget):
    """The final hidden states of the first document overflow, those of the captured layers do not."""

    def __call__(self, *args, **options):
        features = super().__call__(*args, **options)
        if features.label_hidden_states is not None:
            features.label_hidden_states[0] = math.inf
        return features


def test_a_sample_of_which_only_the_last_layer_overflows_is_left_out_too(tmp_path):
    target = make_target("qwen3")
    overflowing = OverflowingTarget(target, TARGET_LAYER_IDS)
    trainer = make_trainer(tmp_path, target=overflowing, drafter=make_drafter(target), loss_type="kl", max_steps=2)
    trainer.train()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert all(e["skipped_nonfinite_blocks"] > 0 for e in trainer.state.log_history if "learning_rate" in e)


# ---- One sample, learned by heart ----


def test_overfitting_one_sample_accepts_every_draft(tmp_path):
    target = make_target("qwen3")
    (row,) = make_rows(["0" * 4 + "1" * 13])
    dataset = Dataset.from_list([row])
    trainer = make_trainer(
        tmp_path,
        target=target,
        drafter_options={"initializer_range": 0.05},
        dataset=dataset,
        eval_dataset=dataset,
        labels="data",
        anchor_ratio=0.0,
        max_steps=120,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=60,
    )
    trainer.train()
    metrics = trainer.evaluate()
    # Twelve tokens behind the first one, four a block (three drafts and the bonus): 4 + 4 + 4.
    assert metrics["eval_acceptance_length"] == 4.0
    assert [metrics[f"eval_accuracy_slot_{k}"] for k in (1, 2, 3)] == [1.0, 1.0, 1.0]
    last = [entry for entry in trainer.state.log_history if "learning_rate" in entry][-1]
    assert last["accuracy"] > 0.99 and last["loss"] < 0.1


# ---- Bad input ----


def test_a_drafter_that_does_not_fit_the_target_is_refused(tmp_path):
    target = make_target("qwen3")
    wide = make_target("qwen3", hidden_size=48)
    with pytest.raises(ValueError, match="`hidden_size` is 48, the target's is 32"):
        make_trainer(tmp_path, target=target, drafter=make_drafter(wide))
    deep = make_target("qwen3", num_hidden_layers=8)
    with pytest.raises(ValueError, match="num_target_layers"):
        make_trainer(tmp_path, target=target, drafter=make_drafter(deep))
    with pytest.raises(ValueError, match="vocab_size"):
        make_trainer(tmp_path, target=target, drafter=make_drafter(make_target("qwen3", vocab_size=100)))
    with pytest.raises(ValueError, match="captures \\[0, 2\\]"):
        make_trainer(tmp_path, target=FrozenTarget(target, [0, 2]), drafter=make_drafter(target))


def test_a_mask_token_without_a_row_in_the_embedding_is_refused(tmp_path):
    target = make_target("qwen3")
    drafter = make_drafter(target, mask_token_id=95)
    target.set_input_embeddings(torch.nn.Embedding(90, 32))
    with pytest.raises(ValueError, match="no row of the target's embedding \\(90 rows\\)"):
        make_trainer(tmp_path, target=target, drafter=drafter)
    drafter.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        make_trainer(tmp_path, target=target, drafter=drafter)


@pytest.mark.parametrize("masks", [["000", "00000"], ["0010", "1000"]])
def test_a_dataset_in_which_nothing_is_supervised_is_refused(masks, tmp_path):
    dataset = Dataset.from_list(make_rows(masks))
    for columns in (dataset, dataset.add_column("num_supervised", [sum(m) for m in dataset["loss_mask"]])):
        with pytest.raises(ValueError, match="Nothing in `train_dataset` is supervised"):
            make_trainer(tmp_path, dataset=columns)


def test_datasets_without_rows_or_columns_are_refused_by_name(tmp_path):
    dataset = make_dataset(3)
    with pytest.raises(ValueError, match="`train_dataset` is empty"):
        make_trainer(tmp_path, dataset=dataset.select([]))
    with pytest.raises(ValueError, match="`eval_dataset` has no column loss_mask, row_id"):
        make_trainer(tmp_path, eval_dataset=dataset.remove_columns(["loss_mask", "row_id"]))
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.evaluate()
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.get_train_dataloader()


def test_a_dataset_whose_rows_cannot_be_counted_is_refused_by_its_type(tmp_path):
    dataset = make_dataset(3)
    for other, name in ((dataset.to_iterable_dataset(), "IterableDataset"), (dataset.to_list(), "list")):
        with pytest.raises(ValueError, match=f"`train_dataset` is of type {name}"):
            make_trainer(tmp_path, dataset=other)


@pytest.mark.parametrize("name", ["data_collator", "compute_loss_func", "compute_metrics", "model_init"])
def test_an_argument_of_trainer_that_nothing_would_call_is_refused(name, tmp_path):
    target = make_target("qwen3")
    with pytest.raises(ValueError, match=f"`{name}` would have no effect"):
        DFlashTrainer(make_drafter(target), target, quiet(tmp_path), make_dataset(), **{name: lambda *_, **__: None})


def test_a_subclass_may_add_to_the_loss_what_it_makes_of_the_outputs(tmp_path):
    class Ours(DFlashTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            assert outputs["hidden_states"].shape[:2] == inputs.supervised.shape
            assert len(outputs["features"].context_hidden_states) == inputs.num_tokens
            loss = loss + 0 * outputs["hidden_states"].sum()
            return (loss, outputs) if return_outputs else loss

    target, weights = make_target("qwen3"), []
    for trainer_class in (Ours, DFlashTrainer):
        trainer = trainer_class(make_drafter(target), target, quiet(tmp_path, max_steps=2), make_dataset())
        trainer.train()
        weights.append(weights_of(trainer.model))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


# ---- Steps that are lost ----


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "adamw_torch_fused"},
        {"optim": "adamw_torch"},
        {"optim": "adafactor"},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"matrix_optimizer": "muon"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_a_step_with_gradients_that_are_not_finite_changes_no_weight_and_is_counted(options, tmp_path):
    class Watch(TrainerCallback):
        def __init__(self):
            self.weights = []

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.weights.append(weights_of(model))

    watch = Watch()
    trainer = make_trainer(tmp_path, max_steps=4, weight_decay=0.1, callbacks=[watch], logging_steps=2, **options)
    weight = trainer.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * (torch.nan if trainer.state.global_step == 2 else 1))
    trainer.train()
    same = [
        all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(watch.weights, watch.weights[1:], strict=False)
    ]
    assert same == [False, True, False]
    assert all(torch.isfinite(tensor).all() for tensor in watch.weights[-1].values())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("skipped_nonfinite_steps") for entry in logs] == [None, 1]
    assert all(math.isfinite(entry["loss"]) for entry in logs)


def test_the_mean_loss_is_that_of_the_steps_that_were_taken(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4, logging_steps=2, max_grad_norm=0.0)
    losses, compute_loss = [], trainer.compute_loss

    def spoil(*args, **kwargs):
        loss = compute_loss(*args, **kwargs)
        losses.append(loss.item())
        return loss * (1 if len(losses) == 2 else torch.nan)

    trainer.compute_loss = spoil
    output = trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_nonfinite_steps"] for entry in logs] == [1, 2]
    assert logs[0]["loss"] == pytest.approx(losses[1], rel=1e-6) and math.isnan(logs[1]["loss"])
    # Of the whole run too.
    assert output.training_loss == output.metrics["train_loss"] == trainer.state.log_history[-1]["train_loss"]
    assert output.training_loss == logs[0]["loss"]


# ---- Compiled layers ----


def test_layers_of_target_and_drafter_are_compiled_only_if_asked_for_on_a_cpu(tmp_path):
    for value, wanted in (("auto", False), ("on", True), ("off", False)):
        trainer = make_trainer(tmp_path, compile_layers=value, targets_per_process=2)
        assert {layer.compile_options is not None for layer in trainer.model.layers} == {wanted}
        for target in trainer.targets:
            assert {hasattr(layer.forward, "uncompiled") for layer in target.decoder.layers} == {wanted}


def test_graphs_are_recorded_by_themselves_on_cuda_only(tmp_path):
    assert [target._graphed for target in make_trainer(tmp_path, targets_per_process=2).targets] == [None, None]
    with pytest.raises(ValueError, match="--target_cuda_graphs on` takes a GPU"):
        make_trainer(tmp_path, target_cuda_graphs="on")


@pytest.mark.parametrize("outweighs", [True, False])
def test_graphs_are_recorded_where_launches_outweigh_unless_told_otherwise(tmp_path, monkeypatch, outweighs):
    asked, recorded = [], []
    monkeypatch.setattr(
        "hf_dflash.training.trainer.launches_outweigh", lambda model, num_tokens: asked.append(num_tokens) or outweighs
    )
    monkeypatch.setattr(FrozenTarget, "record_graphs", lambda target: recorded.append(target))
    for value, wanted in (("auto", outweighs), ("off", False)):
        trainer = make_trainer(tmp_path, target_cuda_graphs=value, targets_per_process=2)
        assert recorded == (trainer.targets if wanted else [])
        recorded.clear()
    assert asked == [trainer.args.token_budget] * 2


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
