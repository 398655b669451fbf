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
from dataclasses import dataclass, field

from outrider.core.config import MAX_AUTO_DRAFT
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span, SpanRecord, StepRecord
from outrider.spec.choice import Choice, Speed
from outrider.spec.controller import DraftController, SpecStatus
from outrider.spec.costs import Costs, Line
from outrider.spec.goodput import Decision, Wish, best_budgets
from outrider.spec.survival import Calibration, Survival

logger = logging.getLogger("outrider")

SHARE = 0.006
"""Share of the time of steps that may be lost to probes."""
PROBE = 2
"""Draft rows of a probe."""
MEMORY = 100
"""Drafts that an estimate of one request looks back on."""
DOUBT = 0.5
"""So many standard errors are in favour of what a request is doing: noise alone does not change its mind."""
GRANT = 0.5
"""What the account of a new request holds, in plain steps: to find out soon whether it is like the others."""
FAINT = 0.02
"""A row that is less likely to be accepted than this is never asked for."""
NEWS = 4
"""Drafts of a request after which its length is decided anew: deciding takes time too."""
REMEMBERED = 4096
"""Requests whose estimates are kept, the newest ones."""

TOO_LITTLE = "too little would be accepted to pay for drafting"
TOO_BUSY = "drafting would not pay under this load"
PAYS = "drafts pay again"


@dataclass
class _Drafter:
    """What is known of a drafter over all requests."""

    survival: Survival = field(default_factory=lambda: Survival(memory=400, pull=4))
    calibration: Calibration = field(default_factory=lambda: Calibration(memory=400))
    cost: Line = field(default_factory=lambda: Line(100))  # seconds a draft by the rows asked for
    whole: bool = False  # its drafts carry rows for its own use: they pay as a whole or not at all


@dataclass
class _Request:
    """What is known of one sequence, and what it is doing in this step."""

    drafter: str
    survival: Survival
    kind: str
    on: bool | None = None  # None: not decided yet
    reason: str = ""
    account: float = 0.0  # seconds that may be lost to trying
    asked: int = 0  # rows, in this step
    trusted: int = 0  # of the draft's rows, those that were submitted because they should pay
    probing: bool = False
    drafts: int = 0
    news: int = 0  # changes when there is enough news to decide anew
    confidence: Sequence[float] = ()  # of the rows that were submitted
    expected: float = 0.0  # of these, how many should be accepted by the calibration
    foreseen: float = 4.0  # fading sums: rows that should have been accepted, and were
    accepted: float = 4.0

    @property
    def luck(self) -> float:
        """How many times as many are accepted as the calibration says."""
        return self.accepted / self.foreseen


class AutoLength(DraftController):
    """Goodput-optimal draft lengths; see the module. ``on_change`` is told of every change of mind."""

    def __init__(
        self, costs: Costs, longest: int = MAX_AUTO_DRAFT, on_change: Callable[[str], None] | None = None
    ) -> None:
        self.costs = costs
        self.longest = longest
        self.changes = 0
        self._tell = on_change or logger.info
        self._drafters: dict[str, _Drafter] = {}
        self._requests: dict[int, _Request] = {}
        self._choices: dict[str, Choice] = {}
        self._facts: list[object] = []  # what the decision in force was made from
        self._wishes: list[Wish] = []
        self._decision = Decision((), 0.0, 1.0)
        self._context = 1.0  # tokens of a sequence, on average
        self._token_seconds = 0.0  # plain decoding's, under the load of this step
        self._speed = Speed()
        self._earned = self._spent = 0.0  # the same seconds in all
        self._length = 0.0
        self._recent: _Request | None = None
        self._on = False
        self._changed: float | None = None

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        return self._choices.setdefault(_kind(params), Choice()).choose(drafters)

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        if not spans:
            return []
        requests = [self._request(span.seq) for span in spans]
        context = self.costs.banded(sum(len(span.seq) for span in spans) / len(spans))
        own_rows = sum(span.n_new for span in spans)

        def seconds(n: float) -> float:
            return self.costs.step(n, context)

        facts: list[object] = [rows, own_rows, context, self.costs.drawn]
        for request, span in zip(requests, spans, strict=True):
            facts += (span.seq.id, request.news, request.on, span.budget)
        if facts != self._facts:
            self._facts = facts
            self._wishes = [self._wish(request, span.budget) for request, span in zip(requests, spans, strict=True)]
            self._decision = best_budgets(self._wishes, own_rows, len(spans), seconds, rows)
        decision = self._decision
        self._token_seconds = 1 / decision.plain
        budgets = list(decision.budgets)
        left = rows - sum(budgets)
        for i, (request, span) in enumerate(zip(requests, spans, strict=True)):
            request.probing = False
            if request.on is not (budgets[i] > 0) and span.budget:
                alone = best_budgets([self._wishes[i]], 1, 1, seconds, rows)
                self._change(span.seq.id, request, budgets[i] > 0, TOO_BUSY if any(alone.budgets) else TOO_LITTLE)
            whole = self._drafters[request.drafter].whole
            probe = min(self.longest if whole else PROBE, span.budget, left)
            if not budgets[i] and probe > 0:
                cost = self._drafters[request.drafter].cost.at(probe) + seconds(own_rows + probe) - seconds(own_rows)
                self._pay_in(request, 1.5 * cost)
                if request.account >= cost:
                    budgets[i], request.probing = probe, True
                    left -= probe
            elif budgets[i]:
                # One row more now and then, to know what it would bring. Half of the account is left for ``trim``.
                n, line = own_rows + sum(budgets), self._drafters[request.drafter].cost
                cost = line.slope + max(0.0, seconds(n + 1) - seconds(n))
                self._pay_in(request, 2 * cost)
                if request.account >= 2 * cost and left > 0 and budgets[i] < min(span.budget, self.longest):
                    request.account -= cost
                    budgets[i] += 1
                    left -= 1
            if not budgets[i] and span.budget:
                span.draft = Draft.nothing(request.reason or TOO_LITTLE)
        if any(request.on for request in requests) is not self._on:
            self._on, self._changed = not self._on, time.perf_counter()
        self._length += 0.02 * (sum(budgets) / len(spans) - self._length)
        return budgets

    def trim(self, spans: Sequence[Span]) -> list[int]:
        self._context = sum(len(span.seq) for span in spans) / max(1, len(spans))
        lengths = [len(span.draft) for span in spans]
        weighed: list[tuple[int, _Request, Wish]] = []
        for i, span in enumerate(spans):
            request = self._requests.get(span.seq.id)
            if request is None:
                continue
            draft = span.draft
            request.asked, request.trusted, request.confidence = span.budget, lengths[i], ()
            if draft.n_verify < len(draft):
                self._drafters[request.drafter].whole = True
            elif draft.confidence is not None and draft.tokens and all(q is None for q in draft.q):
                chances = self._drafters[request.drafter].calibration.chances(draft.confidence)
                luck, least, falling = request.luck, 1.0, []
                for chance in chances:
                    least = min(least, chance * luck)
                    falling.append(least)
                weighed.append((i, request, Wish(falling, (1.0,) * len(falling))))
        if not weighed:
            return lengths
        chosen = {i for i, _, _ in weighed}
        own_rows = sum(span.n_new + (0 if i in chosen else lengths[i]) for i, span in enumerate(spans))
        tokens = sum(span.reaches_end for span in spans)

        def seconds(n: float) -> float:
            return self.costs.step(n, self._context)

        decision = best_budgets([wish for _, _, wish in weighed], own_rows, tokens, seconds, sum(lengths))
        for (i, request, wish), kept in zip(weighed, decision.budgets, strict=True):
            request.trusted = kept
            if kept < lengths[i] and (not request.probing or request.drafts % NEWS == 0):
                # A row more now and then, so that what is never kept is not forgotten.
                cost = max(0.0, seconds(own_rows + kept + 1) - seconds(own_rows + kept))
                if request.account >= cost:
                    request.account -= cost
                    kept += 1
            lengths[i] = kept
            request.confidence = (spans[i].draft.confidence or ())[:kept]
            request.expected = sum(wish.survival[:kept]) / request.luck
        return lengths

    def observe(self, record: StepRecord) -> None:
        rows = record.prompt_rows + record.decode_rows + record.draft_rows
        if not record.prompt_rows and rows:
            times = record.times
            self.costs.observe(rows, self._context, times.forward, times.total - times.forward - times.draft)
        self._learn_draft_costs(record)
        per_row = earned = spent = 0.0  # seconds of a draft row in the pass
        if record.draft_rows and not record.prompt_rows:
            more = self.costs.step(rows, self._context) - self.costs.step(record.decode_rows, self._context)
            per_row = more / record.draft_rows
        for span in record.spans:
            request = self._requests.get(span.seq_id)
            if request is None or request.drafter != span.drafter or not span.emitted:
                continue
            self._recent = request
            cost = self._learn(request, span, per_row)
            own = (span.emitted * self._token_seconds, self._token_seconds + cost)
            earned, spent = earned + own[0], spent + own[1]
            choice = self._choices.get(request.kind)
            if choice is not None:
                choice.speeds.setdefault(request.drafter, Speed()).add(*own)
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
        reason = f"an estimated {speedup:.2f} times as fast as plain decoding" if self._on else request.reason
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

    def _request(self, seq: Seq) -> _Request:
        name = seq.spec.drafter or ""
        request = self._requests.get(seq.id)
        if request is None or request.drafter != name:
            drafter = self._drafters.setdefault(name, _Drafter())
            survival = Survival(memory=MEMORY, pull=6, prior=drafter.survival)
            request = self._requests[seq.id] = _Request(name, survival, _kind(seq.params))
            request.account = GRANT * self._token_seconds
            if len(self._requests) > REMEMBERED:
                del self._requests[next(iter(self._requests))]
        return request

    def _wish(self, request: _Request, budget: int) -> Wish:
        drafter, depth = self._drafters[request.drafter], min(budget, self.longest)
        survival, presence = request.survival.estimate(depth)
        survival, presence = survival[:depth], presence[:depth]
        doubt = 0.0 if request.on is None else DOUBT if request.on else -DOUBT
        survival = [s + doubt * math.sqrt(s * (1 - s) / (2 * MEMORY)) for s in survival]
        if drafter.whole and depth:
            each = sum(s * p for s, p in zip(survival, presence, strict=True)) / depth
            return Wish((each,) * depth, (1.0,) * depth, drafter.cost.base, drafter.cost.slope)
        return Wish([chance for chance in survival if chance > FAINT], presence, drafter.cost.base, drafter.cost.slope)

    def _pay_in(self, request: _Request, most: float) -> None:
        """A step's share goes to the request's account, which holds a token's time or ``most`` seconds at most."""
        request.account = min(request.account + SHARE * self._token_seconds, max(self._token_seconds, most))

    def _learn_draft_costs(self, record: StepRecord) -> None:
        for name, seconds in record.draft_seconds.items():
            own = [self._requests.get(span.seq_id) for span in record.spans if span.drafter == name]
            asked = [request.asked for request in own if request is not None and request.asked]
            if asked and name in self._drafters:
                self._drafters[name].cost.add(sum(asked) / len(asked), seconds / len(asked))

    def _learn(self, request: _Request, span: SpanRecord, per_row: float) -> float:
        """What a draft was worth, and the seconds that it cost."""
        if not request.asked:
            return 0.0
        drafter = self._drafters[request.drafter]
        trusted = min(request.trusted, span.drafted)
        request.survival.add(request.asked, trusted, [row for row in span.path if row < trusted])
        request.drafts += 1
        request.news += request.probing or request.drafts % NEWS == 0
        if request.confidence:
            drafter.calibration.add(request.confidence, span.path)
            request.foreseen += 0.03 * (4 - request.foreseen) + request.expected
            request.accepted += 0.03 * (4 - request.accepted) + span.accepted
        cost = drafter.cost.at(request.asked) + per_row * max(0, span.rows - 1)
        if request.probing:
            won = span.accepted * self._token_seconds
            request.account = max(0.0, min(request.account - cost + won, max(self._token_seconds, 1.5 * cost)))
        request.asked = 0
        return cost

    def _change(self, seq_id: int, request: _Request, on: bool, reason: str) -> None:
        first = request.on is None  # it had no mind to change
        request.on, request.reason = on, "" if on else reason
        if not first:
            self.changes += 1
            self._tell(f"speculation {'on' if on else 'off'} for sequence {seq_id}: {request.reason or PAYS}")


def _kind(params: SamplingParams) -> str:
    """Requests of one kind are expected to suit the same drafter."""
    return "greedy" if params.greedy else "sampled"
