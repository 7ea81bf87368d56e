# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import subprocess
import sys
from functools import partial

import pytest
import torch
from tiny_drafters import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYER_IDS, make_drafter, make_rows, run_drafter
from tiny_models import HIDDEN_SIZE, make_target
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModel, DynamicCache
from transformers.cache_utils import DFlashCache

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter import modeling_dflash
from hf_dflash.drafter.blocks import create_flex_mask
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, compute_rotary_embedding
from hf_dflash.training.block_batch import PackedDocuments, lay_out_blocks


pytestmark = pytest.mark.compat

FULL = {"layer_types": ["full_attention"] * 2}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
KINDS = [
    pytest.param({**layers, "is_causal": is_causal}, id=f"{name}-causal-{is_causal}")
    for name, layers, is_causal in (
        ("full", FULL, False),
        ("full", FULL, True),
        ("sliding", SLIDING, False),
        ("sliding", SLIDING, None),
        ("mixed", MIXED, None),
    )
]
WIDTH = len(TARGET_LAYER_IDS) * HIDDEN_SIZE


def lay_out(rows, anchors, packed=False, block_size=BLOCK_SIZE):
    """Blocks at packed positions."""
    rows = collate_rows(rows)
    documents = PackedDocuments.from_rows(rows)
    return lay_out_blocks(
        rows,
        documents,
        torch.tensor(anchors, dtype=torch.long),
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        packed=packed,
    )


def random_features(length, dtype=torch.float32, seed=1):
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decode_block(drafter, embedding, token_id, context, first_position, **options):
    """One block behind new context: what decoding runs. Returns the hidden states `[B, H]` of its slots."""
    slots = torch.tensor([[token_id] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    positions = torch.arange(first_position, first_position + len(context) + BLOCK_SIZE)[None]
    return drafter(embedding(slots), context[None], positions, **options).last_hidden_state[0]


# ---- Training and decoding ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_block_in_training_equals_decoding_without_a_cache_at_its_anchor(kind, dtype, tolerance):
    target = make_target("qwen3", dtype)
    drafter, embedding = make_drafter(target, dtype, **kind), target.get_input_embeddings()
    (row,) = rows = make_rows(["0" * 3 + "1" * 20])
    anchors = [3, 4, 6, 13, 20]
    features = random_features(23, dtype)
    trained = run_drafter(drafter, embedding, lay_out(rows, anchors), features)
    for block, anchor in zip(trained, anchors, strict=True):
        decoded = decode_block(drafter, embedding, row["input_ids"][anchor], features[:anchor], 0)
        torch.testing.assert_close(block, decoded, rtol=0, atol=tolerance)


def make_cache(kind: str, config):
    if kind == "plain":
        return DynamicCache()
    cache = DynamicCache(config=config) if kind == "dynamic" else DFlashCache(config=config)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("cache_kind", ["plain", "dynamic", "dflash"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_block_in_training_equals_cached_decoding_that_crops_its_slots(kind, cache_kind):
    target = make_target("qwen3", torch.float64)
    drafter, embedding = make_drafter(target, torch.float64, **kind), target.get_input_embeddings()
    (row,) = rows = make_rows(["0" * 3 + "1" * 30])
    anchors = [3, 4, 8, 9, 11, 24, 25]
    features = random_features(33, torch.float64)
    trained = run_drafter(drafter, embedding, lay_out(rows, anchors), features)
    cache = make_cache(cache_kind, drafter.config)
    cached = 0
    for block, anchor in zip(trained, anchors, strict=True):
        options = {"past_key_values": cache}
        if anchor % 2:  # the newer spelling, and a mask that says nothing new
            options = {"cache": cache, "attention_mask": torch.ones(1, anchor + BLOCK_SIZE, dtype=torch.long)}
        decoded = decode_block(
            drafter, embedding, row["input_ids"][anchor], features[cached:anchor], cached, **options
        )
        torch.testing.assert_close(block, decoded, rtol=0, atol=1e-11)
        cache.crop(-BLOCK_SIZE)
        cached = anchor
        assert cache.get_seq_length() == anchor


@pytest.mark.parametrize("cache_kind", ["plain", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_left_padded_rows_decode_as_each_alone(kind, cache_kind):
    target = make_target("qwen3", torch.float64)
    drafter, embedding = make_drafter(target, torch.float64, **kind), target.get_input_embeddings()
    rows = make_rows(["0" * 3 + "1" * 30, "0" * 8 + "1" * 30, "1" * 28])
    steps = [0, 2, 6, 17]
    first_anchors = [3, 8, 1]
    features = [random_features(row["length"], torch.float64, seed=i) for i, row in enumerate(rows)]
    width = max(first_anchors)
    cache = make_cache(cache_kind, drafter.config)
    cached = None
    for step in steps:
        anchors = [first + step for first in first_anchors]
        if cached is None:
            context = torch.full((len(rows), width, WIDTH), 7.0, dtype=torch.float64)
            positions = torch.ones(len(rows), width, dtype=torch.long)
            for i, anchor in enumerate(anchors):
                context[i, width - anchor :] = features[i][:anchor]
                positions[i, width - anchor :] = torch.arange(anchor)
        else:
            context = torch.stack([features[i][c:a] for i, (c, a) in enumerate(zip(cached, anchors, strict=True))])
            positions = torch.stack([torch.arange(c, a) for c, a in zip(cached, anchors, strict=True)])
        slot_ids = torch.full((len(rows), BLOCK_SIZE), MASK_TOKEN_ID)
        slot_ids[:, 0] = torch.tensor([row["input_ids"][a] for row, a in zip(rows, anchors, strict=True)])
        slot_positions = torch.tensor(anchors)[:, None] + torch.arange(BLOCK_SIZE)
        mask = torch.ones(len(rows), width + step + BLOCK_SIZE, dtype=torch.long)
        for i, first in enumerate(first_anchors):
            mask[i, : width - first] = 0
        decoded = drafter(
            embedding(slot_ids),
            context,
            torch.cat([positions, slot_positions], dim=1),
            attention_mask=mask,
            past_key_values=cache,
        ).last_hidden_state
        cache.crop(-BLOCK_SIZE)
        cached = anchors
        for i, anchor in enumerate(anchors):
            alone = decode_block(drafter, embedding, rows[i]["input_ids"][anchor], features[i][:anchor], 0)
            torch.testing.assert_close(decoded[i], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_in_the_middle_of_the_keys_does_not_shift_the_window(kind):
    """As in batched decoding, where rows accept different numbers of drafts."""
    target = make_target("qwen3", torch.float64)
    drafter, embedding = make_drafter(target, torch.float64, **kind), target.get_input_embeddings()
    features = random_features(11, torch.float64)
    expected = decode_block(drafter, embedding, 9, features, 0)
    real = torch.tensor([1] * 7 + [0] * 3 + [1] * 4 + [1] * BLOCK_SIZE)
    context = torch.full((14, WIDTH), 7.0, dtype=torch.float64)
    context[real[:14].bool()] = features
    slots = torch.tensor([[9] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])
    positions = (real.cumsum(0) - 1)[None]
    output = drafter(embedding(slots), context[None], positions, attention_mask=real[None]).last_hidden_state[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


# ---- Layouts ----


DOCUMENTS = ["0" * 4 + "1" * 9, "1" * 6, "00111000111100", "011"]
# Packed positions: two, none, four and one block a document, so that rows have padding blocks.
ANCHORS = [4, 7, 21, 22, 27, 28, 34]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_flex_attention_packed_rows_and_documents_alone_give_the_same_hidden_states(kind):
    target = make_target("qwen3", torch.float64)
    drafter, embedding = make_drafter(target, torch.float64, **kind), target.get_input_embeddings()
    rows = make_rows(DOCUMENTS)
    features = random_features(sum(map(len, DOCUMENTS)), torch.float64)

    def by_anchor(batch, features, flex=False, first=0):
        states = run_drafter(drafter, embedding, batch, features, flex=flex)
        assert torch.isfinite(states).all()
        valid = batch.valid.flatten()
        return {first + int(a): s for a, s in zip(batch.anchor_positions[valid], states[valid], strict=True)}

    packed, by_row = lay_out(rows, ANCHORS, packed=True), lay_out(rows, ANCHORS)
    assert packed.anchors.shape == (1, 16) and by_row.anchors.shape == (4, 4)
    expected = by_anchor(packed, features)
    results = [
        by_anchor(packed, features, flex=True),
        by_anchor(by_row, features),
        by_anchor(by_row, features, flex=True),
    ]
    alone, start = {}, 0
    for row, document in zip(rows, DOCUMENTS, strict=True):
        end = start + len(document)
        own = [a - start for a in ANCHORS if start <= a < end]
        alone |= by_anchor(lay_out([row], own), features[start:end], first=start)
        start = end
    for result in (*results, alone):
        assert list(result) == ANCHORS
        for anchor in ANCHORS:
            torch.testing.assert_close(result[anchor], expected[anchor], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_padding_blocks_and_padded_context_give_finite_values_and_gradients_and_change_nothing(kind, packed):
    target = make_target("qwen3", torch.float64)
    embedding = target.get_input_embeddings()
    rows = make_rows(DOCUMENTS)
    features = random_features(sum(map(len, DOCUMENTS)), torch.float64)

    def gradients(rows, anchors, features):
        drafter = make_drafter(target, torch.float64, **kind)
        batch = lay_out(rows, anchors, packed=packed)
        states = run_drafter(drafter, embedding, batch, features)
        states[batch.valid.flatten()].square().sum().backward()
        return torch.cat([p.grad.flatten() for p in drafter.parameters()])

    together = gradients(rows, ANCHORS, features)
    assert torch.isfinite(together).all()
    # Document 1 has no block: without it, a row and its padding blocks fewer.
    start, end = len(DOCUMENTS[0]), len(DOCUMENTS[0]) + len(DOCUMENTS[1])
    without = gradients(
        [rows[0], *rows[2:]],
        [a if a < start else a - (end - start) for a in ANCHORS],
        torch.cat([features[:start], features[end:]]),
    )
    torch.testing.assert_close(together, without, rtol=0, atol=1e-10 * float(together.abs().max()))


# ---- No leak ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradient_of_a_block_by_features_at_or_after_its_anchor_is_exactly_zero(kind, packed):
    target = make_target("qwen3")
    drafter, embedding = make_drafter(target, **kind), target.get_input_embeddings()
    rows = make_rows(["0" * 2 + "1" * 10, "0" * 3 + "1" * 8])
    anchors = [2, 3, 5, 9, 15, 17, 20]
    batch = lay_out(rows, anchors, packed=packed)
    features = random_features(23).requires_grad_()
    states = run_drafter(drafter, embedding, batch, features)[batch.valid.flatten()]
    for block, anchor in zip(states, anchors, strict=True):
        (gradient,) = torch.autograd.grad(block.sum(), features, retain_graph=True)
        first = 0 if anchor < 12 else 12
        window = min((drafter.config.sliding_window or 99) if "full_attention" not in kind["layer_types"] else 99, 99)
        seen = gradient.abs().sum(-1) > 0
        expected = [first <= j < anchor and anchor - j < window for j in range(23)]
        assert seen.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_block_does_not_change_with_later_tokens_or_features_or_further_anchors(kind):
    target = make_target("qwen3", torch.float64)
    drafter, embedding = make_drafter(target, torch.float64, **kind), target.get_input_embeddings()
    (row,) = make_rows(["0" * 2 + "1" * 18])
    features = random_features(20, torch.float64)
    anchors = [4, 5, 7, 12]
    states = run_drafter(drafter, embedding, lay_out([row], anchors), features)
    more = sorted({*range(2, 19)})
    with_more = run_drafter(drafter, embedding, lay_out([row], more), features)
    for i, anchor in enumerate(anchors):
        torch.testing.assert_close(with_more[more.index(anchor)], states[i], rtol=0, atol=1e-12)
        changed = {**row, "input_ids": [t if j <= anchor else 90 for j, t in enumerate(row["input_ids"])]}
        later = features.clone()
        later[anchor:] = 1e6
        assert torch.equal(run_drafter(drafter, embedding, lay_out([changed], anchors), later)[i], states[i])


# ---- Saving and loading ----


def test_saved_model_loads_by_auto_classes_bit_equal_without_a_flag(tmp_path):
    drafter = make_drafter(make_target("qwen3_5"), is_causal=None, **MIXED)
    drafter.save_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is DFlashForSpeculation
    assert not any(info.values()), info
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(drafter.config)
    for name, value in drafter.config.to_dict().items():
        if name not in ("_name_or_path", "dtype", "architectures", "auto_map", "transformers_version"):
            assert getattr(loaded.config, name) == value, name
    weights = loaded.state_dict()
    assert list(weights) == list(drafter.state_dict())
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())


def test_weight_names_are_those_of_published_drafters_and_nothing_else_is_stored():
    drafter = make_drafter(make_target("qwen3"), num_hidden_layers=1)
    layer = [
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"self_attn.{p}_norm" for p in "qk"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    ]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.0.{name}.weight" for name in layer)}
    assert set(drafter.state_dict()) == expected
    assert not list(drafter.buffers())


# Neither this checkout nor an installed package: an entry of None makes the import fail.
WITHOUT_THE_PACKAGE = r"""
import sys
sys.modules["hf_dflash"] = None
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModel
folder = sys.argv[1]
for load in (AutoConfig.from_pretrained, AutoModel.from_pretrained):
    try:
        load(folder)
    except ValueError as error:
        print("\nRESULT", "trust_remote_code" in str(error))
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
print("RESULT", type(model).__name__, type(model).__module__.startswith("transformers_modules"))
inputs = torch.load(f"{folder}/inputs.pt")
with torch.no_grad():
    torch.save((model(*inputs).last_hidden_state, model.state_dict()), f"{folder}/outputs.pt")
model.save_pretrained(f"{folder}/again")
again = AutoModel.from_pretrained(f"{folder}/again", trust_remote_code=True)
print("RESULT", all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)))
"""


def test_without_the_package_remote_code_works_and_its_lack_is_an_error(tmp_path):
    drafter = make_drafter(make_target("qwen3"), **SLIDING).eval()
    drafter.save_pretrained(tmp_path)
    inputs = (torch.randn(1, BLOCK_SIZE, HIDDEN_SIZE), torch.randn(1, 9, WIDTH), torch.arange(9 + BLOCK_SIZE)[None])
    torch.save(inputs, tmp_path / "inputs.pt")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path)],
        cwd=tmp_path,
        env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    results = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [["True"], ["True"], ["DFlashForSpeculation", "True"], ["True"]]
    output, weights = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        torch.testing.assert_close(output, drafter(*inputs).last_hidden_state, rtol=0, atol=1e-5)
    assert all(torch.equal(weights.pop(name), tensor) for name, tensor in drafter.state_dict().items())
    assert not weights


def test_a_model_in_bfloat16_rotates_as_precisely_at_position_30000():
    target = make_target("qwen3")
    drafter = make_drafter(target).to(torch.bfloat16)
    positions = torch.tensor([[0, 1, 30000]])
    cos, sin = compute_rotary_embedding(positions, 8, 10000.0, torch.float32)
    exact = 30000 * 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(cos[0, 0, 2, :4].double(), exact.cos(), rtol=0, atol=5e-3)
    torch.testing.assert_close(sin[0, 0, 2, :4].double(), exact.sin(), rtol=0, atol=5e-3)
    rounded, _ = compute_rotary_embedding(positions, 8, 10000.0, torch.bfloat16)
    assert torch.equal(rounded, cos.to(torch.bfloat16))

    # Only position differences matter: a shift by 30000 moves the output by rounding alone.
    slots, context = torch.randn(1, BLOCK_SIZE, HIDDEN_SIZE), torch.randn(1, 9, WIDTH)
    near = torch.arange(9 + BLOCK_SIZE)[None]
    with torch.no_grad():
        inputs = slots.bfloat16(), context.bfloat16()
        difference = (
            drafter(*inputs, near + 30000).last_hidden_state - drafter(*inputs, near).last_hidden_state
        ).abs()
    assert difference.mean() < 0.02


# ---- Bad input, training options ----


def test_several_blocks_without_masks_and_shapes_that_do_not_fit_are_refused():
    drafter = make_drafter(make_target("qwen3"))
    slots, context = torch.zeros(1, BLOCK_SIZE, HIDDEN_SIZE), torch.zeros(1, 5, WIDTH)
    positions = torch.arange(5 + BLOCK_SIZE)[None]
    with pytest.raises(ValueError, match="mask for each layer type"):
        drafter(slots.repeat(1, 2, 1), context, torch.arange(5 + 2 * BLOCK_SIZE)[None])
    with pytest.raises(ValueError, match="mask for each layer type"):
        drafter(slots.repeat(1, 2, 1), context, torch.arange(13)[None], attention_mask=torch.ones(1, 13))
    with pytest.raises(ValueError, match="position_ids"):
        drafter(slots, context, positions[:, 1:])
    with pytest.raises(ValueError, match="target_layer_ids"):
        drafter(slots, context[..., :HIDDEN_SIZE], positions)
    with pytest.raises(ValueError, match="2-D"):
        drafter(slots, context, positions, attention_mask=torch.zeros(1, 1, BLOCK_SIZE, 5 + BLOCK_SIZE))


def test_a_config_without_target_layers_makes_no_drafter():
    config = make_drafter(make_target("qwen3")).config
    config.target_layer_ids = None
    with pytest.raises(ValueError, match="create_drafter_config"):
        DFlashForSpeculation(config)


def test_gradient_checkpointing_gives_the_same_gradients():
    target = make_target("qwen3")
    embedding = target.get_input_embeddings()
    features = random_features(10)

    def gradients(checkpointing):
        drafter = make_drafter(target, **MIXED).train()
        if checkpointing:
            drafter.gradient_checkpointing_enable()
            assert drafter.gradient_checkpointing
        run_drafter(drafter, embedding, lay_out(make_rows(["1" * 10]), [2, 6]), features).square().sum().backward()
        return [p.grad for p in drafter.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


# ---- Compiled flex attention ----


@torch._dynamo.config.patch(recompile_limit=8)
def test_flex_attention_stays_compiled_whatever_widths_kinds_and_modes_come(monkeypatch):
    """Past dynamo's limit of variants flex attention would go on uncompiled, and hold every score, with a warning only."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    modeling_dflash._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    try:
        flex_attention = modeling_dflash._compiled_flex_attention()

        def run(context_length, num_blocks, kind):
            document_ids = torch.zeros(1, context_length, dtype=torch.long)
            anchors = torch.arange(num_blocks)[None] * 4 + 3
            mask = create_flex_mask(document_ids, anchors, torch.ones_like(anchors, dtype=torch.bool), 8, **kind)
            queries = torch.randn(1, 4, num_blocks * 8, 16)
            keys = torch.randn(1, 2, context_length + num_blocks * 8, 16)
            flex_attention(queries, keys, keys, block_mask=mask, enable_gqa=True)

        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                for context_length, num_blocks in ((128, 16), (256, 16), (256, 32), (640, 48)):
                    run(context_length, num_blocks, {})
                known = counter.frame_count
                for kind in ({}, {"sliding_window": 64}, {"sliding_window": 64, "is_causal": True}):
                    for context_length, num_blocks in ((384, 64), (1024, 32), (2048, 80)):
                        run(context_length, num_blocks, kind)
                assert counter.frame_count == known, "further widths or kinds of layers are compiled anew"
        assert counter.frame_count > 0
    finally:
        modeling_dflash._compiled_flex_attention.cache_clear()
        torch._dynamo.reset()
