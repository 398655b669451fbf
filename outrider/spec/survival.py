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
"""Rows that should be accepted before half is believed of what a request says about the calibration."""
CONFIDENCE_STEPS = 12
"""Classes of a drafter's confidence that are counted apart."""


class Counts:
    """Fading counts by place in the draft: acceptance by rows that were there, presence by rows that were asked for."""

    def __init__(self, memory: float) -> None:
        """``memory``: drafts after which a count has faded to 1/e."""
        self._keep = 1 - 1 / memory
        self.asked: list[float] = []
        self.filled: list[float] = []  # of these
        self.there: list[float] = []
        self.accepted: list[float] = []  # of these

    def add(self, asked: int, there: int, accepted: Collection[int]) -> None:
        """One draft: ``asked`` rows were allowed, ``there`` were verified, the rows ``accepted`` were right."""
        keep, there = self._keep, min(there, asked)
        for counts, rows in (
            (self.asked, min(asked, SEEKING)),
            (self.filled, min(asked, SEEKING)),
            (self.there, there),
            (self.accepted, there),
        ):
            if len(counts) < rows:
                counts.extend([0.0] * (rows - len(counts)))
        for i in range(min(asked, SEEKING)):
            self.asked[i] = self.asked[i] * keep + 1
            self.filled[i] = self.filled[i] * keep + (i < there)
        for i in range(there):
            self.there[i] = self.there[i] * keep + 1
            self.accepted[i] = self.accepted[i] * keep + (i in accepted)


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
        return self.counts.there[0] if self.counts.there else 0.0

    @property
    def tried(self) -> int:
        """Rows of the longest draft there was."""
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
        base = ([], []) if self._prior is None else self._prior.estimate(depth)
        chance = there = 1.0
        step = FIRST_GUESS
        for i in range(depth):
            if self._prior is not None:
                before = base[0][i - 1] if i else 1.0
                step = base[0][i] / before if before > 0 else 0.0
            guess, likely = chance * step, there
            if base[1]:
                likely = min(there, base[1][i])
            if i < len(counts.there):
                guess = min(chance, (counts.accepted[i] + pull * guess) / (counts.there[i] + pull))
            if i < len(counts.asked):
                missing = pull * PATIENCE
                likely = min(there, (counts.filled[i] + missing * likely) / (counts.asked[i] + missing))
            if self._prior is None and i and chance > 0:
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

    def chances(self, confidence: Sequence[float]) -> list[float]:
        """The chance of each row to be accepted."""
        return [self._accepted[k] / self._there[k] for k in _classes(confidence)]

    def add(self, confidence: Sequence[float], accepted: Collection[int]) -> None:
        """Rows of this confidence were verified, and those ``accepted`` were right."""
        for i, k in enumerate(_classes(confidence)):
            self._there[k] = self._there[k] * self._keep + 1
            self._accepted[k] = self._accepted[k] * self._keep + (i in accepted)


class Luck:
    """How many times as many rows are accepted as the calibration says: of a request, or of new requests."""

    def __init__(self, memory: float, usual: float = 1.0) -> None:
        """``usual`` is believed with the weight of ``LUCK`` accepted rows."""
        self._rate, self._usual = 1 / memory, usual
        self._foreseen, self._accepted = LUCK, LUCK * usual

    @property
    def ratio(self) -> float:
        return self._accepted / self._foreseen

    def add(self, foreseen: float, accepted: float) -> None:
        """A draft of which so many rows should have been accepted by the calibration, and so many were."""
        self._foreseen += self._rate * (LUCK - self._foreseen) + foreseen
        self._accepted += self._rate * (LUCK * self._usual - self._accepted) + accepted


def _classes(confidence: Sequence[float]) -> list[int]:
    return [max(0, min(CONFIDENCE_STEPS, int(CONFIDENCE_STEPS * value + 0.5))) for value in confidence]
