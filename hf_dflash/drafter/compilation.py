# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Compiled functions that several threads may call: targets compute ahead in threads while the drafter trains.

This file is shipped to the Hub beside the drafter's weights: it imports torch only.
"""

import functools
from collections.abc import Callable

import torch


# Of torch, where a compiled function is called while FX traces, be it in another thread, which compiles.
_REFUSAL = "using FX to symbolically trace a dynamo-optimized function"


def compile_function(function: Callable, **options) -> Callable:
    """`torch.compile`, with two differences: a call that meets another thread's compilation waits for its end instead of
    failing, and there may be 64 variants.

    Never with `fullgraph`: while a thread is inside such a function, torch (2.11 to 2.13) lets all other threads go on
    uncompiled behind their next graph break. A target that computed beside its drafter did so, at random, and its features
    differed in their last bits.

    Args:
        function (`Callable`): is compiled when it is called for the first time, and for each further kind of arguments.
        options: of `torch.compile`.

    Returns:
        `Callable`: computes what `function` computes. What is compiled around a call of it stops there.
    """
    from torch._dynamo.convert_frame import compile_lock

    if options.get("fullgraph"):
        raise ValueError("`fullgraph` makes other threads run uncompiled: count graph breaks in a test instead.")
    # Each kind of layer, training and evaluation, one row and several, and each device is a variant of the same code. Past
    # dynamo's limit of 8 it would go on uncompiled, where flex attention holds every score.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    compiled = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if _REFUSAL not in str(error):
                raise
        # Refused before anything has run. This is the lock under which torch compiles: nobody else does inside, so a second
        # refusal is meant for the caller.
        with compile_lock:
            return compiled(*args, **kwargs)

    return torch.compiler.disable(call, recursive=False)
