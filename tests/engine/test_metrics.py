"""What an engine counts and times, on traces whose every draft and every moment is scripted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.types import Commit, FinishReason, Span
from outrider.engine import engine as engine_module
from outrider.engine.engine import Engine
from outrider.engine.metrics import EngineMetrics, Histogram
from outrider.engine.request import RequestOutput
from tests.engine.drafters import Answers, Oracle
from tests.engine.harness import finish, greedy, make_engine, plain, prompt_of, run_all, toy_target, with_eos

TARGET = toy_target(seed=1)
PROMPT = prompt_of(6)
FREE = plain(TARGET, PROMPT, greedy(12))
ANSWERS: Answers = {tuple(PROMPT): FREE.token_ids}
SCRIPT = (2, 0, 4, 1)


class Partly(Oracle):
    """The n-th draft begins with ``right[n]`` right tokens; all the others are wrong."""

    def __init__(self, answers: Answers, right: Sequence[int]) -> None:
        super().__init__(answers)
        self.right = list(right)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        drafts = []
        for span in spans:
            right = self.right.pop(0)
            known = self.continuation(span.seq, span.budget)
            drafts.append(Draft.chain([t if i < right else (t + 1) % 32 for i, t in enumerate(known)]))
        return drafts


class Clock:
    """Stands still but when it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_counters_of_a_scripted_trace() -> None:
    """Drafts of 4, 4, 4 and, as the end is near, 2 tokens; 2, 0, 4 and 1 of them are right. Then a step without one."""
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT), gamma=4)
    assert run_all(engine, [(PROMPT, greedy(12))])[0].token_ids == FREE.token_ids
    metrics, stats = engine.metrics, engine.metrics.spec["drafter"]
    assert (stats.steps, stats.drafts, stats.drafted, stats.accepted, stats.emitted) == (5, 4, 14, 7, 12)
    assert stats.accepted_per_position == [3, 2, 1, 1]
    assert (stats.mean_acceptance_length, stats.acceptance_rate) == (1 + 7 / 4, 7 / 14)
    assert stats.no_draft == {"the answer is about to end": 1}
    assert (metrics.steps, metrics.prompt_rows, metrics.decode_rows, metrics.draft_rows) == (5, 6, 4, 14)
    assert (metrics.generated_tokens, metrics.prompt_tokens) == (12, 6)
    assert (metrics.requests_finished, metrics.requests_aborted) == (1, 0)


def test_times_of_a_scripted_trace(clock: Clock) -> None:
    """3, 1, 5, 2 and 1 tokens come 1, 2, 4, 8 and 16 seconds after those before: so much for each of them."""
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT), gamma=4)
    request = engine.add_request(PROMPT, greedy(12))
    gaps = iter((1, 2, 4, 8, 16))
    forward = engine.runner.forward

    def slow(*args: object) -> object:
        clock.now += next(gaps)
        return forward(*args)  # type: ignore[arg-type]

    engine.runner.forward = slow  # type: ignore[assignment,method-assign]
    clock.now += 0.5
    finish(engine)
    metrics = engine.metrics
    assert (metrics.queue_time.count, metrics.queue_time.total) == (1, 0.5)
    assert (metrics.first_token_time.count, metrics.first_token_time.total) == (1, 1.5)
    assert (metrics.request_time.count, metrics.request_time.total) == (1, 31.5)
    assert metrics.token_time.count == 11
    assert metrics.token_time.total == 2 + 4 + 8 + 16
    expected = Histogram(metrics.token_time.bounds)
    for seconds, times in ((0, 2), (2, 1), (4 / 5, 5), (8 / 2, 2), (16, 1)):
        expected.add(seconds, times)
    assert metrics.token_time.counts == expected.counts
    assert metrics.seconds == {"schedule": 0, "draft": 0, "forward": 31, "verify": 0, "commit": 0}
    assert metrics.phases["forward"].count == 5
    answer = request.answers[0]
    assert (answer.began, answer.first_token, answer.last_token) == (100.5, 101.5, 131.5)


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.add(value)
    histogram.add(9.0, 3)
    assert histogram.counts == [2, 2, 4]
    assert (histogram.count, histogram.total) == (8, pytest.approx(33.6))


def test_tokens_behind_the_end_do_not_count() -> None:
    """Six right draft tokens, the third of which is EOS."""
    engine = make_engine(with_eos(TARGET, FREE.token_ids[2]), Partly(ANSWERS, (6,)), gamma=6)
    assert FREE.token_ids[2] not in FREE.token_ids[:2]
    run_all(engine, [(PROMPT, greedy(12))])
    stats = engine.metrics.spec["drafter"]
    assert (stats.drafts, stats.drafted, stats.accepted, stats.accepted_per_position) == (1, 6, 3, [1, 1, 1])
    assert engine.metrics.generated_tokens == 3
    assert engine.metrics.finished == {FinishReason.STOP: 1}


def test_an_abort_keeps_what_was_counted() -> None:
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT), gamma=4)
    request, unborn = (engine.add_request(PROMPT, greedy(12)) for _ in range(2))
    engine.abort(unborn.id)
    for _ in range(3):
        engine.step()
    engine.abort(request.id)
    metrics, stats = engine.metrics, engine.metrics.spec["drafter"]
    assert (stats.drafts, stats.drafted, stats.accepted) == (3, 12, 6)
    assert (metrics.generated_tokens, metrics.prompt_tokens) == (9, 6)
    assert metrics.finished == {FinishReason.ABORT: 2}
    assert (metrics.queue_time.count, metrics.first_token_time.count, metrics.request_time.count) == (1, 1, 0)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_counts_nothing_twice(caching: bool) -> None:
    """Four requests in a pool for two: each is told to its drafter when it loses its blocks, and when it ends."""
    prompts = [prompt_of(20, i) for i in range(4)]
    answers = {tuple(prompt): plain(TARGET, prompt, greedy(40)).token_ids for prompt in prompts}
    oracle = Oracle(answers)
    engine = make_engine(TARGET, oracle, num_kv_blocks=36, enable_prefix_caching=caching)
    outputs = run_all(engine, [(prompt, greedy(40)) for prompt in prompts])
    metrics, stats = engine.metrics, engine.metrics.spec["drafter"]
    assert metrics.preemptions == len(oracle.released) - 4 > 0
    assert (metrics.prompt_tokens, metrics.answer_prompt_tokens, metrics.cached_prompt_tokens) == (80, 80, 0)
    assert metrics.generated_tokens == stats.emitted == 160
    assert (metrics.queue_time.count, metrics.first_token_time.count, metrics.request_time.count) == (4, 4, 4)
    assert metrics.token_time.count == 156
    assert_sum_of(engine, outputs)


class Interrupted(Oracle):
    """Somebody presses Ctrl-C once, when it is told what came of its third draft."""

    def observe(self, commits: Sequence[Commit]) -> None:
        super().observe(commits)
        if len(self.commits) == 3:
            raise KeyboardInterrupt("enough")


def test_a_step_that_breaks_off_loses_no_counts() -> None:
    """Its tokens were in the answer already: they are handed out, and count, with the next ones."""
    engine = make_engine(TARGET, Interrupted(ANSWERS), gamma=2)
    request = engine.add_request(PROMPT, greedy(12))
    with pytest.raises(KeyboardInterrupt, match="enough"):
        finish(engine)
    finish(engine)
    output = RequestOutput.of(request)
    assert output.token_ids == FREE.token_ids
    assert engine.metrics.generated_tokens == engine.metrics.token_time.count + 1 == 12
    assert_sum_of(engine, [output])


def test_choices_share_a_prompt_and_requests_a_prefix() -> None:
    engine = make_engine(TARGET, gamma=0)
    params = SamplingParams(seed=1, n=3, max_tokens=4, ignore_eos=True)
    many = engine.run(engine.add_request(prompt_of(9), params))
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.answer_prompt_tokens, metrics.cached_prompt_tokens) == (9, 27, 16)
    assert metrics.prompt_rows == 27 - 16
    assert (metrics.generated_tokens, metrics.token_time.count, metrics.first_token_time.count) == (12, 9, 1)
    again = engine.run(engine.add_request(prompt_of(9), greedy(1)))
    assert again.cached_tokens == 8
    assert (metrics.prompt_tokens, metrics.answer_prompt_tokens, metrics.cached_prompt_tokens) == (18, 36, 24)
    assert many.usage["completion_tokens"] + 1 == metrics.generated_tokens


@pytest.mark.parametrize(
    ("ends", "counted"), [("SL", "LENGTH"), ("SES", "ERROR"), ("EAL", "ABORT"), ("SS", "STOP"), ("LA", "ABORT")]
)
def test_a_request_counts_under_the_worst_of_its_ends(ends: str, counted: str) -> None:
    engine = make_engine(TARGET, gamma=0)
    request = engine.add_request(PROMPT, SamplingParams(seed=1, n=len(ends), max_tokens=2))
    engine.run(request)
    by_letter = {reason.name[0]: reason for reason in FinishReason}
    for answer, letter in zip(request.answers, ends, strict=True):
        answer.finish = by_letter[letter]
    metrics = EngineMetrics()
    metrics.ended(request, request.arrived + 3)
    assert metrics.finished == {FinishReason[counted]: 1}
    assert metrics.request_time.total == pytest.approx(3 if counted in ("STOP", "LENGTH") else 0)


class Broken(Oracle):
    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        raise RuntimeError("no idea")


def test_failures_of_a_drafter_are_counted() -> None:
    """Once a request: then it goes on without the drafter."""
    engine = make_engine(TARGET, {"good": Oracle(ANSWERS), "bad": Broken(ANSWERS)})
    engine.controller.choose = lambda params, drafters: "bad"  # type: ignore[method-assign]
    engine.run(engine.add_request(PROMPT, greedy(12)))
    assert engine.metrics.drafter_failures == {"bad": 1}
    assert engine.metrics.spec["bad"].no_draft["the drafter failed"] == 1
    engine.run(engine.add_request(PROMPT, greedy(12)))
    assert engine.metrics.drafter_failures == {"bad": 2}


def assert_sum_of(engine: Engine, outputs: Sequence[RequestOutput]) -> None:
    """The engine's counters are the sum of those of its answers."""
    total = engine.metrics.spec["drafter"]
    for name in ("steps", "drafts", "drafted", "accepted", "emitted"):
        assert getattr(total, name) == sum(getattr(output.stats, name) for output in outputs), name
