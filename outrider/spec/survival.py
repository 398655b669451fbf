"""How likely draft rows are to be there and to be accepted: running counts, of a drafter and of one request.

Counts fade, so that an estimate follows the text. A request's estimates begin at its drafter's and count as much as
they have seen. Rows are counted by their place in the draft: in a chain that is the depth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

FIRST_GUESS = 0.6
"""Acceptance of a row, given the one before it, that a drafter is trusted with until it was tried."""
PATIENCE = 2
"""So many times as much is the prior believed about drafts being there: early in an answer little can be looked up."""
FAINT = 0.02
"""A row that is less likely to be accepted than this is never asked for."""
SEEKING = 8
"""Rows of which it is counted whether they are there; further ones are there as often as the last of them."""
TOLD = 12
"""Drafts of a request that the estimate for new requests learns from."""
LUCK = 2.0
"""First rows that should be accepted before half is believed of what a request says about the calibration."""
MANY = 64
"""Drafts that wait at most to be counted."""
CONFIDENCE_STEPS = 12
"""Classes of a drafter's confidence that are counted apart."""


class Counts:
    """Fading counts by place in the draft: acceptance by rows that were there, presence by rows that were asked for.

    Drafts are counted by ``catch_up``: several at once take little more time than one.
    """

    def __init__(self, memory: float) -> None:
        """``memory``: drafts after which a count has faded to 1/e."""
        self._keep = 1 - 1 / memory
        self._new: list[tuple[int, int, Collection[int]]] = []  # drafts that are not counted yet
        self.asked: list[float] = []
        self.filled: list[float] = []  # of these
        self.there: list[float] = []
        self.accepted: list[float] = []  # of these

    def add(self, asked: int, there: int, accepted: Collection[int]) -> None:
        """One draft: ``asked`` rows were allowed, ``there`` were verified, the rows ``accepted`` were right."""
        self._new.append((asked, there, accepted))
        if len(self._new) == MANY:
            self.catch_up()

    def catch_up(self) -> None:
        """Counts the drafts that were added since."""
        keep = self._keep
        for rows, there, right in self._new:
            there, sought = min(there, rows), min(rows, SEEKING)
            if sought > len(self.asked):
                _reach(sought, self.asked, self.filled)
            if there > len(self.there):
                _reach(there, self.there, self.accepted)
            self.asked[:sought] = [count * keep + 1 for count in self.asked[:sought]]
            self.filled[:sought] = [count * keep + (i < there) for i, count in enumerate(self.filled[:sought])]
            self.there[:there] = [count * keep + 1 for count in self.there[:there]]
            self.accepted[:there] = [count * keep + (i in right) for i, count in enumerate(self.accepted[:there])]
        self._new.clear()


class Survival:
    """Estimates from counts, pulled towards ``prior`` (or a first guess) with the weight of ``pull`` drafts.

    Only its first ``TOLD`` drafts are told to the prior. So a request that soon gave up drafting counts as much there
    as one that never did, and the prior is what a new request may expect.
    """

    def __init__(self, memory: float, pull: float, prior: Survival | None = None) -> None:
        self.counts = Counts(memory)
        self.told = 0
        self._pull, self._prior = pull, prior
        self._known: tuple[list[float], list[float]] = [], []

    def add(self, asked: int, there: int, accepted: Collection[int]) -> None:
        """One draft, as ``Counts.add``."""
        if self._prior is not None and self.told < TOLD:
            self.told += 1
            self._prior.add(asked, there, accepted)
        self.counts.add(asked, there, accepted)
        self._known = [], []

    @property
    def known(self) -> float:
        """Drafts that are looked back on."""
        self.counts.catch_up()
        return self.counts.there[0] if self.counts.there else 0.0

    @property
    def tried(self) -> int:
        """Rows of the longest draft there was."""
        self.counts.catch_up()
        return len(self.counts.there)

    def estimate(self, depth: int) -> tuple[Sequence[float], Sequence[float]]:
        """For ``depth`` rows, or more, the chance of each to be accepted if it is there, and to be there if asked for.

        Neither rises from row to row. A row that was never tried goes on as the ones before it did. What is less likely
        than ``FAINT`` is 0.
        """
        survival, presence = self._known
        if len(survival) >= depth:
            return survival, presence
        survival, presence = self._known = [], []
        counts, pull = self.counts, self._pull
        counts.catch_up()
        accepted, tried, filled, asked = counts.accepted, counts.there, counts.filled, counts.asked
        usual, usually = ([], []) if self._prior is None else self._prior.estimate(depth)
        chance = there = before = 1.0
        step = FIRST_GUESS
        for i in range(depth):
            if usual:
                step = usual[i] / before if before > 0 else 0.0
                before = usual[i]
            guess, likely = chance * step, there
            if usually:
                likely = min(there, usually[i])
            if i < len(tried):
                guess = min(chance, (accepted[i] + pull * guess) / (tried[i] + pull))
            if i < len(asked):
                missing = pull * PATIENCE
                likely = min(there, (filled[i] + missing * likely) / (asked[i] + missing))
            if not usual and i and chance > 0:
                step = guess / chance
            if guess < FAINT:
                survival += [0.0] * (depth - i)
                presence += [likely] * (depth - i)
                break
            survival.append(guess)
            presence.append(likely)
            chance, there = guess, likely
        return survival, presence


class Calibration:
    """What a drafter's own confidence is worth: how often a row of about that confidence was accepted."""

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._there = [4.0] * (CONFIDENCE_STEPS + 1)
        self._accepted = [4.0 * i / CONFIDENCE_STEPS for i in range(CONFIDENCE_STEPS + 1)]
        self._worth = [accepted / 4.0 for accepted in self._accepted]

    def chances(self, confidence: Sequence[float]) -> list[float]:
        """The chance of each row to be accepted."""
        return [self._worth[_class(value)] for value in confidence]

    def add(self, confidence: Sequence[float], accepted: Collection[int]) -> None:
        """Rows of this confidence were verified, and those ``accepted`` were right."""
        for i, value in enumerate(confidence):
            k = _class(value)
            self._there[k] = self._there[k] * self._keep + 1
            self._accepted[k] = self._accepted[k] * self._keep + (i in accepted)
            self._worth[k] = self._accepted[k] / self._there[k]


class Luck:
    """How many times as often the first row of a draft is accepted as the calibration says: of a request, or of new
    ones."""

    def __init__(self, memory: float, usual: float = 1.0) -> None:
        """``usual`` is believed with the weight of ``LUCK`` accepted first rows."""
        self._rate, self._usual = 1 / memory, usual
        self._foreseen, self._accepted = LUCK, LUCK * usual

    @property
    def ratio(self) -> float:
        return self._accepted / self._foreseen

    def add(self, foreseen: float, accepted: float) -> None:
        """A draft whose first row was ``foreseen`` to be accepted with this chance, and was or was not (1 or 0)."""
        self._foreseen += self._rate * (LUCK - self._foreseen) + foreseen
        self._accepted += self._rate * (LUCK * self._usual - self._accepted) + accepted


def _reach(rows: int, *counts: list[float]) -> None:
    """Each of these is for so many rows at least."""
    for each in counts:
        each.extend([0.0] * (rows - len(each)))


def _class(confidence: float) -> int:
    return max(0, min(CONFIDENCE_STEPS, int(CONFIDENCE_STEPS * confidence + 0.5)))
