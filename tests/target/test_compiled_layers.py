# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The compiled target, by a backend that runs the captured graphs as they are."""

import copy
from functools import partial

import pytest
import torch
from tiny_models import VOCAB_SIZE, make_target
from torch._dynamo.utils import counters
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_dflash.target.compiled_layers import compile_decoder
from hf_dflash.target.fp8 import quantize_to_fp8
from hf_dflash.target.frozen_target import FrozenTarget
from hf_dflash.target.gated_delta_net import (
    causal_convolution,
    is_gated_delta_net,
    join_projections,
    separate_projections,
)


pytestmark = pytest.mark.compat

IDS = [0, 2, 4]


@torch.compiler.disable
def delta_rule(query, key, value, *, g, beta, use_qk_l2norm_in_kernel):
    """`fla`'s kernel as transformers writes it out, with a key head for several value heads, and strides as `fla` has them."""
    repeats = value.shape[2] // query.shape[2]
    query, key = (states.repeat_interleave(repeats, dim=2) for states in (query, key))
    states, last = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    return states.contiguous(), last


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def count_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def make_batch(rows: int, length: int):
    generator = torch.Generator().manual_seed(rows * length)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0] = length
    return torch.randint(6, VOCAB_SIZE, (rows, length), generator=generator), lengths


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_features_and_labels_are_those_of_stock_layers_and_other_lengths_share_the_code(kind):
    stock, target = FrozenTarget(make_target(kind), IDS), FrozenTarget(make_target(kind), IDS)
    assert compile_decoder(target.decoder, backend="eager", delta_rule=delta_rule)
    shapes = [(3, 17), (1, 33), (5, 40), (2, 9), (1, 21), (4, 70), (2, 100)]
    for index, shape in enumerate(shapes):
        batch = make_batch(*shape)
        positions = torch.arange(int(batch[1].sum()))
        result, expected = (t(*batch, positions, return_label_hidden_states=True) for t in (target, stock))
        for name in ("context_hidden_states", "label_hidden_states"):
            one, two = getattr(result, name), getattr(expected, name)
            torch.testing.assert_close(one, two, rtol=0, atol=1e-4 * float(two.abs().max()))
        assert (result.label_ids != expected.label_ids).float().mean() < 0.02
        if index == 1:
            known = count_graphs()
            assert known > 0
    # One row or several; the length does not matter.
    assert count_graphs() == known


def test_a_compiled_target_decodes_as_before():
    model = make_target("qwen3_5")
    prompt = torch.randint(6, VOCAB_SIZE, (1, 9))
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    compile_decoder(model.get_decoder(), backend="eager", delta_rule=delta_rule)
    forwards = []
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(lambda *args: forwards.append(torch.compiler.is_compiling()))
        mixer = getattr(layer, "linear_attn", None)
        if mixer is not None:
            mixer.in_proj_z.register_forward_hook(lambda *args: forwards.append(torch.compiler.is_compiling()))
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert forwards and not any(forwards)


def test_without_fla_mixers_stay_as_they_are(monkeypatch):
    monkeypatch.setattr("hf_dflash.target.compiled_layers.load_delta_rule", lambda: None)
    target = FrozenTarget(make_target("qwen3_5"), IDS)
    batch = make_batch(2, 12)
    expected = target(*batch)
    target.compile_layers(backend="eager")
    are_compiled = []
    for layer in target.decoder.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.in_proj_z.register_forward_hook(
                lambda *_: are_compiled.append(torch.compiler.is_compiling())
            )
    torch.testing.assert_close(target(*batch).context_hidden_states, expected.context_hidden_states, rtol=0, atol=1e-4)
    assert are_compiled and not any(are_compiled)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_layers_of_equal_shape_share_their_code(kind):
    for times in (1, 3):
        layer_types = ["linear_attention" if kind == "qwen3_5" else "full_attention", "full_attention"] * times
        model = make_target(kind, num_hidden_layers=len(layer_types), layer_types=layer_types)
        compile_decoder(model.get_decoder(), backend="eager", delta_rule=delta_rule)
        target = FrozenTarget(model, [0])
        for shape in ((2, 12), (1, 9)):
            target(*make_batch(*shape), torch.arange(3))
        if times == 1:
            known = count_graphs()
    assert count_graphs() == known


@pytest.mark.parametrize("mixers", ["none", "ours", "without fla", "unknown"])
def test_a_copy_runs_its_own_layers_with_the_code_that_is_compiled_already(mixers, monkeypatch):
    kind = "qwen3" if mixers == "none" else "qwen3_5"
    if mixers == "unknown":
        monkeypatch.setattr("hf_dflash.target.compiled_layers.is_gated_delta_net", lambda module: False)
    monkeypatch.setattr(
        "hf_dflash.target.compiled_layers.load_delta_rule", lambda: delta_rule if mixers == "ours" else None
    )
    model, batch = make_target(kind), make_batch(2, 12)
    positions = torch.arange(int(batch[1].sum()))

    def states(model):
        result = FrozenTarget(model, IDS)(*batch, positions, return_label_hidden_states=True)
        return torch.cat([result.context_hidden_states, result.label_hidden_states], dim=-1)

    compile_decoder(model.get_decoder(), backend="eager")
    before, known = states(model), count_graphs()
    copied = copy.deepcopy(model)
    assert torch.equal(states(copied), before)
    assert not compile_decoder(copied.get_decoder(), backend="eager")
    # Attention or mixer, layer, and final norm each have a `forward` that was replaced.
    decoder = copied.get_decoder()
    mixer = getattr(decoder.layers[0], "linear_attn", None)
    projection = decoder.layers[0].self_attn.q_proj if mixer is None else mixer.in_proj_qkv
    with torch.no_grad():
        for weight in (projection.weight, decoder.layers[1].mlp.down_proj.weight, decoder.norm.weight):
            earlier = states(copied)
            weight.add_(0.3 * torch.randn_like(weight))
            assert not torch.equal(states(copied), earlier)
    assert count_graphs() == known
    assert torch.equal(states(model), before)
    changed = make_target(kind)
    changed.load_state_dict(copied.state_dict())
    result, expected = states(copied), states(changed)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_second_time_and_spread_over_devices_nothing_is_compiled(caplog):
    decoder = make_target("qwen3").get_decoder()
    assert compile_decoder(decoder, backend="eager")
    assert not compile_decoder(decoder, backend="eager")
    spread = make_target("qwen3").get_decoder()
    spread.layers[1]._hf_hook = object()
    compiled_elsewhere = make_target("qwen3").get_decoder()
    compiled_elsewhere.layers[1].forward = torch.compile(compiled_elsewhere.layers[1].forward, backend="eager")
    norm_compiled_elsewhere, spread_behind_the_layers = (make_target("qwen3").get_decoder() for _ in range(2))
    norm_compiled_elsewhere.norm.forward = torch.compile(norm_compiled_elsewhere.norm.forward, backend="eager")
    spread_behind_the_layers.norm._hf_hook = object()
    mixer_of_its_own = make_target("qwen3_5").get_decoder()
    mixer_of_its_own.layers[0].linear_attn.forward = partial(mixer_of_its_own.layers[0].linear_attn.forward)
    for decoder in (
        spread,
        compiled_elsewhere,
        norm_compiled_elsewhere,
        spread_behind_the_layers,
        mixer_of_its_own,
    ):
        caplog.clear()
        assert not compile_decoder(decoder, backend="eager")
        assert "several devices" in caplog.text
        assert not any(hasattr(layer.forward, "uncompiled") for layer in decoder.layers)


def test_only_mixers_with_all_parts_of_qwen3_5_are_taken_for_one():
    layers = make_target("qwen3_5").get_decoder().layers
    assert is_gated_delta_net(layers[0].linear_attn)
    assert not is_gated_delta_net(layers[2].self_attn) and not is_gated_delta_net(layers[0].mlp)


def storage(weight):
    return weight.untyped_storage().data_ptr()


def test_joined_projections_keep_their_weights_until_fp8_replaces_one_of_them():
    model, untouched = make_target("qwen3_5"), make_target("qwen3_5")
    decoder = model.get_decoder()
    compile_decoder(decoder, backend="eager", delta_rule=delta_rule)
    mixer = decoder.layers[0].linear_attn
    narrow = [mixer.in_proj_b.weight, mixer.in_proj_a.weight]
    assert {storage(weight) for weight in narrow} == {storage(mixer.joined_projections)}
    expected = untouched.state_dict()
    assert {name: torch.equal(value, expected[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
        expected, True
    )
    assert quantize_to_fp8(decoder, smallest=16)
    assert not hasattr(mixer, "joined_projections")
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in narrow)
    batch = make_batch(2, 9)
    target = FrozenTarget(model, IDS)
    plain = FrozenTarget(untouched, IDS)
    quantize_to_fp8(plain.decoder, smallest=16)
    torch.testing.assert_close(
        target(*batch).context_hidden_states, plain(*batch).context_hidden_states, rtol=0, atol=0.05
    )


def move(model, dtype):
    model.to(dtype)


def assign(model, dtype):
    weights = make_target("qwen3_5").to(dtype).state_dict()
    model.load_state_dict({name: weight * 0.5 for name, weight in weights.items()}, assign=True)
    model.requires_grad_(False)


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize("change", [move, assign])
def test_joined_projections_follow_a_model_that_is_moved_or_gets_other_weights(change, used_before):
    """`.to(device)` is `.to(dtype)` in this: each weight is copied by itself, and what they were views of stays behind."""
    model, untouched = make_target("qwen3_5"), make_target("qwen3_5")
    batch = make_batch(2, 9)
    target = FrozenTarget(model, IDS)
    compile_decoder(target.decoder, backend="eager", delta_rule=delta_rule)
    if used_before:
        target(*batch)
    for one in (model, untouched):
        change(one, torch.float64)
    moved = FrozenTarget(model, IDS)
    moved.compile_layers(backend="eager")
    result, expected = (t(*batch).context_hidden_states for t in (moved, FrozenTarget(untouched, IDS)))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    for layer in model.get_decoder().layers:
        if not is_gated_delta_net(getattr(layer, "linear_attn", None)):
            continue
        mixer = layer.linear_attn
        weights = [getattr(mixer, name).weight for name in ("in_proj_qkv", "in_proj_b", "in_proj_a")]
        assert mixer.joined_projections.dtype == torch.float64
        assert torch.equal(torch.cat(weights), mixer.joined_projections)
        # Held once.
        assert {storage(weight) for weight in weights} == {storage(mixer.joined_projections)}
    assert model.state_dict().keys() == untouched.state_dict().keys()


def test_a_copy_joins_its_own_projections_and_projections_of_two_precisions_stay_apart():
    mixer = make_target("qwen3_5").get_decoder().layers[0].linear_attn
    join_projections(mixer)
    copied = copy.deepcopy(mixer)
    copied.in_proj_b.weight.data.zero_()
    assert mixer.in_proj_b.weight.abs().min() > 0 and storage(copied.in_proj_a.weight) != storage(
        mixer.in_proj_a.weight
    )
    separate_projections(mixer)
    mixer.in_proj_b.double()
    join_projections(mixer)
    assert not hasattr(mixer, "joined_projections") and mixer.in_proj_b.weight.dtype == torch.float64


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_causal_convolution_is_torchs_that_looks_back_only(with_bias):
    states, weight = torch.randn(2, 11, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64) if with_bias else None
    out = causal_convolution(states, weight, bias)
    expected = torch.nn.functional.conv1d(states.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)
    torch.testing.assert_close(out, expected[..., :11].transpose(1, 2), rtol=0, atol=1e-12)
    assert causal_convolution(states.bfloat16(), weight.bfloat16(), None).dtype == torch.float32
