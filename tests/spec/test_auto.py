"""The controller on a scripted engine: it finds the best length, gives up and comes back, and does not dither."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span, SpanRecord, StepRecord, StepTimes
from outrider.spec.auto import AGED, TOO_BUSY, TOO_LITTLE, AutoLength, Terms
from outrider.spec.choice import EVERY
from outrider.spec.costs import REDRAWN, Costs
from outrider.spec.goodput import best_budgets, worths
from outrider.spec.learning import IDLE
from tests.spec.simulator import Simulator, cpu_pass, table_of

OTHER = 0.12e-3
"""Seconds of a simulated step outside of passes and drafts."""


def auto(told: list[str] | None = None) -> AutoLength:
    return AutoLength(Costs(table_of(cpu_pass)), on_change=(told if told is not None else []).append, clock=float)


def fixed(acceptance: float, presence: float, gamma: int, look_up: float, per_row: float) -> float:
    """Tokens a second of a fixed draft length at batch 1, exactly."""
    tokens = 1 + presence * sum(acceptance**i for i in range(1, gamma + 1))
    drafting = look_up + per_row * gamma if gamma else 0.0
    return tokens / (OTHER + drafting + presence * cpu_pass(1 + gamma) + (1 - presence) * cpu_pass(1))


DRAFTERS = {
    "a look-up that often finds nothing": (0.7, 0.5, 0.1e-3, 0.0),
    "a look-up in a copy": (0.9, 1.0, 0.1e-3, 0.0),
    "a model": (0.8, 1.0, 0.0, 0.6e-3),
    "a model that hardly pays": (0.55, 1.0, 0.0, 0.6e-3),
    "a bad look-up": (0.1, 0.3, 0.1e-3, 0.0),
    "a useless one": (0.0, 1.0, 0.1e-3, 0.0),
    "a bad model": (0.3, 1.0, 0.0, 0.6e-3),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_is_as_fast_as_the_best_fixed_length_and_knows_it(drafter: str) -> None:
    acceptance, presence, look_up, per_row = DRAFTERS[drafter]
    rates = [fixed(acceptance, presence, gamma, look_up, per_row) for gamma in range(20)]
    controller = auto()
    run = Simulator(controller, lambda _: acceptance, presence=lambda _: presence, look_up=look_up, per_row=per_row)
    run.run(3)
    rate = run.run(8)
    assert rate > 0.98 * max(rates) - 0.01 * rates[0], "noise of a short run apart"
    assert rate > 0.99 * rates[0], "probes cost too much"
    assert controller.status.speedup == pytest.approx(rate / rates[0], rel=0.1)
    gain = max(rates) / rates[0]
    if not 1.0 < gain < 1.05:  # between these either is right
        assert controller.status.on is (gain > 1.0)


def test_several_at_once_know_their_speed_too() -> None:
    controller = auto()
    run = Simulator(controller, lambda _: 0.9, n=8)
    run.run(2)
    rate = run.run(3)
    plain = 8 / (OTHER + cpu_pass(8))
    assert rate > 1.2 * plain
    assert controller.status.speedup == pytest.approx(rate / plain, rel=0.1)


def budget_is(run: Simulator, on: bool, within: float) -> bool:
    """Whether the controller settles on drafting, or on not drafting, in so many simulated seconds."""
    controller, begin = run.controller, run.now
    while run.now < begin + within:
        run.run(0.05)
        if controller.status.on is on:
            return True
    return False


@pytest.mark.parametrize("look_up", [True, False])
def test_a_shift_of_the_text_turns_it_off_within_two_seconds_and_on_within_five(look_up: bool) -> None:
    told: list[str] = []
    controller = auto(told)
    right = {"chance": 0.9}
    costs = {"look_up": 0.1e-3} if look_up else {"look_up": 0.0, "per_row": 0.4e-3}
    run = Simulator(controller, lambda _: right["chance"], **costs)
    for _ in range(3):
        run.run(4)
        assert controller.status.on
        right["chance"] = 0.02
        assert budget_is(run, False, 2.0)
        assert controller.status.reason == TOO_LITTLE
        assert controller.status.changed is not None
        run.run(6)
        assert not controller.status.on
        right["chance"] = 0.9
        assert budget_is(run, True, 5.0)
    assert len(told) == controller.changes == 6, "one line a change of mind"
    assert ["off" in line for line in told] == [True, False] * 3


@pytest.mark.parametrize("acceptance", [0.15, 0.2, 0.25, 0.3, 0.35])
def test_it_does_not_dither_where_drafting_hardly_matters(acceptance: float) -> None:
    controller = auto()
    run = Simulator(controller, lambda _: acceptance, presence=lambda _: 0.5, seed=3)
    rate = run.run(20)
    assert controller.changes <= 6
    assert rate > 0.985 * max(fixed(acceptance, 0.5, gamma, 0.1e-3, 0.0) for gamma in range(8))


def test_a_load_stops_it_and_it_comes_back_when_the_load_is_gone() -> None:
    controller = auto()
    alone = Simulator(controller, lambda _: 0.7)
    alone.run(2)
    assert controller.status.on
    busy = Simulator(controller, lambda _: 0.7, n=32)
    rate = busy.run(8)
    assert rate > 0.98 * 32 / (OTHER + cpu_pass(32))
    busy.run(1)
    assert sum(sum(budgets) for _, budgets in busy.budgets[-50:]) < 50 * 32 * 0.1
    assert budget_is(busy, False, 2.0), "one of 32 may be drafting at any moment, but not for long"
    assert controller.status.reason == TOO_BUSY
    alone.run(2)
    assert controller.status.on


def test_nothing_is_asked_beyond_the_limits_and_zero_says_why() -> None:
    controller = auto()
    run = Simulator(controller, lambda _: 0.95, max_draft=2)
    run.run(1)
    assert {sum(budgets) for _, budgets in run.budgets} <= {0, 1, 2}
    params = SamplingParams(temperature=0)
    seqs = [Sequence(i, [1] * 64, 64, params, SpecParams(drafter="scripted"), seed=0) for i in range(3)]
    spans = [Span(seq, 63, 1, budget) for seq, budget in zip(seqs, (9, 0, 9), strict=True)]
    assert controller.budgets(spans, 5)[1] == 0
    assert sum(controller.budgets(spans, 5)) <= 5
    assert controller.budgets(spans, 0) == [0, 0, 0]
    assert spans[0].draft.reason
    assert controller.budgets([], 5) == []
    useless = Simulator(auto(), lambda _: 0.0)
    useless.run(2)
    assert useless.controller.status.reason == TOO_LITTLE


def record_of(span: Span, path: tuple[int, ...]) -> StepRecord:
    n = len(span.draft)
    record = SpanRecord(span.seq.id, "look", 1 + n, n, span.draft.depths, len(path), 1 + len(path), path=path)
    times = StepTimes(1e-5, 1e-4, cpu_pass(1 + n), 1e-5, 1e-5)
    return StepRecord(times, 0, 1, n, (record,), 0, 0, 1, 0, {"look": 1e-4})


def test_rows_that_the_drafter_is_right_not_to_trust_are_cut() -> None:
    """Half of the drafts are sure and right, half are unsure and wrong: only the former are submitted, mostly."""
    controller = auto()
    seq = Sequence(0, [1] * 64, 64, SamplingParams(temperature=0), SpecParams(drafter="look"), seed=0)
    kept: dict[bool, list[int]] = {True: [], False: []}
    for sure in itertools.islice(itertools.cycle((True, False)), 800):
        span = Span(seq, 63, 1, 4)
        (span.budget,) = controller.budgets([span], 99)
        if span.budget:
            confidence = [0.9 if sure else 0.4] * span.budget
            span.draft = Draft.chain([1] * span.budget).sure(confidence)
        (rows,) = controller.trim([span])
        kept[sure].append(rows)
        span.draft = span.draft.truncated(rows)
        controller.observe(record_of(span, tuple(range(rows)) if sure else ()))
    assert sum(kept[True][-100:]) > 250
    assert sum(kept[False][-100:]) < 20
    assert any(kept[False][-300:]), "what is never tried is never known"


def test_what_a_row_must_bring_follows_what_it_costs() -> None:
    """It is not worked out for every draft, but anew when something is decided."""
    controller = auto()
    seq = Sequence(0, [1] * 64, 64, SamplingParams(temperature=0), SpecParams(drafter="look"), seed=0)

    def kept() -> int:
        span = Span(seq, 63, 1, 4)
        controller.budgets([span], 99)
        span.budget, span.draft = 4, Draft.chain([1, 2, 3, 4]).sure((0.6, 0.5, 0.5, 0.4))
        (rows,) = controller.trim([span])
        span.draft = span.draft.truncated(rows)
        controller.observe(record_of(span, ()))
        return rows

    assert kept() == 4
    controller.costs.corrections[1:] = [20.0] * (len(controller.costs.corrections) - 1)
    controller.costs._age, controller._age = REDRAWN, AGED
    assert kept() == 0


def test_the_last_rows_of_a_long_draft_are_left_to_the_next_step() -> None:
    """Each row alone is worth its time; but where so many are right the next step is a good one too."""
    controller = auto()
    seq = Sequence(0, [1] * 64, 64, SamplingParams(temperature=0), SpecParams(drafter="look"), seed=0)
    kept = {}
    for rows in (4, 12):
        span = Span(seq, 63, 1, rows)
        controller.budgets([span], 99)
        span.budget, span.draft = rows, Draft.chain([1] * rows).sure([0.25] * rows)
        (kept[rows],) = controller.trim([span])
    assert kept[4] == 4
    assert 4 < kept[12] < 12


def test_rows_are_weighed_by_the_sequences_that_are_there() -> None:
    controller = auto()
    spec = SpecParams(drafter="look")
    seqs = [Sequence(i, [1] * 64, 64, SamplingParams(temperature=0), spec, seed=0) for i in range(41)]

    def terms(running: list[Sequence]) -> Terms | None:
        spans = [Span(seq, 63, 1, 4) for seq in running]
        controller.budgets(spans, 999)
        for span in spans:
            span.budget, span.draft = 4, Draft.chain([1] * 4).sure([0.9] * 4)
        stands = controller._terms
        controller.trim(spans)
        assert controller._terms is not None
        n = len(running)
        seconds = [0.0, *map(cpu_pass, range(1, 60 * n))]
        assert controller._terms.worth[:4] == pytest.approx(worths(4, n, seconds, 0.0, 0.0, n / cpu_pass(n)), rel=0.1)
        return stands

    assert terms(seqs[:40]) is None
    assert terms(seqs[:40]) is not None, "they are worked out once"
    assert terms(seqs[1:]) is None, "one of many is no reason to decide anew, but others are there"
    assert terms(seqs[:2]) is None


def test_drawn_tokens_are_never_cut_by_their_confidence() -> None:
    controller = auto()
    seq = Sequence(0, [1] * 64, 64, SamplingParams(), SpecParams(drafter="model"), seed=0)
    span = Span(seq, 63, 1, 4)
    controller.budgets([span], 99)
    drawn = Draft.chain([1, 2, 3], [None, Dist.point(2), None]).sure((0.0, 0.0, 0.0))
    span.draft = drawn
    assert controller.trim([span]) == [3]
    span.draft = Draft.chain([1, 2, 3]).sure((0.0, 0.0, 0.0))
    assert controller.trim([span])[0] < 3, "the same with certain tokens would be cut"


def serve(controller: AutoLength, speeds: dict[str, Callable[[], float]], requests: int) -> list[str]:
    """Requests of 30 steps, each with the drafter that the controller chooses."""
    chosen = []
    ids = itertools.count()
    for _ in range(requests):
        name = controller.choose(SamplingParams(temperature=0), list(speeds))
        chosen.append(name)
        run = Simulator(
            controller, lambda _, name=name: speeds[name](), drafter=name, first_id=next(ids), seed=len(chosen)
        )
        for _ in range(30):
            run.step()
    return chosen


def test_the_best_of_several_drafters_serves_and_the_others_are_tried_now_and_then() -> None:
    right = {"good": 0.8, "bad": 0.3, "none": 0.0}
    speeds: dict[str, Callable[[], float]] = {name: (lambda name=name: right[name]) for name in right}
    controller = auto()
    chosen = serve(controller, speeds, 150)
    assert set(chosen[:12]) == set(right), "each is tried"
    assert chosen[30:].count("good") >= 120 * (1 - 2 / EVERY)
    assert set(chosen[30:]) == set(right)
    right["good"], right["bad"] = 0.1, 0.8
    del speeds["none"]
    assert serve(controller, speeds, 300)[-60:].count("bad") > 50, "a drafter that has become better replaces it"


def test_deciding_is_rare_and_a_step_without_news_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("outrider.spec.auto.best_budgets", lambda *args: calls.append(1) or best_budgets(*args))
    for n, acceptance, most in ((1, 0.8, 0.25), (8, 0.8, 0.4), (1, 0.02, 0.1), (8, 0.02, 0.4)):
        run = Simulator(auto(), lambda _, acceptance=acceptance: acceptance, n=n)
        run.run(2)
        calls.clear()
        steps = run.steps
        run.run(2)
        assert len(calls) < most * (run.steps - steps)


def test_a_step_with_a_prompt_in_it_is_not_taken_for_a_slow_plain_one() -> None:
    controller = auto()
    seq = Sequence(0, [1] * 500, 500, SamplingParams(temperature=0), SpecParams(drafter="look"), seed=0)
    span = Span(seq, 0, 500, 4)
    (span.budget,) = controller.budgets([span], 99)
    span.draft = Draft.chain([1] * span.budget)
    controller.trim([span])
    n = span.budget
    record = SpanRecord(0, "look", 500 + n, n, span.draft.depths, n, 1 + n, path=tuple(range(n)))
    times = StepTimes(1e-5, 1e-4, 0.4, 1e-5, 1e-5)
    controller.observe(StepRecord(times, 499, 1, n, (record,), 0, 0, 1, 0, {"look": 1e-4}))
    assert n
    status = controller.status
    assert status.earned == pytest.approx((1 + n) * (OTHER + cpu_pass(1)), rel=0.1), "plain decoding's time of a token"
    assert status.spent < status.earned


def test_whoever_asks_is_told_of_every_step_although_it_learns_from_several_at_once() -> None:
    controller = auto()
    run = Simulator(controller, lambda _: 0.8)
    run.run(1)
    before, tokens, waited = controller.status.earned, run.tokens, 0
    for _ in range(40):
        run.step()
        waited += len(controller._learner._waiting) > 1
        told = controller.status.earned
        each = (told - before) / (run.tokens - tokens)
        assert each == pytest.approx(OTHER + cpu_pass(1), rel=0.1)
    assert not waited, "whoever asks has it learn"
    for _ in range(40):
        run.step()
        waited += len(controller._learner._waiting) > 1
    assert waited > 20


def share_asked(sure: bool) -> float:
    """The share of the steps of 30 short requests in which a look-up that pays is asked for a draft."""
    controller, budgets = auto(), []
    for number in range(30):
        run = Simulator(
            controller, lambda _: 0.5, presence=lambda _: 0.5, look_up=0.06e-3, sure=sure, first_id=number, seed=number
        )
        for _ in range(70):
            run.step()
        budgets += [budget for _, (budget,) in run.budgets]
    return sum(budget > 0 for budget in budgets) / len(budgets)


def test_a_few_unlucky_drafts_do_not_stop_a_drafter_that_says_how_sure_it_is() -> None:
    """What it is not sure of is refused, so that going on costs little; any other is stopped sooner."""
    assert share_asked(sure=True) > 0.98
    assert share_asked(sure=False) < 0.95


def one_request(controller: AutoLength, number: int, right: float, found: float, steps: int = 100) -> float:
    """A request of so many plain steps; its speed over plain decoding's."""
    run = Simulator(controller, lambda _: right, presence=lambda _: found, first_id=number, seed=number)
    while run.tokens < steps:
        run.step()
    return run.tokens * (OTHER + cpu_pass(1)) / run.now


def test_requests_that_follow_copies_and_are_noise_lose_little_and_copies_that_follow_are_fast() -> None:
    controller, numbers = auto(), itertools.count()
    first = [one_request(controller, next(numbers), 0.85, 0.9) for _ in range(10)]
    noise = [one_request(controller, next(numbers), 0.01, 0.2) for _ in range(12)]
    assert not controller.status.on
    again = [one_request(controller, next(numbers), 0.85, 0.9) for _ in range(10)]
    assert controller.status.on
    assert min(noise) > 0.93, "each new request has to find out for itself"
    assert sum(noise[-5:]) / 5 > sum(noise[:5]) / 5 + 0.005, "but the ones before it have warned it"
    assert sum(again[1:]) / 9 > 0.95 * sum(first[1:]) / 9


def test_what_is_lost_to_probes_is_a_small_share() -> None:
    """A drafter that never is right, of each kind, over a long answer."""
    for costs in ({"look_up": 0.1e-3}, {"look_up": 0.0, "per_row": 0.6e-3}):
        run = Simulator(auto(), lambda _: 0.0, **costs)
        run.run(2)
        plain = 1 / (OTHER + cpu_pass(1))
        assert run.run(20) > 0.99 * plain


def test_it_is_said_to_be_off_where_it_looks_for_drafts_and_finds_none() -> None:
    controller = auto()
    found = {"chance": 1.0}
    run = Simulator(controller, lambda _: 0.9, presence=lambda _: found["chance"])
    run.run(1)
    assert controller.status.on
    found["chance"] = 0.0
    assert budget_is(run, False, 2.0)
    assert controller.status.reason in (IDLE, TOO_LITTLE)
    found["chance"] = 1.0
    assert budget_is(run, True, 5.0)
