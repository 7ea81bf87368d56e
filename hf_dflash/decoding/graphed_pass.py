# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The verify pass as one CUDA graph: the host gives one order a block instead of one for each kernel of each layer.

A verify pass has the same shapes in every block, and with a static cache the same addresses, so it can be recorded once a
generation and replayed. Nothing is compiled: the kernels, and so the output, are those of the pass that was recorded.

This file is shipped beside a drafter's `custom_generate/generate.py`: it imports torch, transformers and its siblings only.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import lru_cache

import torch


# PyTorch records one graph at a time.
_recording = threading.Lock()


class GraphedPass:
    """
    Calls a forward pass, eagerly for the first time and from its graph afterwards.

    Args:
        forward (`Callable`): takes ids and positions, `[1, length]`, of a fixed length, and returns tensors. These, and what it
            keeps elsewhere, are read before the next call, which writes to the same places. Python runs only in the first
            two calls: hooks do not see the others.

    Raises:
        `ValueError`: if the pass cannot be recorded, with the reason.
    """

    def __init__(self, forward: Callable[[torch.Tensor, torch.Tensor], tuple]):
        self.forward = forward
        self.is_warm = False
        self.replay = None

    def __call__(self, input_ids: torch.LongTensor, position_ids: torch.LongTensor) -> tuple[torch.Tensor, ...]:
        if not self.is_warm:
            # Libraries set themselves up in a first run, which a recording does not allow.
            self.is_warm = True
            return self.forward(input_ids, position_ids)
        if self.replay is None:
            self.input_ids, self.position_ids = input_ids.clone(), position_ids.clone()
            try:
                self.replay, self.outputs = record(
                    lambda: self.forward(self.input_ids, self.position_ids), input_ids.device
                )
            except RuntimeError as error:
                raise ValueError(
                    f"The target's pass cannot be recorded as a CUDA graph: leave `cuda_graph` out. ({error})"
                ) from error
        else:
            self.input_ids.copy_(input_ids)
            self.position_ids.copy_(position_ids)
        self.replay()
        return self.outputs


def record(
    run: Callable[[], tuple],
    device: torch.device,
    pool: tuple[int, int] | None = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[Callable[[], None], tuple]:
    """Records what a function gives to the device, without doing it. Returns what does it, and the tensors it fills.

    Args:
        run (`Callable`): returns tensors.
        device (`torch.device`): of its kernels, all of them; the current one may be another.
        pool (`tuple[int, int]`, *optional*): of `torch.cuda.graph_pool_handle`, for graphs that share their memory.
        stream (`torch.cuda.Stream`, *optional*): of the device, to record on. Graphs that run at the same time take one each.

    Raises:
        `RuntimeError`: if the pass cannot be recorded, with the reason. Everything is as before then.
    """
    stream = _recording_stream(device) if stream is None else stream
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # The recording is the current device's, and one that fails would leave that at another.
    with _recording, torch.cuda.device(device):
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads go on using the device.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                outputs = run()
        except Exception as error:
            _undo_recording(pool, stream)
            # PyTorch stays on the stream of a recording that fails.
            torch.cuda.set_stream(before)
            # Where the pass fails, the end of the recording fails behind it, and knows less.
            reason = error.__context__ or error
            raise RuntimeError(f"{type(reason).__name__}: {reason}") from error
    return graph.replay, outputs


def _undo_recording(pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Takes PyTorch out of a recording that has failed."""
    # For its allocator the recording has not ended: memory that two streams have used would never be free again, nor would what
    # the pass had taken. Where it has, the first call says so.
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # Older releases refuse to draw random numbers on the device until a recording has gone well.
    with (
        contextlib.suppress(RuntimeError),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        torch.zeros(1, device=stream.device)


@lru_cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """PyTorch's own is of the device that was current first. One for all passes: matrix products keep a workspace for each stream."""
    return torch.cuda.Stream(device)
