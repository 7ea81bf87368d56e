# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Targets at work on the coming micro-batches while the drafter trains on this one.

Each target has a thread that launches its forward passes: launching one takes tens of milliseconds of Python, and a launch
queue that is full blocks whoever launches; neither may hold up the thread that launches the drafter. Nothing here makes
that thread wait for a device. Features are handed over from device to device on streams of their own:

    target's stream     | forward k+1          | forward k+2        |
    copy streams        |      | copy k        |      | copy k+1    |
    drafter's stream    | train on k-1         | train on k         |

They land in a ring of slots, depth x targets and one that the drafter reads. A slot is filled again once the drafter has
read it, and a forward pass begins only once its slot is free: so memory is flat whatever the speed of either side.
"""

import contextlib
import contextvars
import queue
import threading
import traceback
from collections import deque
from dataclasses import dataclass, field, fields

import torch

from .frozen_target import FrozenTarget, TargetFeatures
from .moment import Moment


@dataclass
class FeatureRequest:
    """
    What a target shall read; see [`FrozenTarget`]. All of it on the host.

    Args:
        input_ids (`torch.Tensor` of shape `[R, L]`), lengths (`torch.Tensor` of shape `[R]`): right-padded rows, or none.
        label_positions (`torch.Tensor` of shape `[P]`, *optional*): where its predictions are asked.
        return_label_hidden_states (`bool`, *optional*, defaults to `False`): also the hidden states there.
        row_ids (`list[int]`, *optional*): dataset rows, which an error names.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    label_positions: torch.Tensor | None = None
    return_label_hidden_states: bool = False
    row_ids: list[int] = field(default_factory=list)

    def run(self, target: FrozenTarget, device: torch.device | None = None) -> TargetFeatures:
        """Its features, on `device`; on the drafter's by default."""
        return target(
            self.input_ids,
            self.lengths,
            self.label_positions,
            return_label_hidden_states=self.return_label_hidden_states,
            device=device,
        )


@dataclass
class FeatureTimes:
    """
    Pairs of moments, begin and end.

    Args:
        target: the forward pass, on the target's device.
        transfers: copies, each on one device.
        wait: of the drafter's device, for these features; none where it computed them itself.
    """

    target: tuple[Moment, Moment]
    transfers: list[tuple[Moment, Moment]] = field(default_factory=list)
    wait: tuple[Moment, Moment] | None = None


class TargetForwardError(RuntimeError):
    """A target could not compute the features that this training step needs."""


class FeaturePipeline:
    """
    Computes features in the order in which they are asked for, ahead of time where targets have devices of their own.

    Args:
        targets (`list[FrozenTarget]`): take turns; all serve one drafter.
        depth (`int`, *optional*, defaults to 2):
            Micro-batches that each target may be ahead of the drafter: one that is ready and one in the making, so that
            micro-batches of unequal cost even out. 1 would do if all were equal; each one more costs T x K x H elements on
            the drafter's device (420 MB at 8,192 tokens of Qwen3.6-27B).
        asynchronous (`bool`, *optional*):
            `False` computes in the thread and at the moment that takes, `True` ahead in threads, on a CPU too. By default
            ahead, unless a target shares the drafter's device: there is nothing to overlap then.
        in_turn (`int`, *optional*, defaults to 0):
            The first so many micro-batches are computed while the drafter waits, the next not before it has released the
            last: so that layers of either side are compiled while the other rests.

    Example:

    ```python
    with FeaturePipeline(targets) as pipeline:
        for request in requests[:2]:
            pipeline.submit(request)
        features = pipeline.take()  # of requests[0]
        ...  # launch what reads them
        pipeline.release()
    ```
    """

    def __init__(
        self, targets: list[FrozenTarget], *, depth: int = 2, asynchronous: bool | None = None, in_turn: int = 0
    ):
        if depth < 1:
            raise ValueError(f"`depth` is {depth}: a target must be allowed one micro-batch ahead.")
        self.targets = targets
        self.device = targets[0].output_device
        if asynchronous is None:
            asynchronous = not any(_are_same(target.device, self.device) for target in targets)
        self.is_asynchronous = asynchronous
        self.capacity = depth * len(targets)
        self.in_turn = in_turn
        self._slots = [_Slot(self.device) for _ in range(self.capacity + 1)] if asynchronous else []
        # One for all targets, so that the memory of the slots belongs to one stream.
        receiving = torch.cuda.Stream(self.device) if asynchronous and self.device.type == "cuda" else None
        self._routes = [_Route(target, self.device, receiving) for target in targets] if asynchronous else []
        # A model's hooks are those of one forward pass at a time.
        locks: dict[int, threading.RLock] = {}
        self._locks = [locks.setdefault(id(target.model), threading.RLock()) for target in targets]
        self._threads: list[threading.Thread] = []
        self._queues: list[queue.SimpleQueue] = []
        self._reset()

    def _reset(self) -> None:
        self._tickets: deque[_Ticket] = deque()
        self._taken: _Ticket | None = None
        self._num_submitted = self._num_released = 0
        self._changed = threading.Condition()
        self._is_closing = False

    # ---- The drafter's side ----

    def __enter__(self) -> "FeaturePipeline":
        self._reset()
        if self.is_asynchronous:
            self._queues = [queue.SimpleQueue() for _ in self.targets]
            num_threads = torch.get_num_threads()
            self._threads = [
                # Options of torch's compiler are those of a context, which a new thread would not inherit.
                threading.Thread(
                    target=contextvars.copy_context().run,
                    args=(self._work, i, num_threads),
                    name=f"target-{i}",
                    daemon=True,
                )
                for i in range(len(self.targets))
            ]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread, tickets in zip(self._threads, self._queues, strict=True):
            tickets.put(None)
            thread.join()
        self._threads, self._queues = [], []
        for slot in self._slots:
            slot.forget()
        self._reset()

    def restart(self) -> None:
        """Forgets what was asked for and not taken."""
        self.__exit__()
        self.__enter__()

    @property
    def num_waiting(self) -> int:
        """What was asked for and not taken."""
        return len(self._tickets)

    def submit(self, request: FeatureRequest) -> None:
        """Asks for features. The next [`~FeaturePipeline.take`] that has no earlier request before it returns them."""
        ticket = _Ticket(self._num_submitted, request)
        self._num_submitted += 1
        self._tickets.append(ticket)
        if self._threads:
            self._queues[ticket.number % len(self.targets)].put(ticket)

    def take(self) -> tuple[TargetFeatures, FeatureTimes]:
        """The features of the oldest request, to be read by the drafter's current stream until the release.

        Raises:
            `TargetForwardError`: if the target failed, naming the rows.
        """
        self.release()
        ticket = self._tickets.popleft()
        self._taken = ticket
        index = ticket.number % len(self.targets)
        begin = Moment(self.device)
        if self._threads:
            ticket.is_done.wait()
        else:
            try:
                with self._locks[index]:
                    self._compute_here(ticket, self.targets[index])
            except Exception as error:
                ticket.error = error
        if ticket.error is not None:
            raise TargetForwardError(self._describe_failure(ticket, index)) from ticket.error
        if ticket.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ticket.ready.event)
        if self._threads or not _are_same(self.targets[index].device, self.device):
            ticket.times.wait = (begin, Moment(self.device))
        return ticket.features, ticket.times

    def release(self) -> None:
        """Says that whatever reads the features taken last has been launched, so that their memory may be used again."""
        ticket, self._taken = self._taken, None
        if ticket is None:
            return
        ticket.features = None
        if self._slots:
            self._slots[ticket.number % len(self._slots)].read = Moment(self.device)
        with self._changed:
            self._num_released += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self):
        """Targets finish their forward pass and then rest: inside, the calling thread may use them itself."""
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            yield

    def _describe_failure(self, ticket: "_Ticket", index: int) -> str:
        rows, longest = ticket.request.input_ids.shape
        error = ticket.error
        named = ", ".join(map(str, ticket.request.row_ids[:64])) + (
            ", ..." if len(ticket.request.row_ids) > 64 else ""
        )
        hint = ""
        if isinstance(error, torch.OutOfMemoryError):
            hint = " A smaller `--token_budget` (in a new run) or `--max_length` makes micro-batches smaller."
        return (
            f"Target {index} on {self.targets[index].device} failed on the micro-batch of rows (`row_id`) [{named}], {rows} x "
            f"{longest} tokens: {type(error).__name__}: {error}{hint}"
        )

    # ---- The target's side ----

    def _compute_here(self, ticket: "_Ticket", target: FrozenTarget) -> None:
        begin = Moment(target.device)
        features = ticket.request.run(target, target.device)
        end = Moment(target.device)
        ticket.times = FeatureTimes((begin, end))
        if not _are_same(target.device, self.device):
            features = TargetFeatures(**{name: value.to(self.device) for name, value in _tensors(features)})
            ticket.times.transfers.append((end, Moment(target.device)))
        ticket.features = features

    def _work(self, index: int, num_threads: int) -> None:
        # When a thread first asks or computes, it takes the number that the last thread has set, and keeps it: while the
        # drafter's thread draws blocks, that is one. So first take that, then set the number.
        torch.get_num_threads()
        torch.set_num_threads(num_threads)
        while (ticket := self._queues[index].get()) is not None:
            try:
                if not self._wait_for_slot(ticket):
                    continue
                with self._locks[index], self._routes[index].streams():
                    self._compute_ahead(ticket, index)
            except BaseException as error:
                # Frames hold on to activations, and the next batch may want that memory.
                traceback.clear_frames(error.__traceback__)
                ticket.error = error
            ticket.is_done.set()

    def _wait_for_slot(self, ticket: "_Ticket") -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._may_begin(ticket))
            if self._is_closing:
                return False
        slot = self._slots[ticket.number % len(self._slots)]
        if slot.read is not None:
            slot.read.wait()
        return True

    def _may_begin(self, ticket: "_Ticket") -> bool:
        room = 1 if self._num_released < self.in_turn else len(self._slots)
        return ticket.number < self._num_released + room

    def _compute_ahead(self, ticket: "_Ticket", index: int) -> None:
        target, slot = self.targets[index], self._slots[ticket.number % len(self._slots)]
        begin = Moment(target.device)
        features = ticket.request.run(target, target.device)
        end = Moment(target.device)
        ticket.times = FeatureTimes((begin, end))
        ticket.features, ticket.ready = self._routes[index].send(features, end, slot, ticket.times)


@dataclass
class _Ticket:
    number: int
    request: FeatureRequest
    is_done: threading.Event = field(default_factory=threading.Event)
    features: TargetFeatures | None = None
    times: FeatureTimes | None = None
    ready: Moment | None = None
    error: BaseException | None = None


class _Slot:
    """Memory for the features of one micro-batch: on the drafter's device, and pinned on the host if they pass through it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.read: Moment | None = None
        self.filled: Moment | None = None
        self._here: dict[str, torch.Tensor] = {}
        self._pinned: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """A new run starts with no reader; the memory stays."""
        if self.read is not None:
            self.read.wait()
        self.read = None

    def here(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Room for such a tensor. Called with the receiving stream current, once the slot has been read."""
        return self._room(self._here, name, like, device=self.device)

    def pinned(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self._room(self._pinned, name, like, pin_memory=True)

    def _room(self, kept: dict, name: str, like: torch.Tensor, **where) -> torch.Tensor:
        room = kept.get(name)
        if room is None or room.numel() < like.numel() or room.dtype != like.dtype:
            # The old one is let go before the new one is made.
            room = kept[name] = None
            room = kept[name] = torch.empty(like.numel(), dtype=like.dtype, **where)
        return room[: like.numel()].view(like.shape)


class _Route:
    """The way of features from one target to the drafter's device."""

    def __init__(self, target: FrozenTarget, device: torch.device, receiving):
        self.target, self.device, self.receiving = target, device, receiving
        self.is_cuda = target.device.type == device.type == "cuda"
        if not self.is_cuda:
            return
        # On a device of its own a target's default stream is free, and evaluation, which uses it too, shares its memory.
        shares = _are_same(target.device, device)
        self.compute = torch.cuda.Stream(device) if shares else torch.cuda.default_stream(target.device)
        self.compute.wait_stream(torch.cuda.default_stream(target.device))
        self.sending = receiving if shares else torch.cuda.Stream(target.device)
        self.is_direct = shares or torch.cuda.can_device_access_peer(device, target.device)

    @contextlib.contextmanager
    def streams(self):
        if not self.is_cuda:
            yield
            return
        with torch.cuda.stream(self.compute):
            yield

    def send(self, features: TargetFeatures, end: Moment, slot: _Slot, times: FeatureTimes):
        """`(features, ready)`: on the drafter's device once `ready` is past; nothing to wait for on a CPU."""
        if not self.is_cuda:
            moved = {name: value.to(self.device) for name, value in _tensors(features)}
            times.transfers.append((end, Moment(self.target.device)))
            return TargetFeatures(**moved), None
        self.sending.wait_event(end.event)
        for _, value in _tensors(features):
            # They are let go here, and read until the copy is through.
            value.record_stream(self.sending)
        moved = self._copy(features, slot, times) if self.is_direct else self._copy_by_host(features, slot, times)
        slot.filled = Moment(self.device, self.receiving)
        return TargetFeatures(**moved), slot.filled

    def _copy(self, features, slot, times) -> dict[str, torch.Tensor]:
        moved = {}
        # A copy runs on the sender's current stream, and orders it with the receiver's.
        with torch.cuda.stream(self.receiving), torch.cuda.stream(self.sending):
            begin = Moment(self.target.device)
            for name, value in _tensors(features):
                moved[name] = slot.here(name, value)
                moved[name].copy_(value, non_blocking=True)
            times.transfers.append((begin, Moment(self.target.device)))
        return moved

    def _copy_by_host(self, features, slot, times) -> dict[str, torch.Tensor]:
        moved, passed = {}, {}
        with torch.cuda.stream(self.sending):
            if slot.filled is not None:
                # What passed here last has arrived.
                self.sending.wait_event(slot.filled.event)
            begin = Moment(self.target.device)
            for name, value in _tensors(features):
                passed[name] = slot.pinned(name, value)
                passed[name].copy_(value, non_blocking=True)
            here = Moment(self.target.device)
            times.transfers.append((begin, here))
        with torch.cuda.stream(self.receiving):
            self.receiving.wait_event(here.event)
            begin = Moment(self.device)
            for name, value in passed.items():
                moved[name] = slot.here(name, value)
                moved[name].copy_(value, non_blocking=True)
            times.transfers.append((begin, Moment(self.device)))
        return moved


def _are_same(one: torch.device, other: torch.device) -> bool:
    """ "cpu" and "cpu:0", which Accelerate gives a process among several, are one device."""
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)


def _tensors(features: TargetFeatures) -> list[tuple[str, torch.Tensor]]:
    values = ((one.name, getattr(features, one.name)) for one in fields(features))
    return [(name, value) for name, value in values if value is not None]
