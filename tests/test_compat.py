# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_dflash._compat import mark_loss_as_scaled


pytestmark = pytest.mark.compat

ROWS = [{"x": torch.tensor([float(i), 1.0], dtype=torch.float64)} for i in range(8)]


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return (x * self.weight).sum(-1) ** 2


class LinearWithKwargs(Linear):
    # The Trainer takes `**kwargs` as a promise that the model normalises its loss itself.
    def forward(self, x, **kwargs):
        return super().forward(x)


class SumOverTheStepTrainer(Trainer):
    """Divides every row's loss by the rows of the whole optimizer step, before the Trainer sees it."""

    scaled = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.scaled:
            mark_loss_as_scaled(self)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).sum() / len(ROWS)


class UnmarkedTrainer(SumOverTheStepTrainer):
    scaled = False


def weight_after_one_step(trainer_class, model, accumulation_steps, folder):
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=len(ROWS) // accumulation_steps,
        gradient_accumulation_steps=accumulation_steps,
        max_steps=1,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer_class(model, args, train_dataset=ROWS).train()
    return model.weight.detach()


def plain_step():
    model = Linear()
    (model(torch.stack([row["x"] for row in ROWS])).sum() / len(ROWS)).backward()
    return (model.weight - 1e-3 * model.weight.grad).detach()


@pytest.mark.parametrize("model_class", [Linear, LinearWithKwargs])
@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_a_marked_loss_gives_the_same_step_whatever_the_accumulation(model_class, accumulation_steps, tmp_path):
    weight = weight_after_one_step(SumOverTheStepTrainer, model_class(), accumulation_steps, tmp_path)
    torch.testing.assert_close(weight, plain_step(), rtol=0, atol=1e-12)


def test_an_unmarked_loss_is_divided_once_more(tmp_path):
    # Why the entry exists: the day this fails, transformers has changed its rule.
    weight = weight_after_one_step(UnmarkedTrainer, Linear(), 4, tmp_path)
    torch.testing.assert_close(1 - weight, (1 - plain_step()) / 4, rtol=0, atol=1e-12)
