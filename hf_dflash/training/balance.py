# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`--num_anchors auto`: as many blocks as the drafter can train on while the target reads the next micro-batch.

The target's time of a micro-batch is given; the drafter's grows with its blocks. Both are measured once, before the first
step, and the number of blocks is set so that they are equal: then neither waits. Where both share a device, each gets half
of it.
"""

import time

import torch
from transformers.utils import logging

from ..data.batching import collate_rows
from .block_batch import BlockBatch


logger = logging.get_logger(__name__)

# Anchors of a document and blocks per supervised token are turned together, in steps of a quarter octave from a quarter of
# the paper's values (128 anchors: fewer give a long document too little weight) to twice as many (the drafter's activations
# grow with them, and its optimizer has not taken its memory yet).
PAPER_ANCHORS = 512
SCALES = tuple(2.0 ** (step / 4) for step in range(-8, 5))

_NUM_MICRO_BATCHES = 4
_REPEATS = 2


def scaled(scale: float, anchor_ratio: float) -> tuple[int, float]:
    """`(num_anchors, anchor_ratio)` at a scale; a ratio of 0 stays what it is, no limit."""
    return round(PAPER_ANCHORS * scale), round(anchor_ratio * scale, 4)


def choose_scale(target_seconds: float, drafter_seconds: dict[float, float], num_blocks: dict[float, float]) -> float:
    """The scale at which the drafter takes as long as the target.

    Args:
        target_seconds (`float`): of a micro-batch, as often as the targets together deliver one.
        drafter_seconds (`dict[float, float]`): of a micro-batch, measured at two scales.
        num_blocks (`dict[float, float]`): of a micro-batch, at each scale that can be chosen.

    Returns:
        `float`: one of the scales of `num_blocks`; of those that are equally good the smallest.
    """
    (low, low_seconds), (high, high_seconds) = sorted(drafter_seconds.items())
    more_blocks = num_blocks[high] - num_blocks[low]
    if more_blocks > 0 and high_seconds > low_seconds:
        per_block = (high_seconds - low_seconds) / more_blocks
    else:
        # Documents too short to bring more blocks, or a noisy clock.
        per_block = high_seconds / max(1.0, num_blocks[high])
    expected = {s: high_seconds + per_block * (blocks - num_blocks[high]) for s, blocks in num_blocks.items()}
    return min(sorted(expected), key=lambda scale: abs(expected[scale] - target_seconds))


def balance_anchors(trainer) -> tuple[int, float]:
    """Measures target and drafter on a few micro-batches of the first epoch.

    Rank 0 measures and decides, the others wait for its word. Weights, gradients and random state stay as they were.

    Args:
        trainer ([`DFlashTrainer`]): about to train.

    Returns:
        `(num_anchors, anchor_ratio)`: `int` and `float`, the same on all ranks.

    Raises:
        `ValueError`: under FSDP or DeepSpeed, where a rank alone cannot run the drafter.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "`--num_anchors auto` needs the whole drafter on each device: give a number under FSDP or DeepSpeed."
        )
    chosen = (0, 0.0)
    if trainer.args.process_index == 0:
        chosen = _Probe(trainer).choose()
    num_anchors, anchor_ratio = trainer._host_group.sum(*chosen)
    return int(num_anchors), anchor_ratio


class _Probe:
    def __init__(self, trainer):
        self.trainer, self.args = trainer, trainer.args
        self.drafter = trainer.accelerator.unwrap_model(trainer.model)
        sampler = trainer.get_train_dataloader().batch_sampler
        picked = [sampler.global_batch(i) for i in range(min(_NUM_MICRO_BATCHES, sampler.num_batches))]
        self.rows = [collate_rows([trainer.train_dataset[row] for row in batch]) for batch in picked]

    def choose(self) -> tuple[int, float]:
        ratio = self.args.anchor_ratio
        kept = self.args.num_anchors, ratio
        was_training = self.drafter.training
        self.drafter.train()
        try:
            batches = {scale: self._draw(*scaled(scale, ratio)) for scale in SCALES}
            num_blocks = {s: sum(batch.num_blocks for batch in some) / len(some) for s, some in batches.items()}
            low, high = SCALES[4], SCALES[8]  # half of the paper's, and the paper's
            target_seconds = sum(self._time_target(batch) for batch in batches[high]) / len(self.rows)
            target_seconds /= len(self.trainer.targets)
            seconds = {s: sum(self._time_drafter(b) for b in batches[s]) / len(self.rows) for s in (low, high)}
            scale = choose_scale(target_seconds, seconds, num_blocks)
            scale = self._fit(scale, batches)
        finally:
            self.args.num_anchors, self.args.anchor_ratio = kept
            self.drafter.train(was_training)
            self.drafter.zero_grad(set_to_none=True)
            if self.args.device.type == "cuda":
                torch.cuda.empty_cache()
        num_anchors, anchor_ratio = scaled(scale, ratio)
        logger.info(
            f"`--num_anchors auto`: a micro-batch takes targets {target_seconds:.3f} s and the drafter {seconds[high]:.3f} s "
            f"with {PAPER_ANCHORS} anchors a document; from here on {num_anchors}, and {anchor_ratio} per supervised token."
        )
        return num_anchors, anchor_ratio

    def _draw(self, num_anchors: int, anchor_ratio: float) -> list[BlockBatch]:
        self.args.num_anchors, self.args.anchor_ratio = num_anchors, anchor_ratio
        return [self.trainer.draw(rows, 0) for rows in self.rows]

    def _time_target(self, batch: BlockBatch) -> float:
        return self._time(lambda: self._features(batch))

    def _time_drafter(self, batch: BlockBatch) -> float:
        features = self._features(batch)
        return self._time(lambda: self._train_on(batch, features))

    def _features(self, batch: BlockBatch):
        return self.trainer.request_of(batch).run(self.trainer.target)

    def _train_on(self, batch: BlockBatch, features) -> None:
        trainer = self.trainer
        batch = batch.to(self.args.device)
        with trainer.accelerator.autocast():
            hidden_states, kept_blocks = trainer.draft(self.drafter, batch, features)
        loss, _ = trainer._loss(batch, features, hidden_states, kept_blocks, 1.0, self.args.loss_weighting)
        loss.backward()

    def _fit(self, scale: float, batches: dict[float, list[BlockBatch]]) -> float:
        """Goes down to a scale whose largest micro-batch fits."""
        while scale > SCALES[0]:
            largest = max(batches[scale], key=lambda batch: batch.num_blocks)
            try:
                self._train_on(largest, self._features(largest))
                return scale
            except torch.OutOfMemoryError:
                scale = SCALES[SCALES.index(scale) - 1]
        return scale

    def _time(self, work) -> float:
        """The fastest of a few runs behind one that warms up (compiles, allocates)."""
        work()
        best = float("inf")
        for _ in range(_REPEATS):
            self._wait_for_devices()
            began = time.perf_counter()
            work()
            self._wait_for_devices()
            best = min(best, time.perf_counter() - began)
        return best

    def _wait_for_devices(self) -> None:
        for device in {self.args.device, self.trainer.target.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
