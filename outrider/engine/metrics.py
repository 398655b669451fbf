"""Counters of an engine: raw numbers are stored, rates derived."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from outrider.core.types import FinishReason, StepRecord, StepTimes
from outrider.engine.answer import Answer, SpecStats
from outrider.engine.request import Request

PHASES = StepTimes._fields

PHASE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.75, 1.5, 5.0)
WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)
REQUEST_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

SEVERITY = (FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH, FinishReason.STOP)
"""A request whose answers ended differently counts under the first of these."""


@dataclass
class Histogram:
    """Samples (seconds) counted by upper bound: ``counts[i]`` of them were <= ``bounds[i]`` and above the one before;
    the last count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """``times`` samples of ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass
class EngineMetrics:
    """Totals since the engine was built. ``spec`` holds one set of counters a drafter: the sum over its answers.

    A token counts when it is handed out. Times: ``queue_time`` is a request's until its first rows,
    ``first_token_time`` one's from its arrival to its first token, ``request_time`` the whole of one that came to its
    end. ``token_time`` is every token's after an answer's first: k that a step gives at once share the time since the
    one before. So it has as many samples as there are tokens, less one an answer, and their sum is what answers took
    after their first tokens.
    """

    steps: int = 0
    prompt_rows: int = 0
    decode_rows: int = 0
    draft_rows: int = 0
    prompt_tokens: int = 0  # of the requests that began
    answer_prompt_tokens: int = 0  # of the answers that began: a prompt counts once for each
    cached_prompt_tokens: int = 0  # of these, those that were in the KV cache already
    generated_tokens: int = 0
    preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)  # requests
    drafter_failures: Counter[str] = field(default_factory=Counter)  # calls of a drafter that failed
    spec: dict[str, SpecStats] = field(default_factory=dict)
    phases: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(PHASE_BOUNDS) for name in PHASES})
    queue_time: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    first_token_time: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    token_time: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    request_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent so far by phase of a step."""
        return {name: histogram.total for name, histogram in self.phases.items()}

    @property
    def requests_aborted(self) -> int:
        return self.finished[FinishReason.ABORT]

    @property
    def requests_finished(self) -> int:
        """Requests that ended in any other way than by being aborted."""
        return self.finished.total() - self.requests_aborted

    def spec_of(self, drafter: str) -> SpecStats:
        """A drafter's counters."""
        if drafter not in self.spec:
            self.spec[drafter] = SpecStats()
        return self.spec[drafter]

    def observe(self, record: StepRecord) -> None:
        """Adds one step: its times and rows."""
        self.steps += 1
        for histogram, seconds in zip(self.phases.values(), record.times, strict=True):
            histogram.add(seconds)
        self.prompt_rows += record.prompt_rows
        self.decode_rows += record.decode_rows
        self.draft_rows += record.draft_rows

    def began(self, request: Request, answer: Answer, now: float) -> None:
        """An answer gets its first rows."""
        answer.began = now
        self.answer_prompt_tokens += answer.seq.n_prompt
        self.cached_prompt_tokens += answer.seq.n_cached
        if request.started is None:
            request.started = now
            self.prompt_tokens += len(request.prompt_ids)
            self.queue_time.add(now - request.arrived)

    def gained(self, request: Request, answer: Answer, tokens: int, now: float) -> None:
        """An answer hands out ``tokens`` more, at least one."""
        self.generated_tokens += tokens
        if request.first_token is None:
            request.first_token = now
            self.first_token_time.add(now - request.arrived)
        if answer.first_token is None:
            answer.first_token = answer.last_token = now
            tokens -= 1
        if tokens:
            self.token_time.add((now - answer.last_token) / tokens, tokens)
            answer.last_token = now

    def ended(self, request: Request, now: float) -> None:
        """A request's last answer ends."""
        request.finished = now
        reasons = {answer.finish for answer in request.answers}
        reason = next(reason for reason in SEVERITY if reason in reasons)
        self.finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.request_time.add(now - request.arrived)
