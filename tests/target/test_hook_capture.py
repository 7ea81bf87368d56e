# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import KINDS, VOCAB_SIZE, make_target
from torch import nn

from hf_dflash.target.hook_capture import HookCapture


pytestmark = pytest.mark.compat


@pytest.mark.parametrize("kind", KINDS)
def test_layer_k_is_hidden_state_k_plus_1_of_transformers(kind):
    model = make_target(kind)
    input_ids = torch.randint(6, VOCAB_SIZE, (2, 13))
    ids = [0, 1, 4]
    with torch.no_grad(), HookCapture(model, ids) as capture:
        hidden_states = model(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(capture.features) == 3
    for layer_id, feature in zip(ids, capture.features, strict=True):
        assert torch.equal(feature, hidden_states[layer_id + 1])


def test_layers_that_return_tuples_are_understood():
    class InATuple(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return (self.layer(*args, **kwargs), "attention weights")

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(InATuple(nn.Linear(3, 3)) for _ in range(4))

        def get_decoder(self):
            return self

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(x)
            return x

    chain, x = Chain(), torch.randn(2, 3)
    with HookCapture(chain, [1, 2]) as capture:
        chain(x)
    first = chain.layers[1].layer(chain.layers[0].layer(x))
    assert torch.equal(capture.features[0], first)
    assert torch.equal(capture.features[1], chain.layers[2].layer(first))


def test_hooks_live_inside_the_context_only_and_the_last_forward_counts(tiny_qwen3):
    one, two = torch.randint(6, VOCAB_SIZE, (2, 1, 7))
    capture = HookCapture(tiny_qwen3, [2])
    with pytest.raises(RuntimeError, match="No features yet"):
        _ = capture.features
    with torch.no_grad():
        with capture:
            tiny_qwen3(one)
            first = capture.features[0]
            tiny_qwen3(two)
        second = capture.features[0]
        assert not torch.equal(first, second)
        tiny_qwen3(one)
        assert capture.features[0] is second
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in tiny_qwen3.modules())
        capture.clear()
        with pytest.raises(RuntimeError):
            _ = capture.features
        with capture:
            tiny_qwen3(one)
        assert torch.equal(capture.features[0], first)


def test_a_forward_that_is_stopped_half_way_leaves_no_mixture_of_old_and_new(tiny_qwen3):
    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    input_ids = torch.randint(6, VOCAB_SIZE, (1, 7))
    with torch.no_grad(), HookCapture(tiny_qwen3, [1, 4]) as capture:
        tiny_qwen3(input_ids)
        handle = tiny_qwen3.get_decoder().layers[3].register_forward_hook(stop)
        with pytest.raises(Stop):
            tiny_qwen3(input_ids + 1)
        handle.remove()
        with pytest.raises(RuntimeError):
            _ = capture.features


def test_a_pass_can_end_behind_the_last_captured_layer(tiny_qwen3):
    ran = []
    handles = [
        layer.register_forward_hook(lambda *args, index=index: ran.append(index))
        for index, layer in enumerate(tiny_qwen3.get_decoder().layers)
    ]
    input_ids = torch.randint(6, VOCAB_SIZE, (2, 7))
    with torch.no_grad():
        with HookCapture(tiny_qwen3, [0, 2]) as capture:
            tiny_qwen3(input_ids)
        whole, ran_whole = capture.features, ran.copy()
        ran.clear()
        with capture.stop_early():
            tiny_qwen3(input_ids)
            raise AssertionError("not reached")
        assert all(torch.equal(a, b) for a, b in zip(capture.features, whole, strict=True))
        # Layer 2's own hook here stands before the one that ends the pass.
        assert ran_whole == [0, 1, 2, 3, 4, 5] and ran == [0, 1, 2]
        ran.clear()
        with capture.stop_early(False):
            tiny_qwen3(input_ids)
        assert ran == ran_whole
    for handle in handles:
        handle.remove()


def test_hooks_are_gone_after_an_error(tiny_qwen3):
    with pytest.raises(ZeroDivisionError), HookCapture(tiny_qwen3, [1]):
        _ = 1 / 0
    assert not any(layer._forward_hooks for layer in tiny_qwen3.get_decoder().layers)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([5], "highest usable id"), ([1, 1], "repetition"), ([3, 1], "increasing"), ([-1], "negative"), ([], "at least")],
)
def test_unusable_layer_ids_are_refused(tiny_qwen3, ids, message):
    with pytest.raises(ValueError, match=message):
        HookCapture(tiny_qwen3, ids)


def test_a_model_without_decoder_layers_is_refused():
    class Odd(nn.Module):
        def get_decoder(self):
            return nn.Linear(2, 2)

    with pytest.raises(ValueError, match="get_decoder"):
        HookCapture(Odd(), [1])
