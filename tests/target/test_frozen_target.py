# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from tiny_models import HIDDEN_SIZE, KINDS, VOCAB_SIZE, make_target
from transformers import AutoModelForCausalLM, masking_utils

from hf_dflash.target import frozen_target
from hf_dflash.target.frozen_target import FrozenTarget


pytestmark = pytest.mark.compat

IDS = [0, 2, 4]
LENGTHS = [13, 9, 9, 1, 6]


def make_batch(lengths=LENGTHS):
    """Right-padded, with anything in the padding."""
    return torch.randint(6, VOCAB_SIZE, (len(lengths), max(lengths))), torch.tensor(lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_transformers_one_document_at_a_time(kind, dtype, tolerance):
    model = make_target(kind, dtype)
    target = FrozenTarget(model, IDS)
    input_ids, lengths = make_batch()
    total = int(lengths.sum())
    positions = torch.tensor([0, 3, 12, 13, 21, 22, 31, 32, total - 1])
    features = target(input_ids, lengths, positions, return_label_hidden_states=True)

    contexts, finals, tokens = [], [], []
    for row, length in zip(input_ids, LENGTHS, strict=True):
        with torch.no_grad():
            output = model(row[None, :length], output_hidden_states=True, use_cache=False)
        contexts.append(torch.cat([output.hidden_states[i + 1][0] for i in IDS], dim=-1))
        finals.append(output.hidden_states[-1][0])
        tokens.append(output.logits[0].argmax(-1))
    assert features.context_hidden_states.shape == (total, len(IDS) * HIDDEN_SIZE)
    tolerance *= float(features.context_hidden_states.abs().max())
    torch.testing.assert_close(features.context_hidden_states, torch.cat(contexts), rtol=0, atol=tolerance)
    torch.testing.assert_close(features.label_hidden_states, torch.cat(finals)[positions], rtol=0, atol=tolerance)
    assert torch.equal(features.label_ids, torch.cat(tokens)[positions])
    assert not features.context_hidden_states.requires_grad


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_what_stands_in_the_padding_does_not_matter(kind):
    target = FrozenTarget(make_target(kind, torch.float64), IDS)
    input_ids, lengths = make_batch()
    other = input_ids.clone()
    for row, length in zip(other, LENGTHS, strict=True):
        row[length:] = 0
    one, two = (target(ids, lengths).context_hidden_states for ids in (input_ids, other))
    assert torch.equal(one, two)


def test_labels_and_their_hidden_states_come_on_demand_only(tiny_qwen3):
    target = FrozenTarget(tiny_qwen3, IDS)
    input_ids, lengths = make_batch()
    features = target(input_ids, lengths)
    assert features.label_ids is None and features.label_hidden_states is None
    features = target(input_ids, lengths, torch.tensor([4, 2]))
    assert features.label_ids.shape == (2,) and features.label_hidden_states is None


def test_layers_behind_the_last_captured_one_run_for_labels_only(tiny_qwen3):
    target = FrozenTarget(tiny_qwen3, [0, 2])
    ran = []
    handle = tiny_qwen3.get_decoder().layers[3].register_forward_hook(lambda *args: ran.append(args))
    batch = make_batch()
    features = target(*batch)
    assert not ran
    again = target(*batch, torch.tensor([1]))
    handle.remove()
    assert len(ran) == 1
    assert torch.equal(features.context_hidden_states, again.context_hidden_states)


def test_the_head_runs_at_the_asked_positions_only_and_once_for_each(tiny_qwen3, monkeypatch):
    target = FrozenTarget(tiny_qwen3, IDS)
    input_ids, lengths = make_batch()
    rows = []
    original = target._own_head.predict
    monkeypatch.setattr(
        type(target._own_head), "predict", lambda self, states: rows.append(len(states)) or original(states)
    )
    full_head = []
    handle = tiny_qwen3.get_output_embeddings().register_forward_hook(lambda *args: full_head.append(args))
    target(input_ids, lengths, torch.tensor([1, 2, 30]))
    handle.remove()
    assert rows == [3] and not full_head


def test_a_batch_without_rows_gives_empty_features_without_a_forward(tiny_qwen3):
    target = FrozenTarget(tiny_qwen3, IDS, output_dtype=torch.bfloat16)
    input_ids = torch.zeros(0, 0, dtype=torch.long)
    lengths = nothing = torch.zeros(0, dtype=torch.long)
    features = target(input_ids, lengths, nothing, return_label_hidden_states=True)
    assert features.context_hidden_states.shape == (0, len(IDS) * HIDDEN_SIZE)
    assert features.context_hidden_states.dtype == features.label_hidden_states.dtype == torch.bfloat16
    assert features.label_ids.shape == (0,) and features.label_ids.dtype == torch.int64
    assert target(input_ids, lengths).label_ids is None
    # No label is asked of a batch that has rows.
    features = target(*make_batch(), nothing, return_label_hidden_states=True)
    assert features.label_ids.shape == (0,) and features.label_hidden_states.shape == (0, HIDDEN_SIZE)


def test_features_and_embeddings_come_in_the_drafters_dtype_and_labels_in_the_targets_precision():
    model = make_target("qwen3", torch.float64)
    input_ids, lengths = make_batch()
    positions = torch.arange(int(lengths.sum()))
    exact = FrozenTarget(model, IDS)(input_ids, lengths, positions)
    target = FrozenTarget(model, IDS, output_dtype=torch.bfloat16)
    features = target(input_ids, lengths, positions)
    assert torch.equal(features.context_hidden_states, exact.context_hidden_states.bfloat16())
    assert torch.equal(features.label_ids, exact.label_ids)
    assert torch.equal(target.embed(input_ids), model.get_input_embeddings()(input_ids).bfloat16())
    target.serve("cpu", torch.float32)
    assert target(input_ids, lengths).context_hidden_states.dtype == torch.float32


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_the_drafters_autocast_does_not_reach_the_target(kind):
    target = FrozenTarget(make_target(kind), IDS)
    batch = make_batch()
    positions = torch.arange(int(batch[1].sum()))
    plain = target(*batch, positions, return_label_hidden_states=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = target(*batch, positions, return_label_hidden_states=True)
    assert torch.equal(inside.context_hidden_states, plain.context_hidden_states)
    assert torch.equal(inside.label_hidden_states, plain.label_hidden_states)
    assert torch.equal(inside.label_ids, plain.label_ids)


def test_a_norm_inside_the_embedding_is_passed_over_as_transformers_dflash_does():
    class NormedEmbedding(torch.nn.Embedding):
        def __init__(self):
            super().__init__(VOCAB_SIZE, HIDDEN_SIZE)
            self.embed_norm = torch.nn.LayerNorm(HIDDEN_SIZE)

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    model = make_target("qwen3")
    embedding = NormedEmbedding()
    model.set_input_embeddings(embedding)
    target = FrozenTarget(model, IDS)
    ids = torch.tensor([[7, 8]])
    assert torch.equal(target.embed(ids), embedding.weight[ids])
    assert isinstance(embedding.embed_norm, torch.nn.LayerNorm), "it is back"


def test_the_target_is_frozen_and_in_evaluation_mode_and_bit_equal_after_use():
    model = make_target("qwen3_5").train().requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = FrozenTarget(model, IDS)
    target(*make_batch(), torch.tensor([3]))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
    assert not isinstance(target, torch.nn.Module)


def test_a_target_loads_by_name_in_its_own_dtype(tmp_path):
    make_target("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    target = FrozenTarget(str(tmp_path), IDS, device="cpu")
    assert target.model.dtype == torch.bfloat16 and target.output_dtype == torch.bfloat16
    batch = make_batch()
    expected = FrozenTarget(AutoModelForCausalLM.from_pretrained(tmp_path), IDS)(*batch)
    assert torch.equal(target(*batch).context_hidden_states, expected.context_hidden_states)
    assert FrozenTarget(str(tmp_path), IDS, dtype=torch.float32).model.dtype == torch.float32


@pytest.mark.parametrize("ids", [[0, 5], [2, 2], [3, 1], [-2, 1]])
def test_unusable_layer_ids_are_refused(tiny_qwen3, ids):
    with pytest.raises(ValueError, match="target_layer_ids"):
        FrozenTarget(tiny_qwen3, ids)


def test_transformers_looks_for_packed_documents_in_other_calls_only(monkeypatch):
    """It makes the host wait for the device, in each forward pass."""
    model = make_target("qwen3_sliding")
    target, asked = FrozenTarget(model, [1]), []
    frozen_target._ask_this_thread_first.cache_clear()
    look = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(
        masking_utils, "find_packed_sequence_indices", lambda position_ids: asked.append(1) or look(position_ids)
    )
    input_ids = torch.randint(6, VOCAB_SIZE, (2, 12))
    target(input_ids, torch.tensor([12, 5]))
    assert not asked
    model(input_ids, use_cache=False)
    assert asked
    frozen_target._ask_this_thread_first.cache_clear()
