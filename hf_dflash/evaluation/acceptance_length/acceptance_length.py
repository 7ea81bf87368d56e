# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Acceptance length as a metric of the `evaluate` library: `evaluate.load("<this folder>")`."""

import datasets
import evaluate


_DESCRIPTION = """
How many tokens a verify pass of speculative decoding emits on average, the bonus token included: a drafter that is never
right has 1, one that is always right has its block size.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (`list[list[int]]`): for each prompt, the tokens that each of its blocks emitted
        (`SpeculativeOutput.acceptance_lengths`). Each is at least 1.
Returns:
    `dict` with
    - `acceptance_length_micro` (`float`): tokens / blocks, over all prompts;
    - `acceptance_length_macro` (`float`): mean over prompts of each prompt's own mean; prompts without a block are left out;
    - `acceptance_by_slot` (`list[float]`): share of blocks in which slots 1 .. k were all accepted, so that 1 + their sum is
      the micro figure;
    - `num_blocks` (`int`), `num_prompts` (`int`).
Examples:
    >>> metric = evaluate.load("hf_dflash/evaluation/acceptance_length")
    >>> metric.compute(predictions=[[4, 1, 3], [2]])["acceptance_length_micro"]
    2.5
"""

_CITATION = """
@misc{dflash, title={DFlash: Block Diffusion for Flash Speculative Decoding}, eprint={2602.06036}, archivePrefix={arXiv}}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceLength(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int32"))}),
        )

    def _compute(self, predictions):
        blocks = [length for prompt in predictions for length in prompt]
        if not blocks:
            raise ValueError("`predictions` holds no block: give the acceptance lengths of each prompt's blocks.")
        if min(blocks) < 1:
            raise ValueError(
                "A block emits at least the bonus token, so 1: give acceptance lengths, not accepted drafts."
            )
        means = [sum(prompt) / len(prompt) for prompt in predictions if len(prompt)]
        return {
            "acceptance_length_micro": sum(blocks) / len(blocks),
            "acceptance_length_macro": sum(means) / len(means),
            "acceptance_by_slot": [sum(b > slot for b in blocks) / len(blocks) for slot in range(1, max(blocks))],
            "num_blocks": len(blocks),
            "num_prompts": len(predictions),
        }
