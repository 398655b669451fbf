"""Estimates of what is accepted: they find the truth, follow a change, and begin where the drafter stands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec.survival import (
    CONFIDENCE_STEPS,
    HEAVY,
    SEEKING,
    TOLD,
    Calibration,
    Counts,
    Survival,
    classes_of,
)


def feed(survival: Survival, acceptance: float, presence: float, drafts: int, rows: int, seed: int = 0) -> None:
    source = random.Random(seed)
    for _ in range(drafts):
        there = rows if source.random() < presence else 0
        right = 0
        while right < there and source.random() < acceptance:
            right += 1
        survival.add(rows, there, range(right))


def test_it_finds_acceptance_and_presence() -> None:
    survival = Survival(memory=400, pull=4)
    feed(survival, 0.7, 0.4, 4000, 4)
    chances, presence = survival.estimate(6)
    assert chances[:4] == pytest.approx([0.7, 0.49, 0.343, 0.24], abs=0.06)
    assert presence[:6] == pytest.approx([0.4] * 6, abs=0.06)
    assert chances[4:6] == pytest.approx([0.17, 0.12], abs=0.05), "rows never tried go on as the others did"


def test_it_follows_a_change_within_its_memory() -> None:
    survival = Survival(memory=60, pull=6, prior=Survival(memory=400, pull=4))
    feed(survival, 0.9, 1.0, 500, 3)
    assert survival.estimate(1)[0][0] > 0.8
    feed(survival, 0.0, 1.0, 150, 3)
    assert survival.estimate(1)[0][0] < 0.15


def test_a_new_request_begins_at_the_drafters_average_and_then_goes_its_own_way() -> None:
    drafter = Survival(memory=400, pull=4)
    for seed in range(60):
        feed(Survival(60, 6, drafter), 0.8, 0.9, 10, 3, seed)
    new = Survival(60, 6, drafter)
    assert new.estimate(3)[0][:3] == pytest.approx(drafter.estimate(3)[0][:3])
    feed(new, 0.0, 0.9, 20, 3)
    assert new.estimate(3)[0][2] <= new.estimate(3)[0][0] < 0.35 < drafter.estimate(1)[0][0]


def test_a_request_that_gave_up_counts_as_much_for_new_ones_as_one_that_did_not() -> None:
    """Long answers that copy and short trials that do not, in turn: a new request may expect half of it."""
    drafter = Survival(memory=200, pull=4)
    for seed in range(20):
        feed(Survival(100, 3, drafter), 0.9, 1.0, 400, 1, seed)
        feed(Survival(100, 3, drafter), 0.0, 1.0, TOLD, 1, seed)
    assert drafter.estimate(1)[0][0] == pytest.approx(0.45, abs=0.1)


def test_what_is_hardly_ever_accepted_is_not_to_be_asked_for() -> None:
    survival = Survival(memory=60, pull=3)
    feed(survival, 0.1, 1.0, 300, 3)
    chances, presence = survival.estimate(8)
    assert 0.05 < chances[0] < 0.2
    assert list(chances[2:]) == [0.0] * 6
    assert len(presence) == 8


def test_what_was_accepted_is_not_forgotten_while_nothing_is_found() -> None:
    survival = Survival(memory=60, pull=6)
    feed(survival, 0.9, 1.0, 300, 2)
    before = survival.estimate(2)[0][0]
    feed(survival, 0.9, 0.0, 600, 2)
    assert survival.estimate(2)[0][0] == before
    assert survival.estimate(2)[1][0] < 0.3


drafts = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))


@settings(deadline=None, derandomize=True, database=None, max_examples=100)
@given(st.lists(drafts, max_size=30), st.integers(0, 9))
def test_estimates_are_chances_that_never_rise(history: list[tuple[int, int, int]], depth: int) -> None:
    survival = Survival(20, 4, Survival(100, 2))
    for asked, there, right in history:
        survival.add(asked, min(asked, there), range(min(asked, there, right)))
    for estimate in survival.estimate(depth):
        assert len(estimate) >= depth
        assert all(0 <= x <= 1 for x in estimate)
        assert sorted(estimate, reverse=True) == list(estimate)


def faded(history: list[tuple[int, int, int]], memory: float) -> list[list[float]]:
    """What ``Counts`` should say, draft by draft and place by place: asked, filled, there, accepted."""
    keep, counts = 1 - 1 / memory, [[0.0] * 9 for _ in range(4)]
    for asked, there, right in history:
        for i in range(9):
            counts[0][i] = counts[0][i] * keep + (i < min(asked, SEEKING))
            counts[1][i] = counts[1][i] * keep + (i < min(asked, there, SEEKING))
            if min(asked, there):
                counts[2][i] = counts[2][i] * keep + (i < min(asked, there))
                counts[3][i] = counts[3][i] * keep + (i < min(asked, there, right))
    return counts


longer = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(longer, max_size=12), st.integers(1, 60))
def test_counts_fade_as_if_each_draft_were_counted_place_by_place(
    history: list[tuple[int, int, int]], times: int
) -> None:
    """Also over the many drafts after which the weights are made lighter."""
    memory, counts = 6.0, Counts(6.0)
    for asked, there, right in history * times:
        counts.add(asked, there, range(min(asked, there, right)))
    want = faded(history * times, memory)
    for got, full in zip((*counts.presence(), *counts.acceptance()), want, strict=True):
        assert got == pytest.approx(full[: len(got)], abs=1e-9)
        assert not any(full[len(got) :])
    assert counts.found == pytest.approx(want[2][0])
    assert max(counts._asked) <= HEAVY * memory


def test_confidence_is_weighed_by_what_came_of_it() -> None:
    """A drafter that is always too sure of itself in one class, and not sure enough in another."""
    calibration, source = Calibration(memory=400), random.Random(1)
    for _ in range(2000):
        right = [i for i, chance in enumerate((0.2, 0.8)) if source.random() < chance]
        calibration.add(classes_of((0.9, 0.3)), right)
    gains = [calibration.gains(classes_of((sure,)), (1.0,))[0] for sure in (0.9, 0.3)]
    assert gains == pytest.approx([0.2, 0.8], abs=0.08)
    assert classes_of((-0.5, 1.5, 1e308, -1e308)) == [0, CONFIDENCE_STEPS, CONFIDENCE_STEPS, 0]
    assert calibration.gains(classes_of((1.0, 0.0)), (1.0, 1.0)) == pytest.approx([1.0, 0.0]), (
        "others stay as they were"
    )
    both = calibration.gains(classes_of((0.9, 0.3)), (0.5, 0.5))
    assert both == pytest.approx([gains[0] / 2] * 2), "a row is no likelier than the ones before it"
