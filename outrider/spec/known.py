"""What the controller knows of drafters, of requests, and of one draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.draft import Draft
from outrider.spec.costs import Line
from outrider.spec.goodput import Wish
from outrider.spec.survival import Calibration, Survival

MEMORY = 100
"""Drafts that an estimate of one request looks back on."""
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


@dataclass(slots=True)
class Request:
    """What is known of one sequence, and what was decided for it."""

    drafter: str
    known: Drafter
    survival: Survival
    kind: str
    on: bool | None = None  # None: not decided yet
    reason: str = ""
    refused: Draft = UNDECIDED  # what it gets where it drafts nothing
    wish: Wish | None = None  # None: to be made anew
    planned: int = 0  # rows, by the decision in force
    price: float = math.inf  # seconds that a probe costs, or a row more
    account: float = 0.0  # seconds that may be lost to trying
    probing: bool = False  # in this step
    drafts: int = 0

    @staticmethod
    def new(name: str, drafter: Drafter, kind: str) -> Request:
        """A request of which nothing is known but who drafts for it."""
        survival = Survival(memory=MEMORY, pull=PULL, prior=drafter.survival)
        return Request(name, drafter, survival, kind)


@dataclass(slots=True)
class Try:
    """One sequence in one step: what was asked of its drafter, and what became of it before the pass."""

    request: Request
    number: int  # of the request's drafts
    asked: int  # rows; 0: no draft was asked for
    trusted: int  # of the draft's rows, those that are submitted because they should pay
    sent: int  # rows that are submitted
    probing: bool
    classes: Sequence[int] = ()  # of its drafter's confidence in the rows that are submitted
