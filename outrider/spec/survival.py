"""How likely draft rows are to be there and to be accepted: running counts, of a drafter and of one request.

Counts fade, so that an estimate follows the text. A request's estimates begin at its drafter's and count as much as
they have seen. Rows are counted by their place in the draft: in a chain that is the depth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

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
HEAVY = 1e9
"""The weight of a draft at which all weights are made lighter: they grow with each draft."""
CONFIDENCE_STEPS = 12
"""Classes of a drafter's confidence that are counted apart."""


class Counts:
    """Fading counts by place in the draft: acceptance by rows that were there, presence by rows that were asked for.

    Drafts are counted by their number of rows, the newest with the greatest weight, so that a draft costs a few
    operations however long it is; what was counted of each place is added up when it is looked at.
    """

    def __init__(self, memory: float) -> None:
        """``memory``: drafts after which a count has faded to 1/e. One without rows lets no acceptance fade."""
        self._growth = 1 / (1 - 1 / memory)
        self._asking = self._finding = 1.0  # the weight of the newest draft, and of the newest one with rows
        self._asked = [0.0] * (SEEKING + 1)  # [n]: drafts with n rows asked for
        self._filled = [0.0] * (SEEKING + 1)  # [n]: of these, those with n rows there
        self._there: list[float] = []  # [n - 1]: drafts with n rows
        self._accepted: list[float] = []  # [i]: those whose row i was right

    def add(self, asked: int, there: int, accepted: Collection[int]) -> None:
        """One draft: ``asked`` rows were allowed, ``there`` were verified, the rows ``accepted`` were right."""
        there, sought = min(there, asked), min(asked, SEEKING)
        self._asking = weight = self._asking * self._growth
        self._asked[sought] += weight
        self._filled[min(there, sought)] += weight
        if weight > HEAVY:
            self._asked, self._filled = _lighter(self._asked, weight), _lighter(self._filled, weight)
            self._asking = 1.0
        if not there:
            return
        if there > len(self._there):
            missing = [0.0] * (there - len(self._there))
            self._there += missing
            self._accepted += missing
        self._finding = weight = self._finding * self._growth
        self._there[there - 1] += weight
        for row in accepted:
            self._accepted[row] += weight
        if weight > HEAVY:
            self._there, self._accepted = _lighter(self._there, weight), _lighter(self._accepted, weight)
            self._finding = 1.0

    @property
    def found(self) -> float:
        """Drafts with rows."""
        return sum(self._there) / self._finding

    @property
    def longest(self) -> int:
        """Rows of the longest draft there was."""
        return len(self._there)

    def presence(self) -> tuple[list[float], list[float]]:
        """By place: drafts in which it was asked for, and of these those in which it was there."""
        asked, filled = _at_least(self._asked, self._asking), _at_least(self._filled, self._asking)
        return asked[1:], filled[1:]

    def acceptance(self) -> tuple[list[float], list[float]]:
        """By place: drafts in which it was there, and of these those in which it was right."""
        return _at_least(self._there, self._finding), _lighter(self._accepted, self._finding)


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
        return self.counts.found

    @property
    def tried(self) -> int:
        """Rows of the longest draft there was."""
        return self.counts.longest

    def estimate(self, depth: int) -> tuple[Sequence[float], Sequence[float]]:
        """For ``depth`` rows, or more, the chance of each to be accepted if it is there, and to be there if asked for.

        Neither rises from row to row. A row that was never tried goes on as the ones before it did. What is less likely
        than ``FAINT`` is 0.
        """
        survival, presence = self._known
        if len(survival) >= depth:
            return survival, presence
        survival, presence = self._known = [], []
        pull = self._pull
        tried, accepted = self.counts.acceptance()
        asked, filled = self.counts.presence()
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
        self._chances = [accepted / 4.0 for accepted in self._accepted]

    def gains(self, classes: Sequence[int], worth: Sequence[float]) -> list[float]:
        """The tokens that each row should bring, by the ``classes_of`` confidence and by what a right one is ``worth``:
        as it is likely to be accepted, and never likelier than the rows before it."""
        gains, least, known = [], 1.0, self._chances
        for k, tokens in zip(classes, worth, strict=False):
            if known[k] < least:
                least = known[k]
            gains.append(least * tokens)
        return gains

    def add(self, classes: Sequence[int], accepted: Collection[int]) -> None:
        """Rows of these classes were verified, and those ``accepted`` were right."""
        for i, k in enumerate(classes):
            there = self._there[k] = self._there[k] * self._keep + 1
            right = self._accepted[k] = self._accepted[k] * self._keep + (i in accepted)
            self._chances[k] = right / there


def _lighter(counts: list[float], weight: float) -> list[float]:
    return [count / weight for count in counts]


def _at_least(counts: list[float], weight: float) -> list[float]:
    """[n]: of drafts that are counted by their number, those with this number or a greater one."""
    return [count / weight for count in accumulate(reversed(counts))][::-1]


def classes_of(confidence: Sequence[float] | None) -> list[int]:
    """The class of each row's confidence, 0 to ``CONFIDENCE_STEPS``."""
    return [int(CONFIDENCE_STEPS * min(max(value, 0.0), 1.0) + 0.5) for value in confidence or ()]
