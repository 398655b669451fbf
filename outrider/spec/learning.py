"""What is learnt from the steps that were made: of costs, of drafters, of requests, and of speculation as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.params import SamplingParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import SpanRecord, StepRecord
from outrider.spec.choice import Choice, Speed, kind_of
from outrider.spec.controller import SpecStatus
from outrider.spec.costs import MOST, Costs
from outrider.spec.known import Drafter, Request, Try

LATE = 16
"""Steps of a sequence, or of several together, that wait at most to be learnt from. Many at once take little more time
than one: after a pass the caches are full of weights, so that what costs is to come here at all."""
EARLY, NEWS = (2, 4, 8), 16
"""After so many drafts of a request there may be news of it, and then after every so many there is."""
WELL_KNOWN, SELDOM = 64, 5
"""Steps with drafts, or without, after which only every ``SELDOM``th of one sequence tells of costs."""
ON, OFF = 0.2, 0.1
"""Speculation is said to be on when more than this share of the steps lately carried drafts, probes aside, and off when
fewer did."""
OWN_MEMORY = 200
"""Drafts after which what the controller took for one has faded to 1/e."""
REMEMBERED = 4096
"""Requests whose estimates are kept, the newest ones."""
GRANT = 0.5
"""What the account of a new request holds, in plain steps: to find out soon whether it is like the others."""
IDLE = "little is found to draft"


class Step(NamedTuple):
    """What became of a step. ``tries`` and ``contexts``, the tokens that its sequences had, go with the record's spans;
    a try is None for a request that is not known. A token of plain decoding would have taken ``token_seconds`` under
    its load."""

    record: StepRecord
    tries: Sequence[Try | None]
    contexts: Sequence[int]
    token_seconds: float


class Learner:
    """Learns from steps, a few at a time.

    ``clock`` says how long that takes. ``took`` are the seconds that the controller took to weigh the drafts of the
    steps that wait, and ``own`` what a draft costs it: to weigh and to learn from, not to decide that it is asked for.
    """

    def __init__(self, costs: Costs, clock: Callable[[], float]) -> None:
        self.costs = costs
        self.drafters: dict[str, Drafter] = {}
        self.requests: dict[int, Request] = {}
        self.speed = Speed()
        self.news = 0  # wishes that have changed
        self.token_seconds = 0.0  # plain decoding's, by the decision in force
        self.own = self.took = 0.0
        self._weighed = 0  # drafts that ``own`` is known of
        self._clock = clock
        self._choices: dict[str, Choice] = {}
        self._waiting: list[Step] = []
        self._sequences = 0  # in these
        self._earned = self._spent = 0.0  # the seconds of ``speed`` in all
        self._steps = [0, 0]  # without drafts, and with
        self._share = 0.0  # of the steps lately, those with drafts that are no probes
        self._recent: Request | None = None
        self._on = False
        self._changed: float | None = None

    def request(self, seq: Seq) -> Request:
        """What is known of a sequence; a new one is like its drafter's others."""
        name = seq.spec.drafter or ""
        request = self.requests.get(seq.id)
        if request is None or request.drafter != name:
            drafter = self.drafters.setdefault(name, Drafter())
            request = self.requests[seq.id] = Request.new(name, drafter, kind_of(seq.params))
            request.account = GRANT * self.token_seconds
            if len(self.requests) > REMEMBERED:
                del self.requests[next(iter(self.requests))]
        return request

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        """The drafter of a new request."""
        self.catch_up()
        return self._choices.setdefault(kind_of(params), Choice()).choose(drafters)

    def add(self, step: Step, at_once: bool) -> None:
        """Learns from this step and those that wait if it is to be ``at_once``, or if they are many."""
        self._waiting.append(step)
        self._sequences += len(step.tries)
        if at_once or self._sequences >= LATE:
            self.catch_up()

    def catch_up(self) -> None:
        """Learns from all that wait."""
        begin, drafts = self._clock(), 0
        sequences, waiting = self._sequences, self._waiting
        self._sequences, self._waiting = 0, []  # an interrupt must not make it learn twice
        for step in waiting:
            drafted = bool(step.record.draft_seconds)
            count = self._steps[drafted] = self._steps[drafted] + 1
            if count < WELL_KNOWN or count % SELDOM == 0 or len(step.tries) > 1:
                self._learn_costs(step)
            drafts += self._learn_step(step)
        if drafts:
            self._weighed += drafts
            own = self.took / drafts + (self._clock() - begin) / sequences
            known = min(self._weighed, max(OWN_MEMORY, drafts))
            self.own += (min(own, MOST * self.own or own) - self.own) * drafts / known
        self.took = 0.0

    def _learn_costs(self, step: Step) -> None:
        """Learns from the seconds of pass and drafters."""
        record = step.record
        rows = record.decode_rows + record.draft_rows
        if not record.prompt_rows and rows:
            times = record.times
            other = times.schedule + times.verify + times.commit
            seen = sum([span.rows * context for span, context in zip(record.spans, step.contexts, strict=True)])
            self.costs.observe(rows, sum(step.contexts), seen, times.forward, other)
        for name, seconds in record.draft_seconds.items():
            asked = [tried.asked for tried in step.tries if tried is not None and tried.request.drafter == name]
            drafts = len(asked) - asked.count(0)
            if drafts:
                self.drafters[name].cost.add(sum(asked) / drafts, seconds / drafts)

    def _learn_step(self, step: Step) -> int:
        """Learns what the drafts were worth; returns how many were asked for."""
        record, plain, drafts = step.record, step.token_seconds, 0
        per_row = earned = spent = 0.0  # seconds of a draft row in the pass, context excepted
        drafting = False
        if record.draft_rows:
            seconds = self.costs.curve(record.decode_rows + record.draft_rows)
            more = seconds[record.decode_rows + record.draft_rows] - seconds[record.decode_rows]
            per_row = more / record.draft_rows
        for tried, context, span in zip(step.tries, step.contexts, record.spans, strict=True):
            if tried is None or tried.request.drafter != span.drafter or not span.emitted:
                continue
            self._recent = request = tried.request
            cost = 0.0
            if tried.asked:
                drafts += 1
                cost = self._learn(tried, span, per_row + self.costs.per_seen * context, plain)
                drafting = drafting or (tried.trusted > 0 and not tried.probing)
            gain, loss = span.emitted * plain, plain + cost
            earned, spent = earned + gain, spent + loss
            choice = self._choices.get(request.kind)
            if choice is not None:
                choice.speed_of(request.drafter).add(gain, loss)
        self._share += 0.03 * (drafting - self._share)
        if self._share < OFF if self._on else self._share > ON:
            self._on, self._changed = not self._on, time.perf_counter()
        if spent:
            self.speed.add(earned, spent)
            self._earned, self._spent = self._earned + earned, self._spent + spent
        return drafts

    def _learn(self, tried: Try, span: SpanRecord, per_row: float, plain: float) -> float:
        """What a draft was worth, whose rows cost ``per_row`` seconds; returns the seconds that it cost."""
        request = tried.request
        drafter = request.known
        trusted = min(tried.trusted, span.drafted)
        request.survival.add(tried.asked, trusted, [row for row in span.path if row < trusted])
        if _is_news(tried, span):
            request.wish = None
            self.news += 1
        if tried.classes:
            drafter.calibration.add(tried.classes, span.path)
        cost = drafter.cost.at(tried.asked) + self.own + per_row * tried.sent
        if tried.probing:
            won = span.accepted * plain
            request.account = min(request.account - cost + won, max(plain, 1.5 * cost))
        return cost

    def status(self, length: float) -> SpecStatus:
        """Of the requests that were seen last; the estimates are those of the last request's drafter."""
        self.catch_up()
        request = self._recent
        if request is None:
            return SpecStatus(False, "no request yet", "", 0.0)
        survival, _ = self.drafters[request.drafter].survival.estimate(8)
        speedup = self.speed.ratio
        reason = f"an estimated {speedup:.2f} times as fast as plain decoding" if self._on else request.reason or IDLE
        return SpecStatus(
            self._on,
            reason,
            request.drafter,
            length,
            tuple(survival[:8]),
            speedup,
            self._changed,
            self._earned,
            self._spent,
        )


def may_be_news(number: int) -> bool:
    """Whether a request's draft of this number is to be learnt from at once."""
    return number % NEWS == 0 or number in EARLY


def _is_news(tried: Try, span: SpanRecord) -> bool:
    """Whether the request's wish is to be made anew. A further probe in vain is no news, as nothing is drafted anyway;
    nor is it that first drafts are right, as that is what they were made for."""
    if tried.probing:
        return bool(span.path) or tried.number in EARLY
    return tried.number % NEWS == 0 or (tried.number in EARLY and not span.path)
