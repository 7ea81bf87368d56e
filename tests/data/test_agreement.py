# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import datasets
import pytest
import torch
from tiny_models import VOCAB_SIZE

from hf_dflash.data.agreement import measure_target_agreement


def test_the_share_of_tokens_that_are_the_targets_argmax(tiny_qwen3):
    greedy, other = [], []
    for start in range(6):
        ids = torch.tensor([[start + 5, 7, 9]])
        out = tiny_qwen3.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0
        ].tolist()
        greedy.append(out)
        other.append(out[:3] + [(token + 1) % VOCAB_SIZE for token in out[3:]])
    mask = [[False] * 3 + [True] * 12] * 6
    own = datasets.Dataset.from_dict({"input_ids": greedy, "loss_mask": mask})
    assert measure_target_agreement(own, tiny_qwen3) == {"share": 1.0, "num_tokens": 72, "num_rows": 6}
    foreign = datasets.Dataset.from_dict({"input_ids": other, "loss_mask": mask})
    assert measure_target_agreement(foreign, tiny_qwen3, num_rows=4)["share"] < 0.5
    with pytest.raises(ValueError, match="it is another target"):
        measure_target_agreement(
            datasets.Dataset.from_dict({"input_ids": [[0, 10**6]], "loss_mask": [[False, True]]}), tiny_qwen3
        )
