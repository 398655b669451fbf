"""Which draft rows a pass should carry: the pure decision, without any state.

Goodput is the tokens that a step is expected to yield over the seconds it is expected to take. Rows are admitted in the
order of their chance to be accepted, and the best of all prefixes of that order is taken: the time by number of rows is
a measured curve with steps, so that goodput may fall and rise again on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """What drafting for one sequence would bring, row by row, and cost.

    ``survival[i]`` is the chance that draft row i is accepted where there is one, and never rises with i;
    ``presence[i]`` the chance that the drafter fills that row when it may. Asking the drafter costs ``first`` seconds,
    and ``each`` more for every row that it is asked for.
    """

    survival: Sequence[float]
    presence: Sequence[float]
    first: float = 0.0
    each: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Draft rows for each wish; the tokens a second that are expected of them, and of no draft at all."""

    budgets: tuple[int, ...]
    goodput: float
    plain: float


def best_budgets(
    wishes: Sequence[Wish], rows: int, tokens: float, seconds: Callable[[float], float], room: int
) -> Decision:
    """The budgets with the highest goodput, of at most ``room`` rows together.

    Without drafts the step has ``rows`` rows and yields ``tokens``; ``seconds`` is the time of a step by its rows, the
    drafters' own time excepted. Where nothing is gained no row is admitted.
    """
    # The rows of one draft are there together or not at all, those of different drafts are taken at their average.
    order = sorted((-chance, r, i) for r, wish in enumerate(wishes) for i, chance in enumerate(wish.survival))
    plain = best = tokens / seconds(rows)
    expected = [0.0] * len(wishes)
    filled, time, taken = float(rows), seconds(rows), 0
    for n, (minus_chance, r, i) in enumerate(order[:room], 1):
        wish = wishes[r]
        there = wish.presence[i]
        tokens -= minus_chance * there
        before = filled - expected[r] + i
        time += there * (seconds(before + 1) - seconds(before)) + (wish.each if i else wish.first + wish.each)
        expected[r] += there
        filled += there
        if tokens > best * time:
            best, taken = tokens / time, n
    budgets = [0] * len(wishes)
    for _, r, _ in order[:taken]:
        budgets[r] += 1
    return Decision(tuple(budgets), best, plain)
