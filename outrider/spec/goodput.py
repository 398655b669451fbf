"""Which draft rows a pass should carry: the pure decision, without any state.

Goodput is the tokens that a step is expected to yield over the seconds it is expected to take. Rows are admitted in the
order of their chance to be accepted, and the best of all prefixes of that order is taken: the time by number of rows is
a measured curve with steps, so that goodput may fall and rise again on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

ONWARD = 3.0
"""After n right rows text is taken to go on as easily with a chance of n / (n + ONWARD). 2 to 4 do about as well."""


class Wish(NamedTuple):
    """What drafting for one sequence would bring, row by row, and cost.

    ``survival[i]`` is the chance that draft row i is accepted where there is one, and never rises with i;
    ``presence[i]`` the chance that the drafter fills that row when it may. Asking the drafter costs ``first`` seconds,
    and ``each`` more for every row that it is asked for. A row that is there costs ``row`` seconds beyond what a row
    of any sequence costs: those for this one's context.
    """

    survival: Sequence[float]
    presence: Sequence[float]
    first: float = 0.0
    each: float = 0.0
    row: float = 0.0


class Decision(NamedTuple):
    """Draft rows for each wish; the tokens a second that are expected of them, and of no draft at all."""

    budgets: tuple[int, ...]
    goodput: float
    plain: float


def best_budgets(
    wishes: Sequence[Wish], rows: int, tokens: float, seconds: Sequence[float], room: int, fixed: float = 0.0
) -> Decision:
    """The budgets with the highest goodput, of at most ``room`` rows together.

    Without drafts the step has ``rows`` rows and yields ``tokens``. A step of n rows takes ``seconds[n]`` and
    ``fixed``, what the wishes say excepted; ``seconds`` reaches further by a row at least than all that may be
    admitted. Where nothing is gained no row is admitted.
    """
    if len(wishes) == 1:
        return _best_length(wishes[0], rows, tokens, seconds, room, fixed)
    # The rows of one draft are there together or not at all, those of different drafts are taken at their average.
    order = [(-chance, r, i) for r, wish in enumerate(wishes) for i, chance in enumerate(wish.survival)]
    order.sort()
    time = seconds[rows] + fixed
    plain = best = tokens / time
    expected = [0.0] * len(wishes)
    filled, taken = float(rows), 0
    for n, (minus_chance, r, i) in enumerate(order[:room], 1):
        wish = wishes[r]
        there = wish.presence[i]
        tokens -= minus_chance * there
        before = filled - expected[r] + i
        low = int(before)
        one, share = seconds[low + 1] - seconds[low], before - low
        if share:
            one += share * (seconds[low + 2] - seconds[low + 1] - one)
        time += there * (one + wish.row) + (wish.each if i else wish.first + wish.each)
        expected[r] += there
        filled += there
        if tokens > best * time:
            best, taken = tokens / time, n
    budgets = [0] * len(wishes)
    for _, r, _ in order[:taken]:
        budgets[r] += 1
    return Decision(tuple(budgets), best, plain)


def prices(rows: int, seconds: Sequence[float], rate: float) -> list[float]:
    """The tokens that each further row of a pass must bring, ``rows`` being there: what its time is worth at ``rate``.

    ``rate`` is the tokens a second that all steps come to, drafts included. The most of one step alone would be another
    thing, and worse: a good step would refuse rows that a poor one takes. (Dinkelbach, 1967: the ratio of two sums is
    greatest where their difference, at that ratio, is.)
    """
    return [rate * (after - before) for before, after in pairwise(seconds[rows:])]


def worths(most: int, sequences: int, seconds: Sequence[float], fixed: float, row: float, rate: float) -> list[float]:
    """The tokens that a right row is worth by its place in its draft, up to ``most``: at most 1, and never rising.

    A token that is not drafted now is had in the next step. Where text is easy, and the surer the more rows were right
    before, that is a step of ``sequences`` whose rows are right as far as here, which takes less time a token than the
    average at ``rate``: only the difference is won. Such a step takes ``fixed`` seconds, ``seconds`` by its rows, which
    reach that far, and ``row`` for each. In a tree the place stands for the depth, which does no better. (Howard, 1960:
    a policy of the best average counts what the state it leads to is worth.) ``docs/architecture.md`` has figures.
    """
    worth, least = [], 1.0
    for n in range(1, most + 1):
        rows = sequences * (n + 1)
        easy = rate * ((seconds[rows] + fixed) / rows + row)
        least = min(least, 1 - n / (n + ONWARD) * (1 - easy))
        worth.append(least)
    return worth


def worthwhile(gains: Sequence[Sequence[float]], row: Sequence[float], prices: Sequence[float]) -> list[int]:
    """How many rows of each of some drafts to submit, the first ones: those that bring more than they cost.

    ``gains[r]`` are the tokens that draft r's rows should bring, never rising, and each costs ``row[r]`` tokens beyond
    the ``prices`` of the rows that all drafts add to the pass.
    """
    gain = best = 0.0
    if len(gains) == 1:  # most often
        own, length = row[0], 0
        for n, (brings, price) in enumerate(zip(gains[0], prices, strict=False), 1):
            gain += brings - price - own
            if gain > best:
                best, length = gain, n
        return [length]
    order = [(-brings, r, i) for r, own in enumerate(gains) for i, brings in enumerate(own)]
    order.sort()
    taken = 0
    for n, (minus, r, _) in enumerate(order):
        gain -= minus + prices[n] + row[r]
        if gain > best:
            best, taken = gain, n + 1
    budgets = [0] * len(gains)
    for _, r, _ in order[:taken]:
        budgets[r] += 1
    return budgets


def _best_length(wish: Wish, rows: int, tokens: float, seconds: Sequence[float], room: int, fixed: float) -> Decision:
    """The same for one sequence alone, whose rows come one after the other."""
    time = seconds[rows] + fixed
    plain = best = tokens / time
    asking, taken = wish.first, 0
    for n, chance in enumerate(wish.survival[:room], 1):
        there = wish.presence[n - 1]
        tokens += chance * there
        time += there * (seconds[rows + n] - seconds[rows + n - 1] + wish.row) + asking + wish.each
        asking = 0.0
        if tokens > best * time:
            best, taken = tokens / time, n
    return Decision((taken,), best, plain)
