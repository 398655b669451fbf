"""Which of several drafters serves best: their speed over plain decoding so far, and now and then a try of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.params import SamplingParams

ENOUGH = 60.0
"""Steps of a drafter before its speed is believed,"""
TRIES = 4
"""or this many requests, of however many steps."""
EVERY = 20
"""Of so many requests one goes to another drafter than the best, in turn."""
KEPT = 1 - 1 / 150
"""What a speed keeps from step to step."""
BETTER = 1.03
"""A drafter replaces the one in use when it is so many times as fast."""


@dataclass(slots=True)
class Speed:
    """Plain decoding's seconds for the tokens that came out, over the seconds that were spent; both fade."""

    earned: float = 0.0
    spent: float = 0.0
    steps: float = 0.0

    def add(self, earned: float, spent: float) -> None:
        self.earned = self.earned * KEPT + earned
        self.spent = self.spent * KEPT + spent
        self.steps = self.steps * KEPT + 1

    @property
    def ratio(self) -> float:
        return self.earned / self.spent if self.spent > 0 else 1.0


class Choice:
    """Chooses among drafters for one class of requests; sticks to one until another is clearly better."""

    def __init__(self) -> None:
        self.speeds: dict[str, Speed] = {}
        self._tries: Counter[str] = Counter()
        self._best = ""
        self._asked = 0

    def speed_of(self, drafter: str) -> Speed:
        known = self.speeds.get(drafter)
        if known is None:
            known = self.speeds[drafter] = Speed()
        return known

    def choose(self, drafters: Sequence[str]) -> str:
        """One of ``drafters``: each is tried first, then the best serves."""
        speeds = {name: self.speed_of(name) for name in drafters}
        untried = [name for name in drafters if speeds[name].steps < ENOUGH and self._tries[name] < TRIES]
        if untried:
            name = min(untried, key=lambda name: self._tries[name])
            self._tries[name] += 1
            return name
        if self._best not in speeds:
            self._best = drafters[0]
        fastest = max(drafters, key=lambda name: speeds[name].ratio)
        if speeds[fastest].ratio > BETTER * speeds[self._best].ratio:
            self._best = fastest
        self._asked += 1
        others = [name for name in drafters if name != self._best]
        if others and self._asked % EVERY == 0:
            return others[self._asked // EVERY % len(others)]
        return self._best


def kind_of(params: SamplingParams) -> str:
    """Requests of one kind are expected to suit the same drafter."""
    return "greedy" if params.greedy else "sampled"
