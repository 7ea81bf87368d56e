# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import brute_force
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dflash.drafter.blocks import (
    anchor_hash,
    create_anchor_block_mask_mod,
    create_dense_mask,
    find_eligible_anchors,
    find_supervised_slots,
    pad_to_bucket,
    select_anchors,
)


# Masks with gaps and several turns, tokens of one kind in a row more often than not.
LOSS_MASK = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=6).map(
    lambda runs: [int(bit) for bit, count in runs for _ in range(count)]
)
DOCUMENTS = st.lists(LOSS_MASK, min_size=1, max_size=4)
SEED, EPOCH = st.integers(0, 2**32 - 1), st.integers(0, 5)
RATIO = st.sampled_from([None, 0.1, 0.25, 0.5, 1.0, 3.0])

checked = settings(max_examples=60, deadline=None)


def pack(documents, padding=0):
    """`(loss_mask, document_ids, starts)` of documents behind one another."""
    starts = [sum(len(document) for document in documents[:i]) for i in range(len(documents))]
    document_ids = [i for i, document in enumerate(documents) for _ in document] + [-1] * padding
    return torch.tensor(sum(documents, []) + [0] * padding), torch.tensor(document_ids), starts


@st.composite
def mask_layouts(draw):
    """Several rows of equal size: document ids, anchors, which blocks are real, and the kind of layer."""
    block_size = draw(st.integers(2, 5))
    num_rows, num_blocks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = [draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)) for _ in range(num_rows)]
    context_length = max(map(sum, rows)) + draw(st.integers(0, 3))
    document_ids, anchors, valid = [], [], []
    for lengths in rows:
        # Documents are numbered over all rows: a number says nothing about the length of a row.
        number = draw(st.sampled_from([0, 1, 5, 1000]))
        ids = [number + i for i, length in enumerate(lengths) for _ in range(length)]
        document_ids.append(ids + [-1] * (context_length - len(ids)))
        real = draw(st.integers(0, num_blocks))
        drawn = sorted(draw(st.integers(0, len(ids) - 1)) for _ in range(real))
        # Padding blocks wherever they may point, padding positions included.
        anchors.append(drawn + [draw(st.integers(0, context_length - 1)) for _ in range(num_blocks - real)])
        valid.append([True] * real + [False] * (num_blocks - real))
    window = draw(st.one_of(st.none(), st.integers(1, 12)))
    return document_ids, anchors, valid, block_size, window, draw(st.booleans())


@checked
@given(mask_layouts())
def test_mask_equals_a_loop_over_every_query_and_key(layout):
    document_ids, anchors, valid, block_size, window, is_causal = layout
    mask_mod, q_len, kv_len = create_anchor_block_mask_mod(
        torch.tensor(document_ids),
        torch.tensor(anchors),
        torch.tensor(valid),
        block_size,
        sliding_window=window,
        is_causal=is_causal,
    )
    mask = create_dense_mask(mask_mod, len(anchors), q_len, kv_len, torch.device("cpu"), torch.float64)
    expected = [
        brute_force.visible_keys(*row, block_size, window, is_causal)
        for row in zip(document_ids, anchors, valid, strict=True)
    ]
    assert (mask[:, 0] == 0).tolist() == expected
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float64).min}
    # Every slot sees itself, so that no row is fully masked.
    assert (mask[:, 0, :, len(document_ids[0]) :].diagonal(dim1=1, dim2=2) == 0).all()


def test_a_row_that_is_shorter_than_its_documents_number_sees_its_context():
    document_ids, anchors, valid = [[7, 7, -1, -1, -1]], [[1]], [[True]]
    mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*map(torch.tensor, (document_ids, anchors, valid)), 2)
    mask = create_dense_mask(mask_mod, 1, q_len, kv_len, torch.device("cpu"))
    expected = brute_force.visible_keys(document_ids[0], anchors[0], valid[0], 2, None, False)
    assert (mask[0, 0] == 0).tolist() == expected
    assert expected[0][0]


def test_one_row_may_be_given_without_a_batch_dimension():
    document_ids, anchors, valid = torch.zeros(9, dtype=torch.long), torch.tensor([2, 5]), torch.tensor([True, False])
    one = create_anchor_block_mask_mod(document_ids, anchors, valid, 3)
    many = create_anchor_block_mask_mod(document_ids[None], anchors[None], valid[None], 3)
    assert one[1:] == many[1:] == (6, 15)
    masks = [create_dense_mask(*mod, torch.device("cpu")) for mod in ((one[0], 1, 6, 15), (many[0], 1, 6, 15))]
    assert torch.equal(*masks)


def test_window_and_causality_against_a_table_written_by_hand():
    """B = 4, W = 3, anchor 3 in a document of 5 tokens: slot k at position 3 + k sees keys above k."""
    common = (torch.zeros(5, dtype=torch.long), torch.tensor([3]), torch.tensor([True]), 4)
    tables = {
        False: ["01100 1110", "00100 1111", "00000 1111", "00000 0111"],
        True: ["01100 1000", "00100 1100", "00000 1110", "00000 0111"],
    }
    for is_causal, table in tables.items():
        mask_mod, q_len, kv_len = create_anchor_block_mask_mod(*common, sliding_window=3, is_causal=is_causal)
        mask = create_dense_mask(mask_mod, 1, q_len, kv_len, torch.device("cpu"))[0, 0] == 0
        assert mask.int().tolist() == [[int(bit) for bit in row.replace(" ", "")] for row in table]


@checked
@given(LOSS_MASK, SEED, EPOCH, st.integers(0, 2**40))
def test_hash_equals_one_in_unbounded_integers(loss_mask, seed, epoch, key):
    positions = torch.arange(len(loss_mask))
    hashes = anchor_hash(seed, epoch, torch.full_like(positions, key), positions)
    assert hashes.tolist() == [brute_force.anchor_hash(seed, epoch, key, int(p)) for p in positions]


@checked
@given(DOCUMENTS, st.integers(0, 3), st.integers(1, 8), RATIO, SEED, EPOCH, st.data())
def test_anchors_of_packed_documents_equal_those_of_a_loop_over_each_alone(
    documents, padding, num_anchors, ratio, seed, epoch, data
):
    keys = data.draw(
        st.lists(st.integers(0, 10**9), min_size=len(documents), max_size=len(documents), unique=True), label="keys"
    )
    loss_mask, document_ids, starts = pack(documents, padding)
    document_keys = torch.tensor(keys)[document_ids.clamp(min=0)]
    anchors, valid = select_anchors(
        loss_mask,
        num_anchors,
        4,
        document_ids=document_ids,
        document_keys=document_keys,
        anchor_ratio=ratio,
        seed=seed,
        epoch=epoch,
    )
    expected = [
        start + anchor
        for document, start, key in zip(documents, starts, keys, strict=True)
        for anchor in brute_force.select_anchors(document, num_anchors, ratio, seed, epoch, key)
    ]
    assert anchors[valid].tolist() == expected
    if not expected:
        assert anchors.tolist() == [0] and valid.tolist() == [False]
    else:
        assert valid.all()


@checked
@given(DOCUMENTS, st.integers(1, 6), RATIO, st.randoms(use_true_random=False))
def test_anchors_do_not_depend_on_the_company_or_order_or_padding_of_documents(documents, num_anchors, ratio, random):
    def anchors_by_document(order, padding):
        loss_mask, document_ids, starts = pack([documents[i] for i in order], padding)
        keys = torch.tensor([100 + i for i in order])[document_ids.clamp(min=0)]
        anchors, valid = select_anchors(
            loss_mask, num_anchors, 4, document_ids=document_ids, document_keys=keys, anchor_ratio=ratio, seed=3
        )
        found = {i: [] for i in order}
        for anchor in anchors[valid].tolist():
            place = int(document_ids[anchor])
            found[order[place]].append(anchor - starts[place])
        return found

    together = anchors_by_document(list(range(len(documents))), 0)
    shuffled = list(range(len(documents)))
    random.shuffle(shuffled)
    assert anchors_by_document(shuffled, 3) == together
    for i in range(len(documents)):
        assert anchors_by_document([i], 2) == {i: together[i]}


def test_first_token_of_a_reply_can_be_an_anchor_and_its_last_one_cannot():
    loss_mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 1])
    anchors, valid = select_anchors(loss_mask, 512, 16)
    assert anchors.tolist() == [2, 3, 8] and valid.all()
    assert find_eligible_anchors(loss_mask).nonzero().flatten().tolist() == [2, 3, 8]


def test_every_eligible_position_is_drawn_in_some_epoch_and_epochs_differ():
    loss_mask = torch.tensor([0] * 4 + [1] * 12)
    drawn = [select_anchors(loss_mask, 3, 4, epoch=epoch)[0].tolist() for epoch in range(60)]
    assert {anchor for anchors in drawn for anchor in anchors} == set(range(4, 15))
    assert len({tuple(anchors) for anchors in drawn}) > 40


@checked
@given(DOCUMENTS, st.integers(2, 6))
def test_supervision_equals_a_loop_and_stops_at_the_first_gap_and_the_end_of_the_document(documents, block_size):
    loss_mask, document_ids, starts = pack(documents, 2)
    where = [
        (document, start, a) for document, start in zip(documents, starts, strict=True) for a in range(len(document))
    ]
    anchors = torch.tensor([start + a for _, start, a in where])
    valid = torch.arange(len(anchors)) % 3 != 2
    supervised = find_supervised_slots(loss_mask, anchors, valid, block_size, document_ids)
    for row, is_valid, (document, _, a) in zip(supervised.tolist(), valid.tolist(), where, strict=True):
        expected = brute_force.supervised_slots(document, a, block_size)
        assert row == (expected if is_valid else [False] * (block_size - 1))


@pytest.mark.parametrize("smallest", [16, 128])
def test_buckets_are_few_and_waste_at_most_an_eighth(smallest):
    widths = [pad_to_bucket(count, smallest) for count in range(1, 20000)]
    for count, width in enumerate(widths, start=1):
        assert width >= count and width % smallest == 0
        assert width - count < max(smallest, count / 8)
    assert len(set(widths)) <= 8 * 12
    assert pad_to_bucket(0, smallest) == smallest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_anchors": 0}, "num_anchors"),
        ({"block_size": 1}, "block_size"),
        ({"anchor_ratio": 0.0}, "anchor_ratio"),
    ],
)
def test_useless_numbers_of_anchors_are_refused(options, message):
    arguments = {"num_anchors": 4, "block_size": 4, **options}
    with pytest.raises(ValueError, match=message):
        select_anchors(torch.ones(5), **arguments)


def test_nothing_to_draw_gives_one_invalid_anchor():
    for loss_mask, ids in ((torch.zeros(4), None), (torch.ones(3), torch.full((3,), -1)), (torch.zeros(0), None)):
        anchors, valid = select_anchors(loss_mask, 4, 4, document_ids=ids)
        assert anchors.tolist() == [0] and valid.tolist() == [False]


@pytest.mark.parametrize("ratio", [1e300, float("inf")])
def test_a_ratio_without_measure_is_no_limit(ratio):
    loss_mask, document_ids = torch.tensor([0, 1, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 0, 0, 0, 1, 1])
    anchors, valid = select_anchors(loss_mask, 512, 4, document_ids=document_ids, anchor_ratio=ratio)
    assert anchors.tolist() == [1, 2, 3] and valid.all()


def test_more_anchors_than_a_tensor_can_count_are_no_limit():
    anchors, valid = select_anchors(torch.tensor([0, 1, 1, 1, 1, 0, 0]), 10**30, 4, anchor_ratio=10.0)
    assert anchors.tolist() == [1, 2, 3] and valid.all()
