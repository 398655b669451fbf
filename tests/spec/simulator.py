"""A scripted engine for controllers: acceptance and times come from a script, nothing waits.

Each sequence drafts a chain. ``accept`` says with which chance a draft row is accepted, given the ones before it were,
by simulated time; ``presence`` how often the drafter finds anything. A step of n rows takes ``pass_seconds(n)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span, SpanRecord, StepRecord, StepTimes
from outrider.spec.controller import DraftController
from outrider.spec.costs import CostTable

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)


def table_of(pass_seconds: Callable[[int], float], rows: tuple[int, ...] = ROWS) -> CostTable:
    """The measured table that tells the truth about ``pass_seconds``."""
    return CostTable(rows, tuple(pass_seconds(n) for n in rows))


def cpu_pass(rows: int) -> float:
    """Seconds by rows as on a CPU: a first row that reads the weights, dear further ones, a step at 16."""
    return 3e-3 + 0.3e-3 * (rows - 1) + (0.6e-3 if rows > 1 else 0.0) + (1.5e-3 if rows > 16 else 0.0)


@dataclass
class Ticks:
    """A controller's clock: ``each`` seconds pass from one look at it to the next."""

    now: float = 0.0
    each: float = 2e-6

    def __call__(self) -> float:
        self.now += self.each
        return self.now


@dataclass
class Simulator:
    """Runs ``n`` sequences forever; ``look_up`` and ``per_row`` are the drafter's seconds a draft and a row.

    ``weigh`` are seconds a draft that the controller takes by its own ``clock``, half of them before the pass, and
    ``sure`` says that a draft comes with its confidence.
    """

    controller: DraftController
    accept: Callable[[float], float]
    n: int = 1
    pass_seconds: Callable[[int], float] = cpu_pass
    presence: Callable[[float], float] = lambda now: 1.0
    look_up: float = 0.1e-3
    per_row: float = 0.0
    weigh: float = 0.0
    sure: bool = False
    noise: float = 0.05
    max_draft: int = 256
    room: int = 512
    seed: int = 0
    drafter: str = "scripted"
    first_id: int = 0
    clock: Ticks = field(default_factory=Ticks)
    now: float = 0.0
    tokens: int = 0
    steps: int = 0
    budgets: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        spec = SpecParams(drafter=self.drafter)
        self.sequences = [
            Sequence(self.first_id + i, [1] * 64, 64, SamplingParams(temperature=0), spec, seed=i)
            for i in range(self.n)
        ]

    def run(self, seconds: float) -> float:
        """Runs for so many simulated seconds; returns the tokens a second in them."""
        begin, tokens = self.now, self.tokens
        while self.now < begin + seconds:
            self.step()
        return (self.tokens - tokens) / (self.now - begin)

    def step(self) -> None:
        spans = [Span(seq, 63, 1, self.max_draft) for seq in self.sequences]
        budgets = self.controller.budgets(spans, self.room - self.n)
        drafting = 0.0
        for span, budget in zip(spans, budgets, strict=True):
            span.budget = min(budget, span.budget)
            if span.budget:
                drafting += self.look_up + self.per_row * span.budget
                if self.random.random() < self.presence(self.now):
                    span.draft = Draft.chain([1] * span.budget)
                    if self.sure:
                        span.draft = span.draft.sure([0.5**i for i in range(1, span.budget + 1)])
        weighing = self.weigh * sum(span.budget > 0 for span in spans)
        self.clock.each = 2e-6 + weighing / 2
        for span, rows in zip(spans, self.controller.trim(spans), strict=True):
            span.draft = span.draft.truncated(rows)
        records = []
        for span in spans:
            right = 0
            while right < len(span.draft) and self.random.random() < self.accept(self.now):
                right += 1
            rows = len(span.draft)
            depths = tuple(range(1, rows + 1))
            path = tuple(range(right))
            records.append(SpanRecord(span.seq.id, self.drafter, 1 + rows, rows, depths, right, right + 1, path=path))
        n_rows = sum(record.rows for record in records)
        wobble = self.random.gauss(1.0, self.noise) if self.noise else 1.0
        forward = self.pass_seconds(n_rows) * max(0.5, wobble)
        times = StepTimes(0.02e-3, drafting + weighing / 2, forward, 0.05e-3, 0.05e-3 + weighing / 2)
        self.now += times.total
        self.steps += 1
        self.tokens += sum(record.emitted for record in records)
        self.budgets.append((self.now, tuple(span.budget for span in spans)))
        self.controller.observe(
            StepRecord(
                times=times,
                prompt_rows=0,
                decode_rows=self.n,
                draft_rows=n_rows - self.n,
                spans=tuple(records),
                free_blocks=0,
                preempted=0,
                running=self.n,
                waiting=0,
                draft_seconds={self.drafter: drafting} if drafting else {},
            )
        )
        self.clock.each = 2e-6
