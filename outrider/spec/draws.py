"""Where the random decisions of drafting and verification come from: counters, never generator state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from outrider.core.dist import Dist
from outrider.core.errors import SettingError, nearest
from outrider.core.rng import Stream, uniform
from outrider.core.types import Draws

T = TypeVar("T")


class CounterDraws(NamedTuple):
    """Independent draws of one step; ``base`` is the number of committed tokens when the step began.

    Numbers are keyed by (base, depth), not by their sum, the position. Block verification looks at the numbers of
    depths that it then rejects; a later step that met them again at the same position would no longer draw
    independently of what it already knows. A step always adds a token, so no later step has the same base.
    """

    seed: int
    base: int

    def accept(self, prob: float, depth: int, index: int) -> bool:
        """True with probability ``prob``."""
        if not 0.0 < prob < 1.0:
            return prob >= 1.0
        return uniform(self.seed, self.base, depth, index, Stream.ACCEPT) < prob

    def pick(self, dist: Dist, depth: int) -> int:
        """A token drawn from ``dist``."""
        u = 0.0 if dist.certain else uniform(self.seed, self.base, depth, 0, Stream.SAMPLE)
        return dist.sample(u)


class CoupledDraws(NamedTuple):
    """The target's own token at every absolute position, a function of seed and position: for coupled verification."""

    seed: int
    base: int

    def accept(self, prob: float, depth: int, index: int) -> bool:
        """Refused: a drafter that shares this noise is not independent of it, so an acceptance test would be biased."""
        raise NotImplementedError("coupled draws only pick")

    def pick(self, dist: Dist, depth: int) -> int:
        """The target's token at position base + depth - 1 (depth 1 is the first new token, whose index is base)."""
        return dist.gumbel_max(self.seed, self.base + depth - 1)


def draft_pick(dist: Dist, seed: int, base: int, depth: int, index: int) -> int:
    """A drafter's draw from ``dist``, independent of every draw of verification.

    No two draws of one step for one sequence may share (depth, index): equal numbers would tie the tokens together,
    and the reported q would no longer be the law of each.
    """
    return dist.sample(uniform(seed, base, depth, index, Stream.DRAFT))


def coupled_draft_pick(dist: Dist, seed: int, base: int, depth: int, index: int) -> int:
    """A drafter's draw that shares the target's noise: the likeliest guess at what coupled verification will pick.

    Remove earlier siblings from ``dist`` to get the next best guess; ``index`` changes nothing.
    """
    return dist.gumbel_max(seed, base + depth - 1)


DraftPick = Callable[[Dist, int, int, int, int], int]
"""``pick(dist, seed, base, depth, index) -> token``."""

_DRAWS: dict[str, Callable[[int, int], Draws]] = {
    "standard": CounterDraws,
    "block": CounterDraws,
    "coupled": CoupledDraws,
}
_DRAFT_PICKS: dict[str, DraftPick] = {
    "standard": draft_pick,
    "block": draft_pick,
    "coupled": coupled_draft_pick,
}


def for_method(table: Mapping[str, T], method: str) -> T:
    """The entry of a verification method; SettingError when there is no such method."""
    if method not in table:
        known = ", ".join(table)
        hint = nearest(method, table)
        raise SettingError(f"rejection_sample_method is {method!r}; allowed is one of {known}{hint}")
    return table[method]


def draws_for(method: str, seed: int, base: int) -> Draws:
    """The target's draws of one step under a verification method; ``base`` = committed tokens before the step."""
    return for_method(_DRAWS, method)(seed, base)


def draft_pick_for(method: str) -> DraftPick:
    """How a drafter draws its tokens under a verification method."""
    return for_method(_DRAFT_PICKS, method)
