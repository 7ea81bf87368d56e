# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A resumed run adds gradients of three ranks or more in the order in which the run before it did."""

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ..data.batching import collate_rows


class BucketOrderCallback(TrainerCallback):
    """
    Lets DDP sort its buckets before a resumed run takes its first step.

    DDP lays gradients out by the order of parameters, and from the second step on by the order in which they came in the
    first. Where a gradient lies decides in which order ranks are added, so without this the first step of a resumed run
    differs from that of a run that went on, in the last bit. (Two ranks add to the same sum in either order.)

    Args:
        trainer ([`DFlashTrainer`]): whose run goes on.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        model = trainer.model_wrapped
        if state.global_step == 0 or args.world_size < 3 or not isinstance(model, DistributedDataParallel):
            return
        # A micro-batch without rows has no gradients, but they come in the order of any other.
        batch = trainer.draw(collate_rows([]), epoch=0).to(args.device)
        features = trainer._no_features(batch)
        model.train()
        hidden_states, kept_blocks = trainer.draft(model, batch, features)
        one = torch.ones((), dtype=torch.float64, device=args.device)
        loss, _ = trainer._loss(batch, features, hidden_states, kept_blocks, one, args.loss_weighting)
        trainer.accelerator.backward(loss)
        model.zero_grad()
