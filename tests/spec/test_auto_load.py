"""The controller with many sequences at once: what it costs where nothing pays, and no leaps where little is known."""

from __future__ import annotations

import pytest

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.spec.auto import AutoLength
from outrider.spec.costs import Costs
from tests.spec.simulator import Simulator, Ticks, cpu_pass, table_of

OTHER = 0.12e-3
"""Seconds of a simulated step outside of passes and drafts."""


def auto(clock: Ticks | None = None) -> AutoLength:
    return AutoLength(Costs(table_of(cpu_pass)), on_change=lambda _: None, clock=clock or Ticks())


def of_plain(run: Simulator, seconds: float) -> float:
    return run.run(seconds) * (OTHER + cpu_pass(run.n)) / run.n


@pytest.mark.parametrize("n", [8, 32])
@pytest.mark.parametrize(
    "drafter",
    [
        {"look_up": 0.02e-3, "weigh": 0.03e-3, "sure": True},
        {"look_up": 0.02e-3, "weigh": 0.03e-3, "presence": lambda _: 0.0},
        {"look_up": 0.1e-3},
        {"look_up": 0.0, "per_row": 0.6e-3},
    ],
    ids=["sure", "finds nothing", "look-up", "model"],
)
def test_probes_of_all_sequences_together_cost_little(n: int, drafter: dict) -> None:  # type: ignore[type-arg]
    """In time, what it takes the controller itself included; and so in rows, which cost time as well."""
    clock = Ticks()
    run = Simulator(auto(clock), lambda _: 0.0, n=n, noise=0.0, clock=clock, **drafter)
    run.run(2)
    steps, asked = run.steps, len(run.budgets)
    assert of_plain(run, 6) > 0.99
    drafts = sum(budget > 0 for _, budgets in run.budgets[asked:] for budget in budgets)
    assert drafts > 20, "it does not look any more"
    each = drafter["look_up"] + drafter.get("weigh", 0.0) + 2 * drafter.get("per_row", 0.0)
    assert drafts * each < 0.0075 * 6, (drafts, run.steps - steps)


@pytest.mark.parametrize("seed", range(6))
def test_luck_with_a_few_rows_is_no_reason_for_very_many(seed: int) -> None:
    """In none of many requests whose probes of two rows were right: a pass of hundreds of rows is a dear mistake."""
    run = Simulator(auto(), lambda _: 0.9, n=32, seed=seed)
    worst = min(of_plain(run, 0.25) for _ in range(20))
    assert worst > 0.85
    assert of_plain(run, 1) > 0.99
    assert max(sum(budgets) for _, budgets in run.budgets) < 200


def test_one_that_joins_a_step_is_decided_about_with_the_others() -> None:
    """Alone it would draft; and the others keep what was decided."""
    controller = auto()
    run = Simulator(controller, lambda _: 0.5, n=16)
    run.run(1)
    before = [(id(request), request.planned) for request in controller._running]
    seconds = controller._learner.token_seconds
    assert not any(planned for _, planned in before)
    controller.budgets([Span(seq, 63, 1, 8) for seq in run.sequences], 400)
    late = Span(Sequence(99, [1] * 64, 64, SamplingParams(temperature=0), SpecParams(drafter="look"), seed=0), 0, 64, 8)
    assert controller.budgets([late], 400) == [0]
    assert late.draft.reason
    assert [(id(request), request.planned) for request in controller._running] == before
    assert controller._learner.token_seconds == seconds
    fresh = auto()
    assert fresh.budgets([Span(late.seq, 0, 64, 8)], 400) != [0], "alone it does draft: the test is too easy"


def test_one_that_comes_or_goes_among_many_is_little_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few sequences all is decided anew at once, with many now and then; each gets its own budget meanwhile."""
    calls: list[int] = []
    decide = AutoLength._decide
    monkeypatch.setattr(AutoLength, "_decide", lambda *args: calls.append(1) or decide(*args))
    for n, most in ((4, 1.0), (32, 0.6)):
        controller = auto()
        run = Simulator(controller, lambda _: 0.0, n=n)
        run.run(2)
        calls.clear()
        steps = 60
        for step in range(steps):
            run.sequences.pop(step % n)
            new = Sequence(
                100 + step, [1] * 64, 64, SamplingParams(temperature=0), SpecParams(drafter="scripted"), seed=0
            )
            run.sequences.append(new)
            run.step()
            assert [request.drafter for request in controller._running] == ["scripted"] * n
            assert controller._ids == [seq.id for seq in run.sequences]
        assert len(calls) <= most * steps
        assert len(calls) >= steps * (n == 4)


def test_a_probe_in_vain_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = auto()
    run = Simulator(controller, lambda _: 0.0, n=8, look_up=0.02e-3, presence=lambda now: float(now < 1), sure=True)
    run.run(2)
    decided: list[int] = []
    decide = AutoLength._decide
    monkeypatch.setattr(AutoLength, "_decide", lambda *args: decided.append(1) or decide(*args))
    steps = run.steps
    run.run(2)
    assert sum(sum(budgets) > 0 for _, budgets in run.budgets[steps:]) > 0.2 * (run.steps - steps), "it hardly probes"
    assert len(decided) < 0.05 * (run.steps - steps)


def test_an_empty_draft_says_why() -> None:
    run = Simulator(auto(), lambda _: 0.0, n=2)
    run.run(1)
    span = Span(run.sequences[0], 63, 1, 8)
    other = Span(run.sequences[1], 63, 1, 8)
    budgets = run.controller.budgets([span, other], 100)
    for each, budget in zip((span, other), budgets, strict=True):
        assert budget or each.draft.reason
        assert budget or each.draft == Draft.nothing(each.draft.reason)


def test_where_rows_are_short_no_sequence_goes_without_for_the_others_sake() -> None:
    """Sure drafts get room beyond what was decided; but only what all have left."""
    run = Simulator(auto(), lambda _: 0.95, n=4, room=16, sure=True)
    run.run(2)
    late = [budgets for _, budgets in run.budgets[-100:]]
    assert all(sum(budgets) <= 12 for budgets in late)
    assert min(map(min, late)) >= 2


def test_an_interrupt_within_the_controller_costs_nothing_later() -> None:
    clock = Ticks()
    controller = auto(clock)
    run = Simulator(controller, lambda _: 0.0, clock=clock, sure=True, weigh=1e-4)
    run.run(2)
    own = controller._learner.own
    weigh = controller._weigh

    def broken(*_: object) -> None:
        clock.now += 1e5
        raise KeyboardInterrupt

    for _ in range(20):  # not every step is learnt from
        controller._weigh = broken  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.run(10)
        controller._weigh = weigh  # type: ignore[method-assign]
        run.step()
    run.run(2)
    assert 0 < controller._learner.own < 2 * own


def test_what_the_controller_takes_for_a_draft_does_not_depend_on_how_many_there_are() -> None:
    """Steps without drafts are not put on the account of the few that have some."""
    own = []
    for acceptance in (0.8, 0.0):
        clock = Ticks()
        controller = auto(clock)
        run = Simulator(controller, lambda _, acceptance=acceptance: acceptance, clock=clock, sure=True, weigh=1e-4)
        run.run(5)
        own.append(controller._learner.own)
    assert own[1] == pytest.approx(own[0], rel=0.3)


def test_steps_that_wait_to_be_learnt_from_count_as_they_were_when_a_load_comes() -> None:
    """Whether they are learnt from before 31 others join, or after."""
    told = []
    for before in (True, False):
        controller = auto()
        alone = Simulator(controller, lambda _: 0.8)
        alone.run(2)
        while len(controller._learner._waiting) < 10:
            alone.step()
        if before:
            controller._learner.catch_up()
        Simulator(controller, lambda _: 0.8, n=32).step()
        told.append(controller.status)
    assert told[0].earned == pytest.approx(told[1].earned, rel=1e-3)
    assert told[0].spent == pytest.approx(told[1].spent, rel=1e-3)
