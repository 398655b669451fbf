"""The controller that drafts as much as pays, by measured costs and by what was accepted so far.

Every step it admits the draft rows with the highest goodput (``spec.goodput``). Where a drafter says how sure it is of
its rows, they are weighed once more when they are known. A request whose drafts do not pay gets none, and is probed:
out of an account to which every step pays a small share of its time, and successful probes what they won. So the loss
is bounded, a dear drafter is probed more rarely than a cheap one, and good news is followed up at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.config import MAX_AUTO_DRAFT
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.types import Span, StepRecord
from outrider.spec.controller import DraftController, SpecStatus
from outrider.spec.costs import Costs
from outrider.spec.goodput import Wish, best_budgets, prices, worths, worthwhile
from outrider.spec.known import MEMORY, PULL, Request, Try
from outrider.spec.learning import Learner, Step, may_be_news
from outrider.spec.survival import classes_of

logger = logging.getLogger("outrider")

SHARE = 0.006
"""Share of the time of steps that may be lost to probes."""
PROBE = 2
"""Draft rows of a probe."""
TRIAL = 6
"""Every so many drafts a probe may carry a row that does not pay."""
LEAP = 4
"""Rows that a draft may have, and two more for each row of the longest one so far."""
DOUBT = 0.5
"""So many standard errors are in favour of what a request is doing: noise alone does not change its mind."""
SURE_DOUBT = 2.0
"""So many are in favour of going on where a drafter says how sure it is: ``trim`` refuses what is unlikely."""
USUAL = 12
"""Terms are worked out for so many rows of drafts, and for more where there are more."""
AGED = 32
"""Steps after which everything is decided anew: texts have grown, and the machine may be another."""

TOO_LITTLE = "too little would be accepted to pay for drafting"
TOO_BUSY = "drafting would not pay under this load"
PAYS = "drafts pay again"
JOINS = Draft.nothing("its prompt was only just read")


class Terms(NamedTuple):
    """By which drafts are weighed, in tokens. Nothing is known here of the rows of prompts."""

    ends: int  # sequences that the pass yields a token for
    rows: int  # theirs, with draft rows that are not weighed
    prices: Sequence[float]  # what each further row must bring
    worth: Sequence[float]  # what a right row is worth by its place in its draft
    per_seen: float  # what a row costs for each token of context that it sees
    rate: float  # what a second is worth


class AutoLength(DraftController):
    """Goodput-optimal draft lengths; see the module. ``on_change`` is told of every change of mind;
    ``clock`` says how long the controller itself takes."""

    def __init__(
        self,
        costs: Costs,
        longest: int = MAX_AUTO_DRAFT,
        on_change: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs
        self.longest = longest
        self.changes = 0
        self._tell = on_change or logger.info
        self._clock = clock
        self._learner = Learner(costs, clock)
        self._running: list[Request] = []  # whom the decision in force is about
        self._ids: list[int] = []
        self._age = 0  # steps since then
        self._tries: list[Try | None] = []  # in this step
        self._contexts: list[int] = []  # tokens that each of its sequences has
        self._at_once = False  # there may be news of it
        self._planned = False
        self._terms: Terms | None = None
        self._length = 0.0

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        return self._learner.choose(params, drafters)

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        if not spans:
            return []
        if self._planned:  # the others of this step are planned for: these join them in the next one
            for span in spans:
                span.draft = JOINS
            return [0] * len(spans)
        ids = [span.seq.id for span in spans]
        if ids != self._ids:  # whoever came or went is news
            self._learner.news += 3 * len(set(ids).symmetric_difference(self._ids))
        if self._age >= AGED or 4 * self._learner.news > len(ids):
            self._decide(spans, ids, rows)
        elif ids != self._ids:
            self._running, self._ids = [self._learner.request(span.seq) for span in spans], ids
            self._terms = None
        self._age += 1
        budgets: list[int] = []
        left = rows
        for i, span in enumerate(spans):
            budgets.append(min(self._running[i].planned, span.budget))
            left -= budgets[i]
        plain = self._learner.token_seconds
        earned = SHARE * plain
        for i, span in enumerate(spans):
            request = self._running[i]
            request.probing = False
            budget, price = budgets[i], request.price
            share = 1.5 if not budget else 2.0  # the rest of the account is left for ``trim``
            request.account = min(request.account + earned, max(plain, share * price))
            if not budget:
                if request.account >= price:
                    probe = min(self.longest if request.known.whole else PROBE, span.budget, left)
                    if probe > 0:
                        budgets[i], request.probing = probe, True
                        left -= probe
                        continue
                if span.budget:
                    span.draft = request.refused
                continue
            if left < 0:  # there was more room when it was decided
                cut = min(budget, -left)
                budgets[i], left = budget - cut, left + cut
            elif request.account >= share * price and left > 0 and budget < min(span.budget, self.longest):
                # One row more now and then, to know what it would bring.
                request.account -= price
                budgets[i] += 1
                left -= 1
        self._length += 0.02 * (sum(budgets) / len(spans) - self._length)
        self._planned = True
        return budgets

    def _decide(self, spans: Sequence[Span], ids: list[int], rows: int) -> None:
        """Draft lengths for these until something has changed; of the rows of prompts nothing is known here."""
        requests = [self._learner.request(span.seq) for span in spans]
        if self._age >= AGED:
            for request in requests:
                request.wish = None
        wishes = [self._wish(request, span) for request, span in zip(requests, spans, strict=True)]
        n, read = len(spans), sum(len(span.seq) for span in spans)
        seconds = self.costs.curve(n + sum(len(wish.survival) for wish in wishes) + PROBE + 2)
        decision = best_budgets(wishes, n, n, seconds, rows, self.costs.context(read, read))
        if not self._learner.token_seconds or all(span.n_new == 1 for span in spans):
            self._learner.token_seconds = 1 / decision.plain
        taken = sum(decision.budgets)
        more, spare = max(0.0, seconds[n + taken + 1] - seconds[n + taken]), max(0, rows - taken) // n
        for request, wish, planned, span in zip(requests, wishes, decision.budgets, spans, strict=True):
            request.planned = planned
            if planned and request.known.sure and wish.each < 0.1 * more:
                # It says how sure it is of rows that it drafts for next to nothing: ``trim`` chooses among them.
                request.planned += min(len(wish.survival) - planned, spare)
            if request.on is not (planned > 0) and span.budget:
                fixed = self.costs.context(len(span.seq), len(span.seq))
                alone = best_budgets([wish], 1, 1, seconds, rows, fixed)
                self._change(span.seq.id, request, planned > 0, TOO_BUSY if any(alone.budgets) else TOO_LITTLE)
            if planned:
                request.price = wish.each + wish.row + more
            else:
                probe = min(self.longest if request.known.whole else PROBE, max(1, span.budget))
                passes = self.costs.curve(n + probe)
                request.price = request.known.cost.at(probe) + self._learner.own
                if not request.known.sure:
                    request.price += passes[n + probe] - passes[n] + wish.row * probe
        self._running, self._ids, self._age, self._terms = requests, ids, 0, None
        self._learner.news = 0

    def trim(self, spans: Sequence[Span]) -> list[int]:
        begin, self._planned = self._clock(), False
        tries: list[Try | None] = []
        contexts: list[int] = []
        lengths: list[int] = []
        weighed: list[tuple[int, Try]] = []
        asks = news = False
        for i, span in enumerate(spans):
            draft, asked, context = span.draft, span.budget, len(span.seq.tokens)
            rows, tried = len(draft.tokens), None
            request = self._learner.requests.get(span.seq.id)
            if request is not None:
                if asked:
                    request.drafts += 1
                    asks = True
                    news = news or request.probing or may_be_news(request.drafts)
                tried = Try(request, request.drafts, asked, rows, rows, request.probing)
                if draft.n_verify < rows:
                    request.known.whole = True
                elif rows:
                    request.known.sure = draft.confidence is not None and not any(draft.q)
                    if request.known.sure:
                        weighed.append((i, tried))
            tries.append(tried)
            contexts.append(context)
            lengths.append(rows)
        if weighed:
            self._weigh(spans, contexts, lengths, weighed)
        self._tries, self._contexts, self._at_once = tries, contexts, news
        if asks:
            self._learner.took += self._clock() - begin
        return lengths

    def _weigh(
        self, spans: Sequence[Span], contexts: Sequence[int], lengths: list[int], weighed: Sequence[tuple[int, Try]]
    ) -> None:
        """Shortens these drafts to the rows that pay, now that their drafter has said how sure it is of them."""
        ends, wished, certain = 0, 0, sum(lengths)
        for span in spans:
            ends += span.reaches_end
        for i, _ in weighed:
            wished += lengths[i]
        rows = ends + certain - wished
        terms = self._terms
        if terms is None or terms.ends != ends or terms.rows != rows or len(terms.prices) < wished + 2:
            terms = self._terms = self._new_terms(spans, ends, rows, max(wished + 2, USUAL))
        gains: list[list[float]] = []
        costs: list[float] = []
        for i, tried in weighed:
            tried.classes = classes_of(spans[i].draft.confidence)
            gains.append(tried.request.known.calibration.gains(tried.classes, terms.worth))
            costs.append(terms.per_seen * contexts[i])
        budgets = worthwhile(gains, costs, terms.prices)
        for n, (i, tried) in enumerate(weighed):
            kept = tried.trusted = budgets[n]
            if kept < lengths[i]:
                if not tried.probing or tried.number % TRIAL == 1:
                    price = (max(0.0, terms.prices[sum(budgets)]) + costs[n]) / terms.rate
                    if tried.request.account >= price:
                        # A row more now and then, so that what is never kept is not forgotten.
                        tried.request.account -= price
                        kept += 1
                lengths[i] = tried.sent = kept
                tried.classes = tried.classes[:kept]

    def _new_terms(self, spans: Sequence[Span], ends: int, rows: int, most: int) -> Terms:
        """By which up to ``most`` rows are weighed. They stand until something is decided."""
        seconds = self.costs.curve(max(rows + most, ends * (most + 1)))
        read = sum([len(span.seq.tokens) for span in spans if span.reaches_end])
        rate = max(1.0, self._learner.speed.ratio) * ends / (seconds[ends] + self.costs.context(read, read))
        row = self.costs.per_seen * read / ends
        worth = worths(most, ends, seconds, self.costs.context(read, 0), row, rate)
        return Terms(
            ends, rows, prices(rows, seconds[: rows + most + 1], rate), worth, rate * self.costs.per_seen, rate
        )

    def observe(self, record: StepRecord) -> None:
        self._learner.add(Step(record, self._tries, self._contexts, self._learner.token_seconds), self._at_once)

    @property
    def status(self) -> SpecStatus:
        return self._learner.status(self._length)

    def _wish(self, request: Request, span: Span) -> Wish:
        if request.wish is not None and (len(request.wish.survival) <= span.budget):
            return request.wish
        drafter, depth = request.known, min(span.budget, self.longest)
        if not drafter.whole:  # a few lucky rows say nothing of many more
            depth = min(depth, LEAP + 2 * max(request.survival.tried, drafter.survival.tried))
        survival, presence = request.survival.estimate(depth)
        row = self.costs.per_seen * len(span.seq)
        first = drafter.cost.base + self._learner.own
        if drafter.whole and depth:
            each = sum(s * p for s, p in zip(survival[:depth], presence, strict=False)) / depth
            wish = Wish((each,) * depth, (1.0,) * depth, first, drafter.cost.slope, row)
        else:
            doubt = 0.0 if request.on is None else -DOUBT / math.sqrt(2 * MEMORY)
            if request.on:
                doubt = (SURE_DOUBT if drafter.sure else DOUBT) / math.sqrt(PULL + request.survival.known)
            chances, least = [], 1.0
            for s in survival[:depth]:
                if not s:
                    break
                least = min(least, s + doubt * math.sqrt(s * (1 - s)))
                chances.append(least)
            wish = Wish(chances, presence, first, drafter.cost.slope, row)
        request.wish = wish
        return wish

    def _change(self, seq_id: int, request: Request, on: bool, reason: str) -> None:
        first = request.on is None  # it had no mind to change
        request.on, request.reason = on, "" if on else reason
        request.refused = Draft.nothing(request.reason or TOO_LITTLE)
        if not first:
            self.changes += 1
            self._tell(f"speculation {'on' if on else 'off'} for sequence {seq_id}: {request.reason or PAYS}")
