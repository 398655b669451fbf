"""The fixed draft length keeps to what each span and the pass have room for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.spec.controller import FixedLength


def spans(room: list[int]) -> list[Span]:
    return [
        Span(Sequence(i, [1], 1, SamplingParams(), SpecParams(), seed=0), 0, 1, budget=budget)
        for i, budget in enumerate(room)
    ]


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(0, 8), st.lists(st.integers(0, 10), max_size=6), st.integers(0, 30))
def test_budgets_are_the_fixed_length_as_far_as_there_is_room(gamma: int, room: list[int], rows: int) -> None:
    budgets = FixedLength(gamma).budgets(spans(room), rows)
    wanted = [min(gamma, r) for r in room]
    assert all(0 <= b <= w for b, w in zip(budgets, wanted, strict=True))
    assert sum(budgets) == min(rows, sum(wanted)), "rows are left unused, or too many are used"


def test_the_first_spans_are_served_first() -> None:
    assert FixedLength(4).budgets(spans([9, 2, 9, 9]), 9) == [4, 2, 3, 0]
    assert FixedLength(0).budgets(spans([9, 9]), 9) == [0, 0]
    assert FixedLength(4).budgets([], 9) == []
