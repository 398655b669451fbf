"""What the controller knows of drafters and of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.draft import Draft
from outrider.spec.costs import Line
from outrider.spec.goodput import Wish
from outrider.spec.survival import Calibration, Luck, Survival

MEMORY = 100
"""Drafts that an estimate of one request looks back on."""
LUCK_MEMORY = 33
"""Drafts that the luck of one request looks back on."""
PULL = 3
"""Drafts of a request that count as much as what is known of others."""
UNDECIDED = Draft.nothing("whether drafting pays is not decided yet")


@dataclass(slots=True)
class Drafter:
    """What is known of a drafter over all requests."""

    survival: Survival = field(default_factory=lambda: Survival(memory=50, pull=4))  # of new requests
    calibration: Calibration = field(default_factory=lambda: Calibration(memory=400))
    cost: Line = field(default_factory=lambda: Line(100))  # seconds a draft by the rows asked for
    whole: bool = False  # its drafts carry rows for its own use: they pay as a whole or not at all
    sure: bool = False  # of its last draft it said how sure it is, row by row: ``trim`` submits those that pay
    luck: Luck = field(default_factory=lambda: Luck(memory=10))  # of new requests


@dataclass(slots=True)
class Request:
    """What is known of one sequence, and what it is doing in this step."""

    drafter: str
    known: Drafter
    survival: Survival
    luck: Luck
    kind: str
    on: bool | None = None  # None: not decided yet
    reason: str = ""
    refused: Draft = UNDECIDED  # what it gets where it drafts nothing
    wish: Wish | None = None  # None: to be made anew
    planned: int = 0  # rows, by the decision in force
    price: float = math.inf  # seconds that a probe costs, or a row more
    account: float = 0.0  # seconds that may be lost to trying
    asked: int = 0  # rows, in this step
    trusted: int = 0  # of the draft's rows, those that were submitted because they should pay
    sent: int = 0  # rows that were submitted
    context: int = 0  # tokens that each of them sees
    probing: bool = False
    drafts: int = 0
    weighed: int = 0  # of these, by their drafter's confidence
    confidence: Sequence[float] = ()  # of the rows that were submitted
    expected: float = 0.0  # the chance of the first of these, by the calibration

    @staticmethod
    def new(name: str, drafter: Drafter, kind: str) -> Request:
        """A request of which nothing is known but who drafts for it."""
        survival = Survival(memory=MEMORY, pull=PULL, prior=drafter.survival)
        return Request(name, drafter, survival, Luck(LUCK_MEMORY, drafter.luck.ratio), kind)
