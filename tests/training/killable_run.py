# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A training run in a process of its own, which saves at every step and goes on from whatever is on the disk."""

import torch
from tiny_training import make_dataset, make_trainer, training_state
from transformers import TrainerCallback

from hf_dflash.training.checkpoint import find_last_checkpoint


OPTIONS = {
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "logging_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
}


def run(output_dir: str, began=None) -> None:
    """Trains to the end, then writes `output_dir`/state.pt.

    Args:
        output_dir (`str`): of the run.
        began (`multiprocessing.Event`, *optional*): set when training begins.
    """
    torch.set_num_threads(1)

    class Tell(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if began is not None:
                began.set()

    trainer = make_trainer(output_dir, eval_dataset=make_dataset(4, seed=2), callbacks=[Tell()], **OPTIONS)
    trainer.train(resume_from_checkpoint=find_last_checkpoint(output_dir))
    if trainer.is_world_process_zero():
        torch.save(training_state(trainer), f"{output_dir}/state.pt")
