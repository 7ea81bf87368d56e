# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""PyTorch's switch is there without a GPU too."""

import pytest
import torch

from hf_dflash.decoding.attention_kernels import without_cudnn_attention


@pytest.fixture(params=[True, False])
def before(request):
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(kept)


def test_cudnns_kernels_are_off_inside_and_as_before_outside(before):
    with pytest.raises(KeyError), without_cudnn_attention(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_cpu_leaves_the_switch_alone(before):
    with without_cudnn_attention(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
