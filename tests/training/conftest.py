# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
from tiny_models import make_target


@pytest.fixture
def job_file(tmp_path):
    """A job that names its target and nothing that is there to be trained on."""
    make_target("qwen3").save_pretrained(tmp_path / "target")
    path = tmp_path / "job.yaml"
    path.write_text(
        f"target: {tmp_path / 'target'}\ncompletions: [a.jsonl, b.jsonl]\noutput_dir: {tmp_path / 'out'}\n"
        "learning_rate: 3.0e-4\nblock_size: 4\nmask_token_id: 5\ntarget_layer_ids: [1, 3]\nnum_hidden_layers: 2\n"
        "use_cpu: true\nlr_scheduler_kwargs: {num_cycles: 0.4}\nsave_each_epoch: true\ntarget_dtype: float32\n"
    )
    return path
