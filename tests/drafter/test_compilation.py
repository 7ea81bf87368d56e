# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""A thread compiles, by a backend that traces as slowly as a test wants; another calls what is compiled already."""

import contextlib
import threading
import time

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch.fx.experimental.proxy_tensor import make_fx

from hf_dflash.drafter import modeling_dflash
from hf_dflash.drafter.compilation import compile_function


pytestmark = pytest.mark.compat

REFUSAL = "using FX to symbolically trace"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def another_thread_compiles(stage):
    """Inside, a thread is in the middle of compiling a forward or a backward pass; `end()` lets it finish."""
    is_tracing, may_end, failures = threading.Event(), threading.Event(), []

    def compile_slowly(graph, inputs):
        def trace(states):
            is_tracing.set()
            may_end.wait()
            return states + 1

        # As inductor's passes do, of a backward pass too.
        with compile_lock:
            make_fx(trace)(torch.ones(1))
        return make_boxed_func(graph)

    def take_as_it_is(graph, inputs):
        return make_boxed_func(graph)

    backend = aot_autograd(
        **{
            "fw_compiler": compile_slowly if stage == "forward" else take_as_it_is,
            "bw_compiler": compile_slowly if stage == "backward" else take_as_it_is,
        }
    )

    def work():
        try:
            compiled = torch.compile(lambda states: (states.sin() ** 2).sum(), backend=backend, dynamic=False)
            compiled(torch.ones(3, requires_grad=True)).backward()
        except Exception as error:
            failures.append(error)
            is_tracing.set()

    thread = threading.Thread(target=work)
    thread.start()
    is_tracing.wait()
    try:
        yield may_end.set
    finally:
        may_end.set()
        thread.join()
    assert not failures


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_call_that_meets_another_threads_compilation_waits_and_computes(stage):
    function, argument, results = compile_function(torch.cos, backend="eager"), torch.arange(4.0), []
    assert torch.equal(function(argument), argument.cos())
    with another_thread_compiles(stage) as end:
        thread = threading.Thread(target=lambda: results.append(function(argument)))
        thread.start()
        # Time to be refused; a slow machine sees less of the matter.
        time.sleep(0.1)
        end()
        thread.join()
    assert torch.equal(results[0], argument.cos())


def test_torch_itself_refuses_such_a_call():
    """Or there is nothing to wait for, and `compile_function` can go."""
    compiled = torch.compile(torch.cos, backend="eager")
    compiled(torch.ones(2))
    with another_thread_compiles("backward"), pytest.raises(RuntimeError, match=REFUSAL):
        compiled(torch.ones(2))


def test_what_is_new_to_both_threads_is_compiled_by_one_after_the_other():
    function, results = compile_function(torch.tan, backend="eager"), []
    with another_thread_compiles("backward") as end:
        thread = threading.Thread(target=lambda: results.append(function(torch.ones(2))))
        thread.start()
        time.sleep(0.1)
        assert not results
        end()
        thread.join()
    assert torch.equal(results[0], torch.ones(2).tan())


def test_a_caller_that_traces_itself_is_refused_and_errors_of_the_function_come_once():
    function = compile_function(torch.cos, backend="eager")
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.fx.symbolic_trace(lambda states: function(states))
    calls = []

    @torch.compiler.disable
    def fail(states):
        calls.append(states)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        compile_function(lambda states: fail(states + 1), backend="eager")(torch.ones(2))
    assert len(calls) == 1


def test_modules_run_compiled_while_another_thread_compiles(monkeypatch):
    norm, states = modeling_dflash.DFlashRMSNorm(8, 1e-6), torch.randn(2, 8)
    norm.compile_options = (True, "eager")
    expected = norm(states)
    calls, compiled_call = [], modeling_dflash._compiled_call
    monkeypatch.setattr(modeling_dflash, "_compiled_call", lambda *options: calls.append(1) or compiled_call(*options))
    with another_thread_compiles("forward") as end:
        threading.Timer(0.1, end).start()
        assert torch.equal(norm(states), expected)
    assert calls


class Inside:
    """A backend for `torch.compile`: what it compiles waits inside, once it is told to."""

    def __init__(self):
        self.is_inside, self.may_go, self.waits = threading.Event(), threading.Event(), False

    def __call__(self, graph, inputs):
        def run(*arguments):
            if self.waits:
                self.is_inside.set()
                self.may_go.wait(60)
            return graph.forward(*arguments)

        return run


def count_compiled_pieces_beside(call, backend: Inside) -> int:
    """How many of the two pieces of a function with a graph break run compiled while another thread is inside `call`."""
    pieces = []

    def count(graph, inputs):
        return lambda *arguments: pieces.append(1) or graph.forward(*arguments)

    function = compile_function(lambda states: torch.compiler.disable(torch.exp)(states.sin()).cos(), backend=count)
    argument = torch.arange(4.0)
    expected = function(argument)
    call()
    backend.waits = True
    thread = threading.Thread(target=call)
    thread.start()
    assert backend.is_inside.wait(60)
    pieces.clear()
    assert torch.equal(function(argument), expected)
    backend.may_go.set()
    thread.join()
    return len(pieces)


def test_other_threads_stay_compiled_beside_the_drafters_compiled_modules():
    backend, states = Inside(), torch.randn(2, 8)
    norm = modeling_dflash.DFlashRMSNorm(8, 1e-6)
    norm.compile_options = (True, backend)
    assert count_compiled_pieces_beside(lambda: norm(states), backend) == 2


def test_torch_itself_runs_other_threads_uncompiled_beside_a_full_graph():
    """Or `compile_function` may take `fullgraph`."""
    backend = Inside()
    compiled, states = torch.compile(torch.cos, backend=backend, fullgraph=True), torch.ones(2)
    assert count_compiled_pieces_beside(lambda: compiled(states), backend) < 2
    with pytest.raises(ValueError, match="fullgraph"):
        compile_function(torch.cos, fullgraph=True)


def test_flex_attention_runs_compiled_or_not_at_all():
    function = compile_function(modeling_dflash._flex_attention_compiled_only, backend="eager")
    queries = torch.randn(1, 2, 128, 16)
    with torch.no_grad():
        out = function(queries, queries, queries)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
    torch.testing.assert_close(out, expected)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="about to run uncompiled"):
        function(queries, queries, queries)
