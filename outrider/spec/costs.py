"""What a step costs: a table of measured forward passes, and what was learnt since about this machine at this hour."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MOST = 4.0
"""A time so many times the expected one is taken for a paused process or the like, and counts as this much."""
NEAR = 0.15
"""One over the passes that are compared with regard to context: few, for the machine's speed may change."""
LITTLE = 0.004
"""A mean square of the share of context that tells little."""
FORGOTTEN = 0.001
"""Share of a correction that is forgotten with each step that is told of: else those of rows that alone are seen would
drift."""
REDRAWN = 8
"""Steps that were told of after which the curve of costs is drawn anew."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a forward pass: by its number of ``rows`` without any context, and what context adds.

    A sequence's KV is read once for all of its rows: ``per_read`` seconds for each of its tokens. And each row attends
    to it: ``per_seen`` seconds for each token that a row sees. So eight rows of one sequence cost less than a row of
    eight. Between the ``rows``, and behind the last, ``seconds`` goes on in straight lines.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_read: float = 0.0
    per_seen: float = 0.0

    def at(self, rows: float) -> float:
        """Seconds of a pass of ``rows``, context excepted."""
        i, share = place(self.rows, rows)
        if not i:
            return self.seconds[0]
        low = self.seconds[i - 1]
        return max(low + (self.seconds[i] - low) * share, 0.1 * self.seconds[0])


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
        y = max(0.0, y)
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
    """Predicts the seconds of a step from its rows and context, and learns from the steps that it is told of.

    A forward pass takes what the table says, times how fast the machine is now, which moves quickly. Slowly move a
    correction of the part without context by its number of rows, and one of the part of context: a slower hour makes no
    number of rows look worse than another, and neither does a long text.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.speed = 1.0  # seconds a second of the table
        self.corrections = [1.0] * len(table.rows)
        self._places: list[tuple[int, float, float]] = []  # by rows: where it lies in the table, and what it says
        self.weight = 1.0  # of context
        self._share, self._spread = 0.0, 0.0  # of context in the last passes: its mean, and its mean square from that
        self._ratio = 1.0  # the speed of the last passes
        self.other = Line(200)  # seconds of a step outside of forward and drafts, by its rows
        self._curve: list[float] = []
        self._age = 0
        self._seen = 0  # steps that were learnt from

    @property
    def per_seen(self) -> float:
        """Seconds of a row for each token of context that it sees."""
        return self.speed * self.weight * self.table.per_seen

    def context(self, read: float, seen: float) -> float:
        """Seconds that context adds to a pass: ``read`` tokens of all its sequences, ``seen`` ones by all its rows."""
        return self.speed * self.weight * (self.table.per_read * read + self.table.per_seen * seen)

    def forward(self, rows: int, read: float, seen: float) -> float:
        """Seconds of a forward pass."""
        context = self.context(read, seen)
        return self.speed * self._bare(rows) + context

    def _bare(self, rows: int) -> float:
        """Seconds of a pass on the table's machine, context excepted, by what was learnt about these rows."""
        while len(self._places) <= rows:
            n = len(self._places)
            self._places.append((*place(self.table.rows, n), self.table.at(n)))
        i, share, seconds = self._places[rows]
        if not i:
            return seconds * self.corrections[0]
        low = self.corrections[i - 1]
        return seconds * (low + (self.corrections[i] - low) * min(share, 1.0))

    def curve(self, rows: int) -> Sequence[float]:
        """Seconds of a step by its rows, up to ``rows`` at least, drafting and context excepted.

        It is drawn anew now and then only.
        """
        if self._age >= REDRAWN:
            self._curve, self._age = [], 0
        while len(self._curve) <= rows:
            n = len(self._curve)
            self._curve.append(self.speed * self._bare(n) + self.other.at(n))
        return self._curve

    def observe(self, rows: int, read: float, seen: float, forward: float, other: float) -> None:
        """One step without prompt rows took so many seconds for its forward pass, and for what is neither pass nor
        draft."""
        self._age += 1
        self._seen += 1
        self.other.add(rows, other)
        own = self._bare(rows)  # the part without context
        i, share, _ = self._places[rows]
        nearest = i if share > 0.5 or not i else i - 1
        expected = own + self.weight * (self.table.per_read * read + self.table.per_seen * seen)
        ratio = forward / expected
        if self._seen > 8:
            ratio = min(max(ratio, self.speed / MOST), self.speed * MOST)
        rate = max(0.05, 1 / self._seen)
        missed = 0.01 * (ratio / self.speed - 1) if self._seen > 8 else 0.0
        self.speed += rate * (ratio - self.speed)
        correction = self.corrections[nearest] * (1 + missed * own / expected)
        self.corrections[nearest] = _within(correction + FORGOTTEN * (1 - correction), 2.0)
        # Passes with a larger share of context than those just before tell what it costs, in proportion to how much
        # larger (normalised least mean squares).
        more, late = 1 - own / expected - self._share, ratio / self._ratio - 1
        self._share += NEAR * more
        self._ratio += NEAR * (ratio - self._ratio)
        self._spread += 0.01 * (more * more - self._spread)
        step = 0.01 * min(max(late, -0.2), 0.2) * more / (self._spread + LITTLE)
        self.weight = _within(self.weight * (1 + step), 8.0)


def _within(factor: float, most: float) -> float:
    return min(max(factor, 1 / most), most)
