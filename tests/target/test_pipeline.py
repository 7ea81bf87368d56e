# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import threading
import time
import weakref

import pytest
import torch
from tiny_models import make_target

from hf_dflash import FrozenTarget
from hf_dflash.target.pipeline import FeaturePipeline, FeatureRequest, TargetForwardError


pytestmark = pytest.mark.compat


class WatchedTarget(FrozenTarget):
    """Counts its forward passes, and those whose features are still alive."""

    def __init__(self, kind="qwen3"):
        super().__init__(make_target(kind), [1, 3])
        self.begun, self.features, self.threads, self.fails_on = [], [], set(), None

    def __call__(self, input_ids, *args, **kwargs):
        self.begun.append(int(input_ids[0, 0]) if input_ids.numel() else None)
        self.threads.add(threading.current_thread())
        if self.fails_on == self.begun[-1] and self.fails_on is not None:
            raise torch.OutOfMemoryError("no room")
        features = super().__call__(input_ids, *args, **kwargs)
        self.features.append(weakref.ref(features.context_hidden_states))
        return features

    @property
    def num_alive(self):
        return sum(one() is not None for one in self.features)


def request(number, rows=2, width=5):
    """The first token says which one it is."""
    generator = torch.Generator().manual_seed(number)
    input_ids = torch.randint(6, 90, (rows, width), generator=generator)
    if rows:
        input_ids[0, 0] = number
    lengths = torch.arange(width, width - rows, -1)
    return FeatureRequest(input_ids, lengths, torch.arange(min(3, int(lengths.sum()))), True, [10 * number, 11])


def direct(one):
    return FrozenTarget(make_target("qwen3"), [1, 3])(
        one.input_ids, one.lengths, one.label_positions, return_label_hidden_states=True
    )


def assert_equal(features, reference):
    assert torch.equal(features.context_hidden_states, reference.context_hidden_states)
    assert torch.equal(features.label_ids, reference.label_ids)
    assert torch.equal(features.label_hidden_states, reference.label_hidden_states)


def until(condition):
    """Waits for another thread; a hang is what pytest's own time limit is for."""
    while not condition():
        time.sleep(0.001)


@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_features_come_in_the_order_of_requests_from_targets_in_turn(num_targets, asynchronous):
    targets = [WatchedTarget() for _ in range(num_targets)]
    requests = [request(i, rows=0 if i == 4 else 2, width=3 + i % 4) for i in range(8)]
    with FeaturePipeline(targets, depth=1, asynchronous=asynchronous) as pipeline:
        for one in requests:
            pipeline.submit(one)
        for one in requests:
            features, times = pipeline.take()
            assert_equal(features, direct(one))
            assert times.target[0].seconds_until(times.target[1]) >= 0
            assert (times.wait is not None) == asynchronous
    for index, target in enumerate(targets):
        assert target.begun == [i if i != 4 else None for i in range(index, 8, num_targets)]
        assert (target.threads == {threading.main_thread()}) == (not asynchronous)


def test_a_target_on_the_drafters_device_computes_inline_unless_told_otherwise():
    targets = [WatchedTarget()]
    assert not FeaturePipeline(targets).is_asynchronous
    with FeaturePipeline(targets) as pipeline:
        pipeline.submit(request(0))
        assert targets[0].begun == []
        pipeline.take()
    assert targets[0].threads == {threading.main_thread()}
    # As Accelerate names the CPU of one process among several.
    targets[0].serve("cpu:0", torch.float32)
    assert not FeaturePipeline(targets).is_asynchronous
    with pytest.raises(ValueError, match="`depth` is 0"):
        FeaturePipeline(targets, depth=0)


@pytest.mark.parametrize("num_targets, depth", [(1, 1), (1, 2), (2, 1)])
def test_targets_are_never_further_ahead_than_the_depth_and_features_are_let_go(num_targets, depth):
    targets = [WatchedTarget() for _ in range(num_targets)]
    room = num_targets * depth + 1
    with FeaturePipeline(targets, depth=depth, asynchronous=True) as pipeline:
        for number in range(12):
            pipeline.submit(request(number))
        for taken in range(12):
            # All that may begin does; with time to spare nothing more does.
            until(lambda taken=taken: sum(len(t.begun) for t in targets) >= min(12, taken + room))
            time.sleep(0.01)
            assert sum(len(target.begun) for target in targets) == min(12, taken + room)
            assert sum(target.num_alive for target in targets) <= room
            features, _ = pipeline.take()
            # What is being read still has its place.
            time.sleep(0.01)
            assert sum(len(target.begun) for target in targets) == min(12, taken + room)
            del features
            pipeline.release()
    assert sum(target.num_alive for target in targets) == 0


@pytest.mark.parametrize("num_targets, in_turn", [(1, 1), (1, 3), (2, 3)])
def test_the_first_are_computed_in_turn_with_the_drafter_and_then_targets_run_ahead(num_targets, in_turn):
    targets = [WatchedTarget() for _ in range(num_targets)]
    room = 2 * num_targets + 1
    with FeaturePipeline(targets, depth=2, asynchronous=True, in_turn=in_turn) as pipeline:
        for number in range(10):
            pipeline.submit(request(number))
        for taken in range(in_turn):
            assert_equal(pipeline.take()[0], direct(request(taken)))
            # The drafter reads it: nothing else runs.
            time.sleep(0.01)
            assert sum(len(target.begun) for target in targets) == taken + 1
        pipeline.release()
        until(lambda: sum(len(target.begun) for target in targets) == min(10, in_turn + room))
        for taken in range(in_turn, 10):
            assert_equal(pipeline.take()[0], direct(request(taken)))


def test_options_of_the_compiler_hold_in_the_threads_of_targets_too():
    """Past `recompile_limit` a target would go on uncompiled, and only where it computes ahead."""
    seen = []

    class Target(WatchedTarget):
        def __call__(self, *args, **kwargs):
            seen.append(torch._dynamo.config.recompile_limit)
            return super().__call__(*args, **kwargs)

    with torch._dynamo.config.patch(recompile_limit=77):
        with FeaturePipeline([Target()], asynchronous=True) as pipeline:
            pipeline.submit(request(0))
            pipeline.take()
    assert seen == [77]


def test_targets_compute_with_as_many_threads_as_the_drafter_whatever_it_does_when_they_begin():
    seen = []

    class Target(WatchedTarget):
        def __call__(self, *args, **kwargs):
            seen.append(torch.get_num_threads())
            return super().__call__(*args, **kwargs)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with FeaturePipeline([Target()], asynchronous=True) as pipeline:
            # As where blocks are drawn.
            torch.set_num_threads(1)
            pipeline.submit(request(0))
            pipeline.take()
    finally:
        torch.set_num_threads(before)
    assert seen == [3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_surfaces_where_its_features_are_needed_and_names_the_rows(asynchronous):
    targets = [WatchedTarget(), WatchedTarget()]
    targets[1].fails_on = 3
    with FeaturePipeline(targets, asynchronous=asynchronous) as pipeline:
        for number in range(6):
            pipeline.submit(request(number))
        for number in range(6):
            if number != 3:
                assert_equal(pipeline.take()[0], direct(request(number)))
                continue
            with pytest.raises(TargetForwardError) as failure:
                pipeline.take()
            message = str(failure.value)
            assert "Target 1 on cpu" in message and "[30, 11], 2 x 5 tokens: OutOfMemoryError: no room" in message
            assert "--token_budget" in message
            assert isinstance(failure.value.__cause__, torch.OutOfMemoryError)


def test_targets_rest_while_somebody_else_uses_them():
    target = WatchedTarget()
    with FeaturePipeline([target], depth=3, asynchronous=True) as pipeline:
        with pipeline.exclusive():
            begun = len(target.begun)
            for number in range(3):
                pipeline.submit(request(number))
            assert_equal(target(*vars_of(request(7)), return_label_hidden_states=True), direct(request(7)))
            time.sleep(0.02)
            assert len(target.begun) == begun + 1
            assert not any(module._forward_hooks for module in target.model.modules())
        assert_equal(pipeline.take()[0], direct(request(0)))


def vars_of(one):
    return one.input_ids, one.lengths, one.label_positions


def test_two_targets_that_are_one_model_do_not_take_each_others_features():
    target = WatchedTarget()
    with FeaturePipeline([target, target], asynchronous=True) as pipeline:
        for number in range(10):
            pipeline.submit(request(number, width=3 + number))
        for number in range(10):
            assert_equal(pipeline.take()[0], direct(request(number, width=3 + number)))


def test_what_was_asked_for_and_not_taken_is_forgotten_and_no_thread_stays():
    threads = set(threading.enumerate())
    target = WatchedTarget()
    with FeaturePipeline([target], depth=1, asynchronous=True) as pipeline:
        for number in range(5):
            pipeline.submit(request(number))
        pipeline.take()
        assert pipeline.num_waiting == 4
        pipeline.restart()
        assert pipeline.num_waiting == 0
        pipeline.submit(request(9))
        assert_equal(pipeline.take()[0], direct(request(9)))
    assert set(threading.enumerate()) == threads
    # And in the middle of everything, by an error.
    with pytest.raises(KeyError):
        with pipeline:
            for number in range(5):
                pipeline.submit(request(number))
            raise KeyError
    assert set(threading.enumerate()) == threads
    assert target.num_alive == 0
