# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import brute_force
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafters import MASK_TOKEN_ID, make_drafter, make_rows, run_drafter
from tiny_models import HIDDEN_SIZE, make_target

from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter.losses import compute_dflash_loss, position_weights
from hf_dflash.target.language_head import LanguageHead
from hf_dflash.training.block_batch import PackedDocuments, draw_blocks, lay_out_blocks


MASKS = st.lists(
    st.lists(st.tuples(st.sampled_from("01"), st.integers(1, 6)), min_size=1, max_size=5).map(
        lambda runs: "".join(bit * count for bit, count in runs)
    ),
    min_size=0,
    max_size=4,
)


def draw(rows, packed, block_size=4, **options):
    values = {"num_anchors": 5, "anchor_ratio": 0.5, "seed": 3, "epoch": 1, **options}
    return draw_blocks(collate_rows(rows), block_size=block_size, mask_token_id=MASK_TOKEN_ID, packed=packed, **values)


def expected_blocks(rows, block_size, num_anchors=5, ratio=0.5, seed=3, epoch=1):
    """`(document, anchor in the document, supervised slots)` of every block, in order."""
    return [
        (d, anchor, brute_force.supervised_slots(row["loss_mask"], anchor, block_size))
        for d, row in enumerate(rows)
        for anchor in brute_force.select_anchors(row["loss_mask"], num_anchors, ratio, seed, epoch, row["row_id"])
    ]


@settings(max_examples=80, deadline=None)
@given(MASKS, st.booleans(), st.integers(2, 6))
def test_every_field_equals_a_loop_over_documents_and_blocks(masks, packed, block_size):
    rows = make_rows(masks, first_row_id=1000)
    batch = draw(rows, packed, block_size)
    starts = [sum(len(mask) for mask in masks[:d]) for d in range(len(masks))]
    tokens = [token for row in rows for token in row["input_ids"]]
    blocks = expected_blocks(rows, block_size)
    num_rows, context_length = batch.context_index.shape
    assert num_rows == (1 if packed or not rows else len(rows))

    # The context: every token once, in its row, with its document and position; the rest is padding.
    context = [(int(d), int(i), int(p)) for d, i, p in zip(*flat_context(batch), strict=True) if d >= 0]
    assert context == [(d, starts[d] + j, j) for d in range(len(rows)) for j in range(len(masks[d]))]
    if not packed and rows:
        for d, mask in enumerate(masks):
            assert batch.document_ids[d].tolist() == [d] * len(mask) + [-1] * (context_length - len(mask))

    # The blocks.
    assert batch.slot_ids.shape == (num_rows, batch.anchors.shape[1] * block_size)
    valid = batch.valid.flatten()
    assert int(valid.sum()) == len(blocks) and len(valid) >= 1
    slot_ids = batch.slot_ids.view(-1, block_size)
    slot_positions = batch.position_ids[:, context_length:].reshape(-1, block_size)
    row_of_block = torch.arange(num_rows).repeat_interleave(batch.anchors.shape[1])
    needed = set()
    for n, (d, anchor, slots) in zip(valid.nonzero().flatten().tolist(), blocks, strict=True):
        row = int(row_of_block[n])
        assert row == (0 if packed else d)
        assert int(batch.context_index[row, batch.anchors.flatten()[n]]) == starts[d] + anchor
        assert int(batch.anchor_positions[n]) == starts[d] + anchor
        assert slot_ids[n].tolist() == [rows[d]["input_ids"][anchor]] + [MASK_TOKEN_ID] * (block_size - 1)
        assert slot_positions[n].tolist() == list(range(anchor, anchor + block_size))
        assert batch.supervised[n].tolist() == slots
        for k, supervised in enumerate(slots, start=1):
            if supervised:
                predicted_from = starts[d] + anchor + k - 1
                needed.add(predicted_from)
                assert int(batch.label_positions[batch.label_index[n, k - 1]]) == predicted_from
                assert int(batch.data_labels[n, k - 1]) == tokens[predicted_from + 1]
    assert not batch.supervised[~valid].any()
    assert (slot_ids[~valid] == MASK_TOKEN_ID).all()
    assert batch.slot_indices.tolist() == batch.supervised.flatten().nonzero().flatten().tolist()

    # Each label is asked once, however many blocks cover it.
    assert batch.label_positions.tolist() == sorted(needed)
    assert batch.num_tokens == len(tokens)


def flat_context(batch):
    context_length = batch.context_index.shape[1]
    return (
        batch.document_ids.flatten(),
        batch.context_index.flatten(),
        batch.position_ids[:, :context_length].flatten(),
    )


@settings(max_examples=40, deadline=None)
@given(MASKS, st.booleans())
def test_denominator_is_the_sum_of_weights_of_supervised_slots(masks, packed):
    rows = make_rows(masks, first_row_id=1000)
    batch = draw(rows, packed)
    weights = position_weights(4, 4.0, dtype=torch.float64).tolist()
    slots = [slots for _, _, slots in expected_blocks(rows, 4)]
    expected = sum(w for block in slots for w, supervised in zip(weights, block, strict=True) if supervised)
    assert batch.denominator("decay", 4.0) == pytest.approx(expected, rel=1e-12)
    assert batch.denominator("dpace", 4.0) == sum(map(sum, slots))


@settings(max_examples=40, deadline=None)
@given(MASKS.filter(len), st.booleans())
def test_blocks_of_a_document_do_not_depend_on_the_rest_of_the_micro_batch(masks, packed):
    rows = make_rows(masks, first_row_id=1000)

    def blocks_by_row(rows):
        batch = draw(rows, packed)
        found = {row["row_id"]: [] for row in rows}
        starts = torch.tensor([len(row["input_ids"]) for row in rows]).cumsum(0)
        for n in batch.valid.flatten().nonzero().flatten().tolist():
            position = int(batch.anchor_positions[n])
            d = int((starts <= position).sum())
            start = int(starts[d]) - len(rows[d]["input_ids"])
            found[rows[d]["row_id"]].append(
                (position - start, batch.supervised[n].tolist(), batch.data_labels[n].tolist())
            )
        return found

    together = blocks_by_row(rows)
    assert blocks_by_row(rows[::-1]) == together
    for row in rows:
        assert blocks_by_row([row]) == {row["row_id"]: together[row["row_id"]]}


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_without_rows_is_one_padding_block_with_nothing_to_learn(packed):
    batch = draw([], packed)
    assert not batch.valid.any() and not batch.supervised.any() and len(batch.label_positions) == 0
    assert batch.denominator("decay", 4.0) == batch.denominator("dpace", 4.0) == 0.0
    assert batch.context_index.shape == ((1, 128) if packed else (1, 1))
    assert batch.num_tokens == 0


def test_widths_of_the_packed_layout_are_few():
    shapes = set()
    for count in range(1, 300, 7):
        batch = draw(make_rows(["1" * count]), packed=True, num_anchors=512, anchor_ratio=None)
        assert batch.context_index.shape[1] % 128 == 0 and batch.anchors.shape[1] % 16 == 0
        shapes.add((batch.context_index.shape, batch.anchors.shape))
    assert len(shapes) <= 20


def test_given_label_positions_are_used_and_every_anchor_is_offered():
    rows = collate_rows(make_rows(["00111", "1101100"]))
    documents = PackedDocuments.from_rows(rows)
    assert documents.all_anchors().tolist() == [2, 3, 5, 8]
    # The prompt's last token predicts the first reply token; nothing predicts the first token of a document.
    assert documents.label_positions().tolist() == [1, 2, 3, 5, 7, 8]
    batch = lay_out_blocks(
        rows,
        documents,
        torch.tensor([3, 8]),
        block_size=3,
        mask_token_id=MASK_TOKEN_ID,
        packed=True,
        label_positions=documents.label_positions(),
    )
    assert batch.label_positions.tolist() == [1, 2, 3, 5, 7, 8]
    assert batch.supervised[:2].tolist() == [[True, False], [True, False]]
    assert batch.label_index[:2, 0].tolist() == [2, 5]


def test_moving_a_batch_leaves_what_the_target_takes_on_the_host():
    batch = draw(make_rows(["0111"]), packed=False).to(torch.device("meta"))
    assert {batch.input_ids.device.type, batch.lengths.device.type, batch.label_positions.device.type} == {"cpu"}
    assert batch.context_index.device.type == batch.slot_indices.device.type == "meta"


@settings(max_examples=8, deadline=None)
@given(MASKS.filter(lambda masks: "11" in " ".join(masks)), st.sampled_from([None, 5]), st.sampled_from([False, None]))
def test_loss_of_a_micro_batch_equals_a_loop_over_blocks_decoded_one_at_a_time(masks, window, is_causal):
    """The whole chain in float64: layout, masks, drafter, supervision, labels, weights, denominator."""
    target = make_target("qwen3", torch.float64)
    kind = {"sliding_window": window} if window else {}
    drafter = make_drafter(target, torch.float64, is_causal=is_causal, **kind)
    embedding, head = target.get_input_embeddings(), LanguageHead.from_model(target)
    rows = make_rows(masks)
    features = torch.randn(sum(map(len, masks)), 2 * HIDDEN_SIZE, dtype=torch.float64)

    losses = []
    for packed in (False, True):
        batch = draw(rows, packed)
        with torch.no_grad():
            states = run_drafter(drafter, embedding, batch, features)
            loss, correct = compute_dflash_loss(states[:, 1:], head, batch.data_labels, batch.supervised)
        losses.append((float(loss), int(correct.sum())))

    numerator = denominator = right = 0
    starts = [sum(len(mask) for mask in masks[:d]) for d in range(len(masks))]
    for d, anchor, slots in expected_blocks(rows, 4):
        tokens = rows[d]["input_ids"]
        with torch.no_grad():
            states = drafter(
                embedding(torch.tensor([[tokens[anchor]] + [MASK_TOKEN_ID] * 3])),
                features[None, starts[d] : starts[d] + anchor],
                torch.arange(anchor + 4)[None],
            ).last_hidden_state[0]
            log_probabilities = head.logits(states).log_softmax(-1)
        for k, supervised in enumerate(slots, start=1):
            if supervised:
                weight = float(torch.exp(torch.tensor(-(k - 1) / 4.0, dtype=torch.float64)))
                numerator -= weight * float(log_probabilities[k, tokens[anchor + k]])
                denominator += weight
                right += int(log_probabilities[k].argmax()) == tokens[anchor + k]
    expected = numerator / denominator if denominator else 0.0
    for loss, correct in losses:
        assert loss == pytest.approx(expected, abs=1e-10)
        assert correct == right


def test_drawing_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        draw(make_rows(["0111", "011111"]), packed=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
