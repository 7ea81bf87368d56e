# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A training run in a process of its own that begins and never ends, and has forked a process as data workers are."""

import os
import time

import torch
from tiny_training import make_trainer
from transformers import TrainerCallback


def run(output_dir: str, told) -> None:
    """
    Trains until it is killed.

    Args:
        output_dir (`str`): of the run.
        told (`multiprocessing.connection.Connection`): is sent the id of the forked process once training has begun.
    """
    torch.set_num_threads(1)

    class Hold(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            worker = os.fork()
            if worker:
                told.send(worker)
            time.sleep(600)
            os._exit(0)

    make_trainer(output_dir, callbacks=[Hold()]).train()
