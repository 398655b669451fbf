"""The decision: against every other choice of budgets, the published check, and curves that are not convex."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec.goodput import Wish, best_budgets, prices, worths, worthwhile


def drawn(seconds: Callable[[float], float]) -> list[float]:
    return [seconds(n) for n in range(2000)]


FLAT = drawn(lambda rows: 1.0)
STEP = drawn(lambda rows: 1.0 if rows <= 1 else 2.0)


def goodput(
    wishes: Sequence[Wish], budgets: Sequence[int], rows: int, tokens: float, seconds: Callable[[float], float]
) -> float:
    """Tokens a second of any budgets, for drafters that fill every row."""
    gain = sum(sum(wish.survival[:g]) for wish, g in zip(wishes, budgets, strict=True))
    drafting = sum((wish.first + wish.each * g) if g else 0 for wish, g in zip(wishes, budgets, strict=True))
    return (tokens + gain) / (seconds(rows + sum(budgets)) + drafting)


def chances(draw_from: list[float]) -> list[float]:
    """A survival curve from acceptances: their running product."""
    return list(itertools.accumulate(draw_from, lambda a, b: a * b))


curves = st.lists(st.lists(st.floats(0, 1), max_size=4).map(chances), min_size=1, max_size=3)
jumps = st.lists(st.floats(0, 2), min_size=16, max_size=16)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(curves, jumps, st.floats(0, 0.5), st.integers(0, 14))
def test_no_other_budgets_are_better(survival: list[list[float]], steps: list[float], each: float, room: int) -> None:
    """Any curve of times by rows, with flat stretches and jumps: the best prefix is the best of all."""
    times = [1.0, *itertools.accumulate(steps, initial=1.0)]

    def seconds(rows: float) -> float:
        return times[int(rows)]

    wishes = [Wish(curve, [1.0] * len(curve), 0.0, each) for curve in survival]
    chosen = best_budgets(wishes, len(wishes), len(wishes), times, room)
    every = itertools.product(*(range(len(curve) + 1) for curve in survival))
    rates = [goodput(wishes, b, len(wishes), len(wishes), seconds) for b in every if sum(b) <= room]
    assert sum(chosen.budgets) <= room
    assert chosen.goodput == pytest.approx(max(rates), rel=1e-9)
    assert goodput(wishes, chosen.budgets, len(wishes), len(wishes), seconds) == pytest.approx(max(rates), rel=1e-9)


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(chances), st.floats(0, 1), st.floats(0, 1))
def test_a_draft_that_is_not_always_there_costs_its_rows_only_then(
    curve: list[float], there: float, first: float
) -> None:
    """One sequence: exact for a drafter that fills all its rows or none."""
    times = [0, 1.0, 1.5, 1.5, 1.7, 3.0, 3.1, 3.2, 3.3]

    def seconds(rows: float) -> float:
        return times[int(rows)]

    rates = [1.0]
    for g in range(1, len(curve) + 1):
        mean = there * times[1 + g] + (1 - there) * times[1] + first
        rates.append((1 + there * sum(curve[:g])) / mean)
    chosen = best_budgets([Wish(curve, [there] * len(curve), first)], 1, 1, times, 99)
    assert chosen.goodput == pytest.approx(max(rates))
    assert rates[chosen.budgets[0]] == pytest.approx(max(rates))


def test_goodput_may_fall_before_it_rises() -> None:
    """Two rows cost as much as five: one draft row does not pay, four do."""
    decision = best_budgets([Wish([0.8, 0.7, 0.6, 0.5], [1.0] * 4)], 1, 1, STEP, 9)
    assert decision.budgets == (4,)
    assert decision.goodput == pytest.approx(3.6 / 2)
    assert best_budgets([Wish([0.8], [1.0])], 1, 1, STEP, 9).budgets == (0,)


def test_nothing_is_asked_of_a_drafter_whose_call_costs_more_than_it_brings() -> None:
    wish = Wish([0.5, 0.25], [1.0, 1.0], first=0.8)
    assert best_budgets([wish], 1, 1, FLAT, 9).budgets == (0,)
    assert best_budgets([Wish([0.5, 0.25], [1.0, 1.0], first=0.7)], 1, 1, FLAT, 9).budgets == (2,)
    assert best_budgets([], 0, 0, FLAT, 9).budgets == ()


def test_rows_of_a_long_text_cost_more() -> None:
    """Two sequences that are as likely to accept; a row of the second one costs as much as a step."""
    short, long = Wish([0.6, 0.36], [1.0] * 2, row=0.1), Wish([0.6, 0.36], [1.0] * 2, row=1.0)
    assert best_budgets([short], 1, 1, FLAT, 9).budgets == (2,)
    assert best_budgets([long], 1, 1, FLAT, 9).budgets == (0,)
    alone = best_budgets([short], 1, 1, FLAT, 9, fixed=3.0)
    assert alone.plain == pytest.approx(1 / 4)
    assert alone.goodput == pytest.approx(1.96 / 4.2)
    assert best_budgets([long], 1, 1, FLAT, 9, fixed=3.0).budgets == (2,), "next to a dear step it is cheap"


@pytest.mark.parametrize(
    ("a", "c", "best", "speedup"), [(0.7, 0.1, 4, 1.98), (0.8, 0.02, 11, 3.82), (0.9, 0.3, 5, 1.87)]
)
def test_the_known_best_lengths_of_a_constant_acceptance(a: float, c: float, best: int, speedup: float) -> None:
    """Leviathan et al.'s formula where rows cost nothing and a draft token costs c passes."""
    wish = Wish([a ** (i + 1) for i in range(30)], [1.0] * 30, 0.0, c)
    decision = best_budgets([wish], 1, 1, FLAT, 30)
    assert decision.budgets == (best,)
    assert decision.goodput / decision.plain == pytest.approx(speedup, abs=0.005)


PUBLISHED = (0.681, 0.391, 0.204, 0.101, 0.051)
"""Cumulative acceptance by depth, of an engine whose speed-ups were 1.49, 1.68, 1.53 for 1, 3, 5 drafts at batch 1, and
0.90, 0.79, 0.61 at batch 256."""


def fitted(batch: int, measured: dict[int, float]) -> Callable[[float], float]:
    """The times (plain step = 1) which the published speed-ups imply, in straight lines between them."""
    points = [(batch, 1.0)] + [(batch * (1 + g), (1 + sum(PUBLISHED[:g])) / s) for g, s in measured.items()]

    def seconds(rows: float) -> float:
        for (low, before), (high, after) in itertools.pairwise(points):
            if rows <= high:
                return before + (after - before) * (rows - low) / (high - low)
        return points[-1][1]

    return seconds


def test_the_published_check_the_best_length_falls_to_zero_with_load() -> None:
    alone = best_budgets([Wish(PUBLISHED, [1.0] * 5)], 1, 1, drawn(fitted(1, {1: 1.49, 3: 1.68, 5: 1.53})), 99)
    assert alone.budgets == (3,)
    assert alone.goodput / alone.plain == pytest.approx(1.68)
    busy = [Wish(PUBLISHED, [1.0] * 5)] * 256
    assert set(best_budgets(busy, 256, 256, drawn(fitted(256, {1: 0.9, 3: 0.79, 5: 0.61})), 9999).budgets) == {0}


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6).map(chances),
    st.lists(st.floats(0, 1), min_size=6, max_size=6).map(chances),
    st.tuples(st.floats(0, 0.5), st.floats(0, 0.2), st.floats(0, 0.3)),
    st.integers(1, 4),
    jumps,
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_one_sequence_gets_what_it_would_get_beside_one_that_drafts_nothing(
    survival: list[float], presence: list[float], costs: tuple[float, float, float], rows: int, steps: list[float]
) -> None:
    """One wish alone has a shorter way of its own."""
    seconds = list(itertools.accumulate(steps, initial=1.0))
    wish = Wish(survival, presence, *costs)
    alone = best_budgets([wish], rows, rows, seconds, 12, 0.1)
    beside = best_budgets([wish, Wish([], [])], rows, rows, seconds, 12, 0.1)
    assert alone.goodput == pytest.approx(beside.goodput)
    assert alone.plain == beside.plain
    if alone.budgets[0] != beside.budgets[0]:  # as good as each other, but for rounding
        capped = [
            best_budgets([wish], rows, rows, seconds, n, 0.1).goodput for n in (alone.budgets[0], beside.budgets[0])
        ]
        assert capped[0] == pytest.approx(capped[1])


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(curves, jumps, st.floats(0, 1), st.floats(0, 2))
def test_no_other_rows_are_worth_more(survival: list[list[float]], steps: list[float], row: float, rate: float) -> None:
    """Against every choice, for rows that cost the same for all: the tokens less what the time would have brought."""
    times, n = [1.0, *itertools.accumulate(steps, initial=1.0)], len(survival)

    def worth(budgets: Sequence[int]) -> float:
        seconds = times[n + sum(budgets)] - times[n] + row * sum(budgets)
        return sum(sum(curve[:g]) for curve, g in zip(survival, budgets, strict=True)) - rate * seconds

    chosen = worthwhile(survival, [row * rate] * n, prices(n, times, rate))
    every = itertools.product(*(range(len(curve) + 1) for curve in survival))
    assert worth(chosen) == pytest.approx(max(worth(budgets) for budgets in every), abs=1e-9)


def test_good_steps_take_the_rows_that_poor_ones_refuse_only_at_the_rate_of_all() -> None:
    """Every other step has a sure draft, whose last row is doubtful, the others a single row that is more doubtful yet.

    A step that makes the most of itself refuses the one (its rate is high) and takes the other; all steps together
    come further the other way round.
    """
    good, poor = [0.95, 0.9, 0.85, 0.8, 0.25], [0.11]
    times = [1.0 + 0.1 * (rows - 1) for rows in range(8)]

    def rate_of(budgets: tuple[int, int]) -> float:
        tokens = sum(1 + sum(curve[:g]) for curve, g in zip((good, poor), budgets, strict=True))
        return tokens / sum(times[1 + g] for g in budgets)

    best = max(itertools.product(range(6), range(2)), key=rate_of)
    assert best == (5, 0)
    assert tuple(worthwhile([curve], [0.0], prices(1, times, rate_of(best)))[0] for curve in (good, poor)) == best
    own = tuple(best_budgets([Wish(c, [1.0] * len(c))], 1, 1, times, 9).budgets[0] for c in (good, poor))
    assert own == (4, 1)
    assert rate_of(own) < rate_of(best)


@given(jumps, st.integers(1, 6), st.floats(0, 1), st.floats(0, 0.2), st.floats(0.1, 4))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_a_row_is_worth_a_token_at_most_and_never_more_than_the_one_before(
    steps: list[float], sequences: int, fixed: float, row: float, rate: float
) -> None:
    worth = worths(20, sequences, [1.0, *itertools.accumulate(steps * 10, initial=1.0)], fixed, row, rate)
    assert len(worth) == 20
    assert 0 <= min(worth) <= max(worth) <= 1
    assert sorted(worth, reverse=True) == worth


def test_a_row_is_worth_less_where_the_next_step_would_come_to_it_soon() -> None:
    linear = drawn(float)
    assert worths(8, 1, linear, 0.0, 0.0, 1.0) == pytest.approx([1.0] * 8), "no step takes less time a token"
    assert worths(2, 1, FLAT, 0.0, 0.0, 1.0) == pytest.approx([1 - 1 / 4 * (1 - 1 / 2), 1 - 2 / 5 * (1 - 1 / 3)])
    assert worths(2, 2, FLAT, 0.0, 0.0, 2.0) == pytest.approx(worths(2, 1, FLAT, 0.0, 0.0, 1.0)), "of two, as of one"
    busy = worths(2, 8, drawn(lambda rows: 1.0 + 0.1 * rows), 4.0, 0.0, 1.0)
    assert busy == pytest.approx([1 - 1 / 4 * (1 - 6.6 / 16), 1 - 2 / 5 * (1 - 7.4 / 24)]), (
        "all KV is read once for all"
    )
    assert worths(1, 1, FLAT, 0.2, 0.1, 1.0) == pytest.approx([1 - 1 / 4 * (1 - 1.2 / 2 - 0.1)])


def speed_of(worth: Sequence[float], times: Sequence[float], rate: float, tokens: int = 60_000) -> float:
    """Tokens a second over a text of easy stretches and hard ones, each token of which a drafter foresees with a chance
    that it knows."""
    source = random.Random(1)
    chance: list[float] = []
    while len(chance) < tokens + 20:
        chance += [0.92] * source.randrange(1, 40) + [0.15] * source.randrange(1, 40)
    right = [source.random() < c for c in chance]
    at, seconds = 0, 0.0
    price = prices(1, times, rate)
    while at < tokens:
        ahead = list(itertools.accumulate(chance[at : at + 16], lambda a, b: a * b))
        (kept,) = worthwhile([[c * w for c, w in zip(ahead, worth, strict=False)]], [0.0], price)
        accepted = next((i for i in range(kept) if not right[at + i]), kept)
        seconds += times[1 + kept]
        at += accepted + 1
    return at / seconds


def test_what_a_row_is_worth_makes_text_with_easy_stretches_faster() -> None:
    """As against a token for every right row."""
    times = [1.0 + 0.2 * (rows - 1) for rows in range(40)]
    rate = 1.0
    for _ in range(5):  # until it is the rate of all steps
        rate = speed_of([1.0] * 16, times, rate)
    assert speed_of(worths(16, 1, times, 0.0, 0.0, rate), times, rate) > 1.01 * rate
