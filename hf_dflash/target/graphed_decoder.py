# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A small target's pass as CUDA graphs: one order of the host instead of one for each kernel of each layer.

A target of 135M parameters keeps an H200 busy for less than half of the time that the host takes to launch its kernels. A graph has
the shape that was recorded, so micro-batches are padded to a few shapes; that is work for a device that would wait otherwise.
Nothing is compiled: the kernels are those of the decoder as it is, with compiled layers or without.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..decoding.graphed_pass import record


logger = logging.getLogger(__name__)

# Parameters x tokens of a pass that takes the device about as long as its launches take the host: 10 to 20 ms on an H200.
_LAUNCHES_OUTWEIGH_BELOW = 3_000_000_000_000
# Under one budget: four lengths an octave, and about two numbers of rows with each.
_MAX_GRAPHS = 64


def launches_outweigh(model, num_tokens: int) -> bool:
    """Whether a pass of a target over so many tokens keeps the host busier than its CUDA device."""
    if not is_on_one_cuda_device(model):
        return False
    # Matrices in FP8 are buffers.
    num_weights = model.num_parameters() + sum(buffer.numel() for buffer in model.buffers())
    return num_weights * num_tokens < _LAUNCHES_OUTWEIGH_BELOW


def is_on_one_cuda_device(model) -> bool:
    """A graph is one device's."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda"


def round_up(size: int) -> int:
    """The next of 1 .. 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 ...: four sizes an octave, at most a quarter more than asked."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


class GraphedDecoder:
    """
    Runs a decoder eagerly for the first time with a shape, and from a graph afterwards.

    Where a pass cannot be recorded (it asks the device for a number, say), a warning says why, and it and all others run as they
    would without graphs.

    Args:
        run (`Callable`): takes `input_ids` `[R, L]` on the device, and whether the pass goes to the decoder's end; returns a list
            of tensors `[R, L, H]`. Python runs only in the first two calls with a shape: hooks that `run` does not set itself do
            not see the others.
        device (`torch.device`): of the decoder, all of it.
    """

    def __init__(self, run: Callable[[torch.Tensor, bool], list[torch.Tensor]], device: torch.device):
        self.run, self.is_on = run, True
        self._recorder = Recorder(device)
        self._warm: set[tuple] = set()
        self._graphs: dict[tuple, tuple] = {}
        self._rooms: list[torch.Tensor] = []

    def pad(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[R, L]`, padded with zeros on the right and below to one of the shapes that get graphs."""
        if not self.is_on:
            return input_ids
        rows, length = input_ids.shape
        return F.pad(input_ids, (0, round_up(length) - length, 0, round_up(rows) - rows))

    def __call__(self, input_ids: torch.Tensor, to_the_end: bool) -> list[torch.Tensor]:
        """
        Args:
            input_ids (`torch.Tensor` of shape `[R, L]`, int64): on the device, from [`~GraphedDecoder.pad`].
            to_the_end (`bool`): handed to `run`.

        Returns:
            What `run` returns; the next call may write to the same places, behind what the current stream has been given to read.
        """
        key = (*input_ids.shape, to_the_end)
        if key not in self._graphs and not self._record(key, input_ids):
            outputs = self.run(input_ids, to_the_end)
            if self._may_record:
                self._warm.add(key)
                self._make_rooms(outputs)
            return outputs
        recorded_ids, replay, outputs = self._graphs[key]
        self._recorder.follow_last_reader()
        recorded_ids.copy_(input_ids)
        replay()
        return outputs

    @property
    def _may_record(self) -> bool:
        return self.is_on and len(self._graphs) < _MAX_GRAPHS

    def _make_rooms(self, outputs: list[torch.Tensor]) -> None:
        """Where the graphs of all shapes leave their outputs: the memory of a pass is that of the next one, too."""
        for index, output in enumerate(outputs):
            if index == len(self._rooms):
                self._rooms.append(torch.empty_like(output).flatten())
            elif self._rooms[index].numel() < output.numel():
                # Graphs that are there keep the room they write to.
                self._rooms[index] = torch.empty_like(output).flatten()

    def _record(self, key: tuple, input_ids: torch.Tensor) -> bool:
        """Records a shape that comes for the second time: in a first run libraries set themselves up. Returns whether it could."""
        if not self._may_record or key not in self._warm:
            return False
        recorded_ids = input_ids.clone()

        def run_into_rooms() -> list[torch.Tensor]:
            outputs = self.run(recorded_ids, key[-1])
            rooms = self._rooms[: len(outputs)]
            return [room[: one.numel()].view(one.shape).copy_(one) for room, one in zip(rooms, outputs, strict=True)]

        try:
            replay, outputs = self._recorder.record(run_into_rooms)
        except RuntimeError as error:
            self.is_on = False
            # Shapes are no longer padded to those of the graphs that there are, and memory may be what was wanting.
            self._graphs.clear()
            self._rooms.clear()
            self._warm.clear()
            logger.warning(
                "The target's passes cannot be recorded as CUDA graphs and run without; `--target_cuda_graphs off` does not try: "
                f"{error}"
            )
            return False
        self._graphs[key] = recorded_ids, replay, outputs
        return True


class Recorder:
    """Records graphs that share their memory, for one of them is at work at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._last_reader: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """See [`record`]."""
        return record(run, self.device, self._pool, self._stream)

    def follow_last_reader(self) -> None:
        """What another stream has been given to read is not written to before."""
        stream = torch.cuda.current_stream(self.device)
        if self._last_reader is not None and self._last_reader != stream:
            stream.wait_stream(self._last_reader)
        self._last_reader = stream
