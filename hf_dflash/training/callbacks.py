# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What a run does beside training: save each epoch, measure acceptance by decoding."""

import math

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..decoding.speculative import speculative_generate
from ..evaluation.acceptance import acceptance_by_slot
from .decoded_samples import describe_sample, find_tokenizer


logger = logging.get_logger(__name__)

# Replies that the run log keeps in full.
_NUM_SAMPLES = 2


class EpochCheckpointCallback(TrainerCallback):
    """A checkpoint at the end of each epoch, beside those of `save_steps`."""

    def on_epoch_end(self, args, state, control, **kwargs):
        # `Trainer` also ends an "epoch" where training stops in the middle of one.
        if math.isclose(state.epoch, round(state.epoch), abs_tol=1e-6):
            control.should_save = True


class AcceptanceCallback(TrainerCallback):
    """
    Decodes a few held-out prompts every so many steps, and compares with what evaluation makes of the very same text.

    Both figures are of the target's own greedy reply, so they may differ only where two tokens are all but equally likely.
    A gap means that drafter and decoding do not see the same thing, and a good loss is worth nothing (SpecForge 455: a leak,
    another rotary embedding, layers off by one).

    Args:
        trainer ([`DFlashTrainer`]): whose drafter is measured; with an `eval_dataset`.
        every (`int`): optimizer steps.
        num_prompts (`int`, *optional*, defaults to 4): the first rows of the evaluation dataset, up to their first reply.
        max_new_tokens (`int`, *optional*, defaults to 128): of each reply.
        tolerance (`float`, *optional*, defaults to 0.1): a larger relative gap is warned about.
    """

    def __init__(
        self, trainer, every: int, *, num_prompts: int = 4, max_new_tokens: int = 128, tolerance: float = 0.1
    ):
        self.trainer, self.every, self.tolerance = trainer, every, tolerance
        self.num_prompts, self.max_new_tokens = num_prompts, max_new_tokens
        self._tokenizer = None
        self._decoded: dict = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and args.run_log:
            self._tokenizer = find_tokenizer(self.trainer)

    def on_step_end(self, args, state, control, **kwargs):
        # The other ranks wait at the next step, on the host, which has no time limit.
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            # `Trainer.log` takes any log for the one that was due.
            should_log = control.should_log
            with self.trainer.pipeline.exclusive(), self.trainer._step_times.excluded():
                figures = self.measure()
            self.trainer.log(figures)
            self.trainer.run_log.add_event("decoded", state.global_step, **self._decoded)
            control.should_log = should_log

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """`decoded_acceptance_length` and, of the same tokens, `simulated_acceptance_length`."""
        trainer = self.trainer
        drafter = trainer.accelerator.unwrap_model(trainer.model)
        was_training = drafter.training
        drafter.eval()
        lengths, simulated, samples = [], [], []
        try:
            for prompt in self._prompts():
                input_ids = prompt[None].to(trainer.target.device)
                output = speculative_generate(
                    trainer.target.model,
                    drafter,
                    input_ids,
                    # Given by hand, or `generate` takes pad tokens in a prompt for padding.
                    torch.ones_like(input_ids),
                    max_new_tokens=self.max_new_tokens,
                    do_sample=False,
                )
                lengths += output.acceptance_lengths[0]
                simulated += trainer.simulate_acceptance(output.sequences[0], len(prompt))
                if len(samples) < _NUM_SAMPLES:
                    samples.append(describe_sample(prompt, output, self._tokenizer))
        finally:
            drafter.train(was_training)
        by_slot = acceptance_by_slot(lengths, drafter.config.block_size)
        self._decoded = {"samples": samples, "acceptance_by_slot": by_slot}
        figures = {"decoded_acceptance_length": _mean(lengths), "simulated_acceptance_length": _mean(simulated)}
        gap = abs(figures["decoded_acceptance_length"] - figures["simulated_acceptance_length"])
        if gap > self.tolerance * figures["simulated_acceptance_length"]:
            logger.warning(
                f"Decoding accepts {figures['decoded_acceptance_length']:.3f} tokens a block, evaluation says "
                f"{figures['simulated_acceptance_length']:.3f} of the same text: decoding and training do not agree. Compare "
                "layer ids, rotary embedding and masks with `hf-dflash verify` before training on."
            )
        return figures

    def _prompts(self) -> list[torch.Tensor]:
        dataset = self.trainer.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        prompts = []
        for index in range(min(self.num_prompts, len(dataset))):
            row = dataset[index]
            supervised = torch.as_tensor(row["loss_mask"]).bool().nonzero()
            if len(supervised) and supervised[0] > 0:
                prompts.append(torch.as_tensor(row["input_ids"])[: supervised[0]])
        return prompts


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
