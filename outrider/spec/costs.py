"""What a step costs: a table of measured forward passes, and what was learnt since about this machine at this hour."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 4.0
"""A time so many times the expected one is taken for a paused process or the like, and counts as this much."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward pass by its number of ``rows``, at the context ``context``, and how they grow with it.

    ``per_token[i]`` is what a token more of context adds at ``rows[i]``. Between the rows, and behind the last, it goes
    on in straight lines.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_token: tuple[float, ...]
    context: int

    def at(self, rows: float, context: float) -> float:
        """Seconds of a pass of ``rows`` over sequences of ``context`` tokens."""
        more = context - self.context
        i, share = place(self.rows, rows)
        if not i:
            return self.seconds[0] + more * self.per_token[0]
        low = self.seconds[i - 1] + more * self.per_token[i - 1]
        high = self.seconds[i] + more * self.per_token[i]
        return max(low + (high - low) * share, 0.1 * self.seconds[0])


def place(grid: Sequence[int], value: float) -> tuple[int, float]:
    """Where ``value`` lies: ``share`` of the way from ``grid[i - 1]`` to ``grid[i]``, above 1 behind the end.

    i is 0 at or before the first one, or where there is no other.
    """
    if value <= grid[0] or len(grid) == 1:
        return 0, 0.0
    i = min(bisect_right(grid, value), len(grid) - 1)
    return i, (value - grid[i - 1]) / (grid[i] - grid[i - 1])


class Line:
    """y = base + slope * x by fading least squares; neither is negative. Too little spread in x tells no slope from a
    base: then y is taken to be proportional to x."""

    def __init__(self, memory: float) -> None:
        """``memory``: observations after which one has faded to 1/e."""
        self._rate = 1 / memory
        self._n = 0
        self._x = self._y = self._xx = self._xy = 0.0
        self.base = self.slope = 0.0

    def add(self, x: float, y: float) -> None:
        self._n += 1
        if self._n > 8:
            y = min(y, MOST * (self.base + self.slope * x) + 1e-9)
        rate = max(self._rate, 1 / self._n)
        self._x += rate * (x - self._x)
        self._y += rate * (y - self._y)
        self._xx += rate * (x * x - self._xx)
        self._xy += rate * (x * y - self._xy)
        ratio = self._y / self._x if self._x > 0 else 0.0
        spread, joint = self._xx - self._x**2, self._xy - self._x * self._y
        weight = 0.02 * self._xx + 1e-9
        self.slope = min(max(0.0, (joint + weight * ratio) / (spread + weight)), ratio)
        self.base = self._y - self.slope * self._x

    def at(self, x: float) -> float:
        return self.base + self.slope * x


class Costs:
    """Predicts the seconds of a step from its rows and context, and learns from every step without prompt rows.

    A forward pass takes what the table says, times how fast the machine is now (which moves quickly), times a
    correction by number of rows (which moves slowly): a slower hour makes no number of rows look worse than another.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.speed = 1.0  # seconds a second of the table
        self.corrections = [1.0] * len(table.rows)
        self.other = Line(200)  # seconds of a step outside of forward and drafts, by its rows
        self._curve: list[float] = []
        self._curve_context = -1
        self._age = 0
        self._seen = 0

    def forward(self, rows: float, context: float) -> float:
        """Seconds of a forward pass."""
        return self.table.at(rows, context) * self._correction(rows) * self.speed

    def _correction(self, rows: float) -> float:
        i, share = place(self.table.rows, rows)
        if not i:
            return self.corrections[0]
        return self.corrections[i - 1] + (self.corrections[i] - self.corrections[i - 1]) * min(share, 1.0)

    def step(self, rows: float, context: float) -> float:
        """Seconds of a step of up to a few hundred rows, drafting excepted, by a curve that is drawn now and then."""
        band = int(context) >> 6
        if band != self._curve_context or self._age >= 32:
            self._curve, self._curve_context, self._age = [], band, 0
        whole = int(rows)
        while len(self._curve) < whole + 2:
            n = len(self._curve)
            self._curve.append(self.forward(n, (band << 6) + 32) + self.other.at(n))
        low = self._curve[whole]
        return low + (self._curve[whole + 1] - low) * (rows - whole)

    def observe(self, rows: int, context: float, forward: float, other: float) -> None:
        """One step without prompt rows took so many seconds for its forward pass, and for what is neither pass nor
        draft."""
        self._age += 1
        self.other.add(rows, other)
        ratio = forward / self.table.at(rows, context)
        expected = self.speed * self._correction(rows)
        self._seen += 1
        if self._seen > 8:
            ratio = min(max(ratio, expected / MOST), expected * MOST)
        self.speed += max(0.05, 1 / self._seen) * (ratio / self._correction(rows) - self.speed)
        i, share = place(self.table.rows, rows)
        nearest = i if share > 0.5 or not i else i - 1
        own = self.corrections[nearest]
        self.corrections[nearest] = min(max(own + 0.01 * (ratio / self.speed - own), 0.5), 2.0)
