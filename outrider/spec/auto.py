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

from outrider.core.config import MAX_AUTO_DRAFT
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span, SpanRecord, StepRecord
from outrider.spec.choice import Choice, Speed, kind_of
from outrider.spec.controller import DraftController, SpecStatus
from outrider.spec.costs import Costs, Line
from outrider.spec.goodput import Wish, best_budgets, worthwhile
from outrider.spec.known import MEMORY, PULL, Drafter, Request
from outrider.spec.survival import TOLD

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
"""So many standard errors are in favour of what a request is doing: noise alone does not change its mind. Twice as many
where a drafter says how sure it is: ``trim`` refuses what is unlikely."""
GRANT = 0.5
"""What the account of a new request holds, in plain steps: to find out soon whether it is like the others."""
EARLY, NEWS = (1, 2, 4, 8), 16
"""After so many drafts of a request, and then every so many, its wish is made anew: deciding takes time too."""
WELL_KNOWN = 64
"""Steps with drafts, or without, after which only every fifth short one tells of costs: learning takes time too."""
AGED = 32
"""Steps after which everything is decided anew: texts have grown, and the machine may be another."""
ON, OFF = 0.2, 0.1
"""Speculation is said to be on when more than this share of the steps lately carried drafts, probes aside, and off when
fewer did."""
REMEMBERED = 4096
"""Requests whose estimates are kept, the newest ones."""

TOO_LITTLE = "too little would be accepted to pay for drafting"
TOO_BUSY = "drafting would not pay under this load"
IDLE = "little is found to draft"
PAYS = "drafts pay again"
JOINS = Draft.nothing("its prompt was only just read")


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
        self._drafters: dict[str, Drafter] = {}
        self._requests: dict[int, Request] = {}
        self._choices: dict[str, Choice] = {}
        self._running: list[Request] = []  # whom the decision in force is about
        self._ids: list[int] = []
        self._news = self._age = 0  # since then: wishes that have changed, steps
        self._read = self._seen = 0  # tokens of context in this step: of its sequences, and of all its rows
        self._token_seconds = 0.0  # plain decoding's, under the load of this step
        self._speed = Speed()
        self._earned = self._spent = 0.0  # the same seconds in all
        self._steps = [0, 0]  # without drafts, and with
        self._planned = False  # in this step
        self._own = Line(200)  # the controller's own seconds in a step, by the drafts in it
        self._took = 0.0  # of it, in this step
        self._length = 0.0
        self._share = 0.0  # of the steps lately, those with drafts that are no probes
        self._recent: Request | None = None
        self._on = False
        self._changed: float | None = None

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        return self._choices.setdefault(kind_of(params), Choice()).choose(drafters)

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        begin = self._clock()
        budgets = self._budgets(spans, rows) if spans else []
        self._took += self._clock() - begin
        return budgets

    def _budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        if self._planned:  # the others of this step are planned for: these join them in the next one
            for span in spans:
                span.draft = JOINS
            return [0] * len(spans)
        self._planned = True
        ids = [span.seq.id for span in spans]
        if ids != self._ids:  # whoever came or went is news
            self._news += 3 * len(set(ids).symmetric_difference(self._ids))
        if self._age >= AGED or 4 * self._news > len(ids):
            self._decide(spans, ids, rows)
        elif ids != self._ids:
            self._running, self._ids = [self._request(span.seq) for span in spans], ids
        self._age += 1
        budgets: list[int] = []
        left = rows
        for i, span in enumerate(spans):
            budgets.append(min(self._running[i].planned, span.budget))
            left -= budgets[i]
        earned, plain = SHARE * self._token_seconds, self._token_seconds
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
        return budgets

    def _decide(self, spans: Sequence[Span], ids: list[int], rows: int) -> None:
        """Draft lengths for these until something has changed; of the rows of prompts nothing is known here."""
        requests = [self._request(span.seq) for span in spans]
        if self._age >= AGED:
            for request in requests:
                request.wish = None
        wishes = [self._wish(request, span) for request, span in zip(requests, spans, strict=True)]
        n, read = len(spans), sum(len(span.seq) for span in spans)
        seconds = self.costs.curve(n + sum(len(wish.survival) for wish in wishes) + PROBE + 2)
        decision = best_budgets(wishes, n, n, seconds, rows, self.costs.context(read, read))
        if not self._token_seconds or all(span.n_new == 1 for span in spans):
            self._token_seconds = 1 / decision.plain
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
                request.price = request.known.cost.at(probe) + self._own.slope
                if not request.known.sure:
                    request.price += passes[n + probe] - passes[n] + wish.row * probe
        self._running, self._ids, self._news, self._age = requests, ids, 0, 0

    def trim(self, spans: Sequence[Span]) -> list[int]:
        begin = self._clock()
        lengths: list[int] = []
        weighed: list[tuple[int, Request]] = []
        for i, span in enumerate(spans):
            draft, rows = span.draft, len(span.draft.tokens)
            lengths.append(rows)
            request = self._requests.get(span.seq.id)
            if request is None:
                continue
            request.asked, request.context, request.confidence = span.budget, len(span.seq.tokens), ()
            request.trusted = request.sent = rows
            if draft.n_verify < rows:
                request.known.whole = True
            elif rows:
                request.known.sure = draft.confidence is not None and not any(draft.q)
                if request.known.sure:
                    weighed.append((i, request))
        if weighed:
            self._weigh(spans, lengths, weighed)
        read = seen = 0
        for i, span in enumerate(spans):
            context = len(span.seq.tokens)
            read += context
            seen += (span.n_new + lengths[i]) * context
        self._read, self._seen = read, seen
        self._took += self._clock() - begin
        return lengths

    def _weigh(self, spans: Sequence[Span], lengths: list[int], weighed: Sequence[tuple[int, Request]]) -> None:
        """Shortens these drafts to the rows that pay, now that their drafter has said how sure it is of them."""
        likely: list[list[float]] = []
        wished = 0
        for i, request in weighed:
            chances = request.known.calibration.chances(spans[i].draft.confidence or ())
            # Rows of one draft are right together, so that luck is told by the first; and by its chance as it is: luck
            # that is cut off at 1 would confirm itself.
            request.expected, ratio, lucky = chances[0], request.luck.ratio, 1.0
            likely.append([lucky := min(lucky, chance * ratio) for chance in chances])
            wished += lengths[i]
        ends = read = 0
        for span in spans:
            if span.reaches_end:
                ends += 1
                read += len(span.seq.tokens)
        own_rows = ends + sum(lengths) - wished
        seconds = self.costs.curve(own_rows + wished + 2)
        rate = max(1.0, self._speed.ratio) * ends / (seconds[ends] + self.costs.context(read, read))
        row = [self.costs.per_seen * request.context for _, request in weighed]
        budgets = worthwhile(likely, row, own_rows, seconds, rate)
        kept_rows = own_rows + sum(budgets)
        more = max(0.0, seconds[kept_rows + 1] - seconds[kept_rows])
        for n, (i, request) in enumerate(weighed):
            kept = request.trusted = budgets[n]
            price = more + row[n]
            dropped = kept < lengths[i] and (not request.probing or request.drafts % TRIAL == 0)
            if dropped and request.account >= price:
                # A row more now and then, so that what is never kept is not forgotten.
                request.account -= price
                kept += 1
            lengths[i] = request.sent = kept
            request.confidence = (spans[i].draft.confidence or ())[:kept]

    def observe(self, record: StepRecord) -> None:
        drafted = bool(record.draft_seconds)
        self._steps[drafted] += 1
        told = len(record.spans) > 1 or self._steps[drafted] < WELL_KNOWN or not self._steps[drafted] % 5
        drafts = self._learn_costs(record) if told else 0
        begin = self._clock()  # only now: other steps go without the above
        self._learn_step(record)
        if told:
            self._own.add(drafts, self._took + self._clock() - begin)
        self._took = 0.0

    def _learn_step(self, record: StepRecord) -> None:
        self._planned = False
        per_row = earned = spent = 0.0  # seconds of a draft row in the pass, context excepted
        drafting = False
        if record.draft_rows:
            seconds = self.costs.curve(record.decode_rows + record.draft_rows)
            more = seconds[record.decode_rows + record.draft_rows] - seconds[record.decode_rows]
            per_row = more / record.draft_rows
        for span in record.spans:
            request = self._requests.get(span.seq_id)
            if request is None or request.drafter != span.drafter or not span.emitted:
                continue
            self._recent = request
            cost = self._learn(request, span, per_row)
            drafting = drafting or (request.trusted > 0 and not request.probing)
            gain, loss = span.emitted * self._token_seconds, self._token_seconds + cost
            earned, spent = earned + gain, spent + loss
            choice = self._choices.get(request.kind)
            if choice is not None:
                choice.speed_of(request.drafter).add(gain, loss)
        self._share += 0.03 * (drafting - self._share)
        if self._share < OFF if self._on else self._share > ON:
            self._on, self._changed = not self._on, time.perf_counter()
        if spent:
            self._speed.add(earned, spent)
            self._earned, self._spent = self._earned + earned, self._spent + spent

    @property
    def status(self) -> SpecStatus:
        """Of the requests that were seen last; the estimates are those of the last request's drafter."""
        request = self._recent
        if request is None:
            return SpecStatus(False, "no request yet", "", 0.0)
        survival, _ = self._drafters[request.drafter].survival.estimate(8)
        speedup = self._speed.ratio
        reason = f"an estimated {speedup:.2f} times as fast as plain decoding" if self._on else request.reason or IDLE
        return SpecStatus(
            self._on,
            reason,
            request.drafter,
            self._length,
            tuple(survival[:8]),
            speedup,
            self._changed,
            self._earned,
            self._spent,
        )

    def _request(self, seq: Seq) -> Request:
        name = seq.spec.drafter or ""
        request = self._requests.get(seq.id)
        if request is None or request.drafter != name:
            drafter = self._drafters.setdefault(name, Drafter())
            request = self._requests[seq.id] = Request.new(name, drafter, kind_of(seq.params))
            request.account = GRANT * self._token_seconds
            if len(self._requests) > REMEMBERED:
                del self._requests[next(iter(self._requests))]
        return request

    def _wish(self, request: Request, span: Span) -> Wish:
        if request.wish is not None and (len(request.wish.survival) <= span.budget):
            return request.wish
        drafter, depth = request.known, min(span.budget, self.longest)
        if not drafter.whole:  # a few lucky rows say nothing of many more
            depth = min(depth, LEAP + 2 * max(request.survival.tried, drafter.survival.tried))
        survival, presence = request.survival.estimate(depth)
        row = self.costs.per_seen * len(span.seq)
        first = drafter.cost.base + self._own.slope
        if drafter.whole and depth:
            each = sum(s * p for s, p in zip(survival[:depth], presence, strict=False)) / depth
            wish = Wish((each,) * depth, (1.0,) * depth, first, drafter.cost.slope, row)
        else:
            doubt = 0.0 if request.on is None else -DOUBT / math.sqrt(2 * MEMORY)
            if request.on:
                doubt = DOUBT * (1 + drafter.sure) / math.sqrt(PULL + request.survival.known)
            chances, least = [], 1.0
            for s in survival[:depth]:
                if not s:
                    break
                least = min(least, s + doubt * math.sqrt(s * (1 - s)))
                chances.append(least)
            wish = Wish(chances, presence, first, drafter.cost.slope, row)
        request.wish = wish
        return wish

    def _learn_costs(self, record: StepRecord) -> int:
        """Learns from the seconds of pass and drafters; returns how many drafts were asked for."""
        rows = record.prompt_rows + record.decode_rows + record.draft_rows
        if not record.prompt_rows and rows:
            times = record.times
            other = times.schedule + times.verify + times.commit
            self.costs.observe(rows, self._read, self._seen, times.forward, other)
        total = 0
        for name, seconds in record.draft_seconds.items():
            drafts = rows = 0
            for span in record.spans:
                request = self._requests.get(span.seq_id)
                if request is not None and request.asked and span.drafter == name:
                    drafts += 1
                    rows += request.asked
            if drafts and name in self._drafters:
                self._drafters[name].cost.add(rows / drafts, seconds / drafts)
            total += drafts
        return total

    def _learn(self, request: Request, span: SpanRecord, per_row: float) -> float:
        """What a draft was worth, and the seconds that it cost."""
        if not request.asked:
            return 0.0
        drafter = request.known
        trusted = min(request.trusted, span.drafted)
        request.survival.add(request.asked, trusted, [row for row in span.path if row < trusted])
        request.drafts += 1
        news = bool(span.path) if request.probing else request.drafts % NEWS == 0
        if news or request.drafts in EARLY:  # a probe in vain is none, as nothing is drafted anyway
            request.wish = None
            self._news += 1
        if request.confidence:
            drafter.calibration.add(request.confidence, span.path)
            lucky = float(0 in span.path)
            request.luck.add(request.expected, lucky)
            request.weighed += 1
            if request.weighed <= TOLD:
                drafter.luck.add(request.expected, lucky)
        cost = drafter.cost.at(request.asked) + self._own.slope
        if request.sent:
            cost += (per_row + self.costs.per_seen * request.context) * request.sent
        if request.probing:
            won = span.accepted * self._token_seconds
            request.account = min(request.account - cost + won, max(self._token_seconds, 1.5 * cost))
        request.asked = 0
        return cost

    def _change(self, seq_id: int, request: Request, on: bool, reason: str) -> None:
        first = request.on is None  # it had no mind to change
        request.on, request.reason = on, "" if on else reason
        request.refused = Draft.nothing(request.reason or TOO_LITTLE)
        if not first:
            self.changes += 1
            self._tell(f"speculation {'on' if on else 'off'} for sequence {seq_id}: {request.reason or PAYS}")
