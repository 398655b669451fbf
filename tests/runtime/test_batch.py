"""Spans to flat rows: what each field of a Batch holds, on layouts small enough to write down."""

from __future__ import annotations

import numpy as np

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Batch, Sequence, Span
from outrider.runtime.batch import build_batch
from outrider.runtime.runner import rows_by_span

TREE = Draft.tree([50, 51, 52, 53], [-1, 0, 0, 2])


def sequence(n: int, blocks: list[int], id: int = 0) -> Sequence:
    """``n`` tokens, which are 100, 101, ..."""
    return Sequence(id, list(range(100, 100 + n)), n, SamplingParams(), SpecParams(), seed=0, blocks=blocks)


def build(*spans: Span, size: int = 4) -> Batch:
    return build_batch(spans, size)


def test_a_prompt_chunk_that_stops_short_gets_no_logits() -> None:
    batch = build(Span(sequence(10, [7, 3, 5]), start=3, n_new=4))
    assert batch.ids.tolist() == [103, 104, 105, 106]
    assert batch.positions.tolist() == [3, 4, 5, 6]
    assert batch.slots.tolist() == [7 * 4 + 3, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert (batch.cu_rows, batch.kv_len, batch.tail_start) == ((0, 4), (7,), (7,))
    assert batch.logit_rows.tolist() == []
    assert batch.tail_positions == ((),)
    assert batch.ancestors is None


def test_the_last_chunk_gets_logits_for_its_newest_token_and_for_every_draft_row() -> None:
    batch = build(Span(sequence(6, [2, 0, 1]), start=4, n_new=2, draft=Draft.chain([8, 9])))
    assert batch.ids.tolist() == [104, 105, 8, 9]
    assert batch.positions.tolist() == [4, 5, 6, 7]
    assert batch.slots.tolist() == [0, 1, 2, 3]
    assert batch.logit_rows.tolist() == [1, 2, 3]
    assert (batch.kv_len, batch.tail_start, batch.tail_positions) == ((8,), (6,), ((6, 7),))
    assert batch.ancestors is None, "a chain is plain causal"


def test_a_tree_has_slots_by_row_positions_by_depth_and_ancestor_bits() -> None:
    batch = build(Span(sequence(6, [2, 0, 1]), start=5, n_new=1, draft=TREE))
    assert batch.ids.tolist() == [105, 50, 51, 52, 53]
    assert batch.positions.tolist() == [5, 6, 7, 7, 8]
    assert batch.slots.tolist() == [1, 2, 3, 1 * 4 + 0, 1 * 4 + 1]
    assert batch.tail_positions == ((6, 7, 7, 8),)
    assert batch.ancestors is not None
    assert batch.ancestors.tolist() == [[0], [0b0001], [0b0011], [0b0101], [0b1101]]


def test_rows_of_several_sequences_lie_one_after_the_other() -> None:
    spans = [
        Span(sequence(9, [6, 4, 3]), start=0, n_new=8),
        Span(sequence(3, [5, 2], 1), start=2, n_new=1, draft=TREE),
        Span(sequence(2, [1], 2), start=1, n_new=1),
    ]
    batch = build(*spans)
    assert (batch.cu_rows, batch.kv_len, batch.tail_start) == ((0, 8, 13, 14), (8, 7, 2), (8, 3, 2))
    assert (batch.n_rows, batch.n_seqs) == (14, 3)
    assert batch.logit_rows.tolist() == [8, 9, 10, 11, 12, 13]
    assert batch.block_tables.tolist() == [[6, 4, 3], [5, 2, 0], [1, 0, 0]]
    assert batch.ancestors is not None
    assert (batch.ancestors[:9] == 0).all(), "committed rows have no bits"
    assert batch.ancestors[13].tolist() == [0]
    assert all(len(t) == batch.n_rows for t in (batch.ids, batch.positions, batch.slots, batch.ancestors))


def test_a_pass_that_grows_a_draft_holds_only_the_new_nodes() -> None:
    batch = build(Span(sequence(6, [2, 0, 1]), start=6, n_new=0, draft=TREE, done=2))
    assert batch.ids.tolist() == [52, 53]
    assert batch.positions.tolist() == [7, 8]
    assert batch.slots.tolist() == [4, 5]
    assert batch.logit_rows.tolist() == [0, 1]
    assert (batch.kv_len, batch.tail_start, batch.tail_positions) == ((10,), (6,), ((6, 7, 7, 8),))
    assert batch.ancestors is not None
    assert batch.ancestors.tolist() == [[0b0101], [0b1101]]


def test_a_draft_of_more_than_64_nodes_takes_two_words_and_keeps_the_sign_bit() -> None:
    chain = Draft.tree(range(70), [*range(-1, 68), 0])  # node 69 branches off, so that the bits are written out
    short = Span(sequence(2, [40], 1), start=1, n_new=1, draft=Draft.chain([1]))
    batch = build(Span(sequence(2, list(range(20))), start=1, n_new=1, draft=chain), short)
    assert batch.ancestors is not None
    words = batch.ancestors.astype(np.uint64)
    masks = [int(low) | int(high) << 64 for low, high in words]
    assert masks[1:70] == [(1 << (i + 1)) - 1 for i in range(69)]
    assert masks[70] == 1 | 1 << 69
    assert masks[71:] == [0, 1]


def test_one_odd_block_size_and_logits_split_by_span() -> None:
    spans = [
        Span(sequence(5, [9, 8]), start=0, n_new=4),
        Span(sequence(4, [7, 6], 1), start=3, n_new=1, draft=Draft.chain([1, 2])),
        Span(sequence(1, [5], 2), start=0, n_new=1),
    ]
    batch = build(*spans, size=3)
    assert batch.slots.tolist() == [27, 28, 29, 24, 18, 19, 20, 15]
    logits = np.arange(4.0)[:, None].repeat(2, 1)
    parts = rows_by_span(spans, logits)
    assert [p[:, 0].tolist() for p in parts] == [[], [0, 1, 2], [3]]
