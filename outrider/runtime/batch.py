"""From spans to the flat rows of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.types import Batch, Span


def build_batch(spans: Sequence[Span], block_size: int) -> Batch:
    """Lays the rows of ``spans`` one after the other; shapes as in ``Batch``.

    A span that reaches its sequence's end gets logits for its newest token (unless that was done in an earlier pass)
    and for every draft row; any other span gets none.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    cu_rows = [0]
    kv_len: list[int] = []
    tail_start: list[int] = []
    tail_positions: list[tuple[int, ...]] = []
    for span in spans:
        seq, draft, end = span.seq, span.draft, span.end
        ids += seq.tokens[span.start : end]
        ids += draft.tokens[span.done :]
        positions += range(span.start, end)
        tail = tuple([end - 1 + depth for depth in draft.depths])
        positions += tail[span.done :]
        blocks = seq.blocks
        first = span.start if span.n_new else end + span.done
        last = end + len(tail)
        slots += [blocks[s // block_size] * block_size + s % block_size for s in range(first, last)]
        rows_end = cu_rows[-1] + span.n_rows
        logit_rows += range(rows_end - span.n_logit_rows, rows_end)
        cu_rows.append(rows_end)
        kv_len.append(last)
        tail_start.append(end)
        tail_positions.append(tail)
    widest = max(len(span.seq.blocks) for span in spans)
    tables = [span.seq.blocks + [0] * (widest - len(span.seq.blocks)) for span in spans]
    rows = _array([ids, positions, slots])
    return Batch(
        ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        cu_rows=tuple(cu_rows),
        kv_len=tuple(kv_len),
        block_tables=_array(tables),
        tail_start=tuple(tail_start),
        ancestors=_ancestors(spans),
        tail_positions=tuple(tail_positions),
        logit_rows=_array(logit_rows),
        block_size=block_size,
    )


def _ancestors(spans: Sequence[Span]) -> NDArray[np.int64] | None:
    """Bit masks [N,W]; committed rows need none. None when no draft branches: then causal order says it all."""
    if all(span.draft.is_chain for span in spans):
        return None
    words = max((len(span.draft) + 63) // 64 for span in spans)
    rows: list[list[int]] = []
    for span in spans:
        rows += [[0] * words for _ in range(span.n_new)]
        rows += [row + [0] * (words - len(row)) for row in span.draft.ancestor_words()[span.done :]]
    return _array(rows)


def _array(values: list[int] | list[list[int]]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
