# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import math

import brute_force
import pytest
import torch
from datasets import Dataset
from tiny_drafters import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYER_IDS, make_drafter, make_rows
from tiny_models import make_target
from tiny_training import BrokenTarget, make_dataset, make_trainer

from hf_dflash.training.evaluation import METRICS


pytestmark = pytest.mark.compat


def evaluate(tmp_path, *, dtype=torch.float64, dataset=None, **options):
    dataset = make_dataset(9, 24) if dataset is None else dataset
    trainer = make_trainer(tmp_path, dtype=dtype, dataset=dataset, eval_dataset=dataset, **options)
    metrics = trainer.evaluate()
    return trainer, {name: value for name, value in metrics.items() if not name.endswith(("time", "_per_second"))}


def brute_force_evaluation(target, drafter, rows, labels="target"):
    """Document by document, anchor by anchor: decode a block as decoding does, compare, walk."""
    embedding = target.get_input_embeddings()
    loss = weight = walk_tokens = walk_blocks = accepted_sum = blocks = agreeing = replied = 0
    correct = [0] * (BLOCK_SIZE - 1)
    supervised = [0] * (BLOCK_SIZE - 1)
    for row in rows:
        tokens, mask = row["input_ids"], row["loss_mask"]
        with torch.no_grad():
            output = target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        features = torch.cat([output.hidden_states[i + 1] for i in TARGET_LAYER_IDS], dim=-1)
        predicted = output.logits[0].argmax(-1).tolist()
        for position in range(len(tokens) - 1):
            if mask[position + 1]:
                replied += 1
                agreeing += predicted[position] == tokens[position + 1]
        accepted = {}
        for anchor in brute_force.eligible_anchors(mask):
            slots = torch.tensor([[tokens[anchor]] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
            with torch.no_grad():
                states = drafter(
                    embedding(slots), features[:, :anchor], torch.arange(anchor + BLOCK_SIZE)[None]
                ).last_hidden_state[0]
                log_probabilities = target.get_output_embeddings()(states).log_softmax(-1)
            drafts_right = []
            for k, has_label in enumerate(brute_force.supervised_slots(mask, anchor, BLOCK_SIZE), start=1):
                if has_label:
                    draft = int(log_probabilities[k].argmax())
                    label = predicted[anchor + k - 1] if labels == "target" else tokens[anchor + k]
                    loss -= math.exp(-(k - 1) / 4.0) * float(log_probabilities[k, label])
                    weight += math.exp(-(k - 1) / 4.0)
                    correct[k - 1] += draft == label
                    supervised[k - 1] += 1
                    drafts_right.append(draft == tokens[anchor + k])
            accepted[anchor] = (drafts_right + [False]).index(False)
            accepted_sum += accepted[anchor]
            blocks += 1
        tokens_walked, blocks_walked = brute_force.walk(mask, accepted)
        walk_tokens += tokens_walked
        walk_blocks += blocks_walked
    return {
        "eval_loss": loss / weight,
        "eval_acceptance_length": walk_tokens / walk_blocks,
        "eval_anchor_acceptance_length": 1 + accepted_sum / blocks,
        "eval_accuracy": sum(correct) / sum(supervised),
        "eval_target_agreement": agreeing / replied,
        **{f"eval_accuracy_slot_{k}": correct[k - 1] / supervised[k - 1] for k in range(1, BLOCK_SIZE)},
    }


@pytest.fixture(scope="module")
def predictable(tmp_path_factory):
    """A target, a drafter trained for a moment, and replies that the target wrote for the most part."""
    target = make_target("qwen3", torch.float64)
    rows = []
    for i, row in enumerate(make_rows(["0" * (3 + i) + "1" * (14 - i) for i in range(6)], seed=7)):
        prompt = row["loss_mask"].index(1)
        with torch.no_grad():
            ids = target.generate(
                torch.tensor([row["input_ids"][:prompt]]),
                do_sample=False,
                max_new_tokens=14 - i,
                min_new_tokens=14 - i,
            )[0].tolist()
        ids[prompt + 5] = 17  # one token that is not the target's own
        rows.append({**row, "input_ids": ids})
    # A reply of one token, a gap, a second turn.
    rows += make_rows(["00010", "0011100111"], seed=8, first_row_id=50)
    trainer = make_trainer(
        tmp_path_factory.mktemp("predictable"),
        dtype=torch.float64,
        target=target,
        drafter_options={"initializer_range": 0.05},
        dataset=Dataset.from_list(rows),
        num_train_epochs=40,
        anchor_ratio=0.0,
        learning_rate=3e-3,
    )
    trainer.train()
    return target, trainer.model, rows


@pytest.mark.parametrize("labels", ["target", "data"])
@pytest.mark.parametrize(("eval_token_budget", "eval_blocks_per_pass"), [(16, 1), (40, 7), (10_000, 2048)])
def test_evaluation_equals_decoding_every_anchor_alone_whatever_the_batches(
    labels, eval_token_budget, eval_blocks_per_pass, predictable, tmp_path
):
    target, drafter, rows = predictable
    expected = brute_force_evaluation(target, drafter, rows, labels)
    assert 1.3 < expected["eval_acceptance_length"] < 3.9 and 0 < expected["eval_target_agreement"] < 1
    _, metrics = evaluate(
        tmp_path,
        target=target,
        drafter=drafter,
        dataset=Dataset.from_list(rows),
        labels=labels,
        eval_token_budget=eval_token_budget,
        eval_blocks_per_pass=eval_blocks_per_pass,
    )
    assert metrics.pop("eval_loss") == pytest.approx(expected.pop("eval_loss"), abs=1e-10)
    assert {name: metrics[name] for name in expected} == expected


@pytest.mark.parametrize("options", [{"loss_weighting": "dpace"}, {"loss_gamma": 4.0, "anchor_ratio": 0.1}])
def test_the_evaluated_loss_does_not_depend_on_how_slots_are_weighted_in_training(options, predictable, tmp_path):
    target, drafter, rows = predictable
    dataset = Dataset.from_list(rows)
    _, plain = evaluate(tmp_path / "1", target=target, drafter=drafter, dataset=dataset)
    _, other = evaluate(tmp_path / "2", target=target, drafter=drafter, dataset=dataset, **options)
    assert {n: v for n, v in other.items() if "preparation" not in n} == {
        n: v for n, v in plain.items() if "preparation" not in n
    }


def test_evaluation_works_before_training_and_within_and_leaves_the_run_as_it_was(tmp_path):
    quiet_run = make_trainer(tmp_path / "quiet", num_train_epochs=1)
    quiet_run.train()
    trainer = make_trainer(tmp_path / "eval", num_train_epochs=1, eval_dataset=make_dataset(5, 20), eval_steps=1)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    first = trainer.evaluate()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert {"eval_loss", "eval_acceptance_length", "eval_accuracy_slot_1"} <= set(first)
    trainer.args.eval_strategy = "steps"
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) >= trainer.state.global_step
    for name, tensor in quiet_run.model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), "an evaluation changed what was trained"


def test_several_evaluation_sets_by_name_and_one_that_is_passed(tmp_path):
    sets = {"code": make_dataset(4, 16, seed=2), "chat": make_dataset(4, 16, seed=3)}
    trainer = make_trainer(tmp_path, eval_dataset=sets)
    together = trainer.evaluate()
    for name, dataset in sets.items():
        alone = trainer.evaluate(dataset, metric_key_prefix=f"eval_{name}")
        assert alone[f"eval_{name}_loss"] == together[f"eval_{name}_loss"]
    with pytest.raises(ValueError, match="is empty"):
        trainer.evaluate(sets["code"].select([]))
    with pytest.raises(ValueError, match="eval_dataset\\['chat'\\]"):
        make_trainer(tmp_path, eval_dataset={**sets, "chat": Dataset.from_list(make_rows(["000"]))})


def test_a_non_finite_sample_is_left_out_of_every_figure_and_counted(tmp_path):
    target = make_target("qwen3", torch.float64)
    rows = make_rows(["00111111", "0011111111", "0111111"])
    rows[1]["input_ids"][0] = 95
    broken = BrokenTarget(target, TARGET_LAYER_IDS)
    broken.first_token, broken.value = 95, math.nan
    drafter = make_drafter(target, torch.float64)
    _, metrics = evaluate(tmp_path / "1", target=broken, drafter=drafter, dataset=Dataset.from_list(rows))
    without = Dataset.from_list([rows[0], rows[2]])
    _, expected = evaluate(tmp_path / "2", target=target, drafter=drafter, dataset=without)
    assert metrics.pop("eval_skipped_nonfinite_blocks") == 7
    for name in expected.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
        assert metrics[name] == pytest.approx(expected[name], abs=1e-12), name


def test_an_evaluation_in_which_nothing_is_finite_says_so_instead_of_a_loss_of_zero(tmp_path):
    target = make_target("qwen3", torch.float64)
    broken = BrokenTarget(target, TARGET_LAYER_IDS)
    rows = make_rows(["00111111", "0111111"])
    for row in rows:
        row["input_ids"][0] = 95
    broken.first_token, broken.value = 95, math.nan
    _, metrics = evaluate(
        tmp_path, target=broken, drafter=make_drafter(target, torch.float64), dataset=Dataset.from_list(rows)
    )
    assert metrics["eval_skipped_nonfinite_blocks"] == 10
    assert all(math.isnan(metrics[f"eval_{name}"]) for name in METRICS)


def test_predict_measures_what_evaluate_does(tmp_path):
    heldout = make_dataset(5, seed=3)
    trainer = make_trainer(tmp_path, eval_dataset=heldout)
    evaluated, predicted = trainer.evaluate(), trainer.predict(heldout).metrics
    names = ("loss", "acceptance_length", "accuracy_slot_1")
    assert [predicted[f"test_{name}"] for name in names] == [evaluated[f"eval_{name}"] for name in names]
