# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which of PyTorch's attention kernels suit decoding. This file is shipped to the Hub: it imports torch only."""

import contextlib

import torch


@contextlib.contextmanager
def without_cudnn_attention(device: torch.device):
    """Inside, attention on a GPU takes other kernels than cuDNN's.

    cuDNN's come first on Hopper in half precision, and plan each new shape: 50 ms of the host (torchtune issue 1652), where a
    whole pass of a small model takes 20. Decoding brings a new length with each pass. The switch is one for the process.

    Args:
        device (`torch.device`): of the model that decodes.
    """
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
