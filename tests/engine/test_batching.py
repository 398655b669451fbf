"""Requests that run together: each equals its solo run, whatever its neighbours draft, ask for, raise or abort."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import FinishReason, Span, StepRecord
from outrider.engine.engine import Engine
from outrider.engine.request import Request, RequestOutput
from outrider.spec.controller import DraftController
from outrider.spec.proposer import Proposer
from tests.engine.drafters import Build, Oracle, RandomTree, Script, Shape, context_for, registered, self_drafter
from tests.engine.harness import (
    assert_same,
    finish,
    greedy,
    make_engine,
    plain,
    prompt_of,
    run_all,
    toy_target,
)
from tests.engine.kv import assert_kv

TARGET = toy_target(seed=1)
DRAFTERS = dict(registered())
PROMPT = [7, 3, 9, 7, 3, 9, 7, 3, 9, 7, 30]


def ids(request: Request) -> tuple[int, ...]:
    return tuple(request.answers[0].seq.output_ids)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["model self", "model other tree", "ngram chain"])
def test_skipped_requests_keep_nothing_stale(rows: int, name: str) -> None:
    """A row budget so small that each step skips somebody: nobody starves, all outputs are plain's."""
    prompts = [prompt_of(3, i) for i in range(4)]
    engine = make_engine(TARGET, DRAFTERS[name](context_for(TARGET, 3)), gamma=3, max_num_batched_tokens=rows)
    requests = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    last: dict[int, tuple[int, int]] = {}
    waited: dict[int, int] = {}

    def check(_: object) -> None:
        for seq in engine.scheduler.running:
            now = (len(seq), seq.n_computed)
            waited[seq.id] = 0 if last.get(seq.id) != now else waited[seq.id] + 1
            last[seq.id] = now
            assert waited[seq.id] <= 4, "a running request starves"

    finish(engine, check)
    for request, prompt in zip(requests, prompts, strict=True):
        assert ids(request) == plain(TARGET, prompt, greedy(40)).token_ids


class Assorted(Proposer):
    """Per sequence another number of the same wrong-or-right tokens."""

    def __init__(self, lengths: dict[tuple[int, ...], int]) -> None:
        self.lengths = lengths

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [Draft.chain([5, 6, 5, 6][: min(self.lengths[tuple(s.seq.prompt_ids)], s.budget)]) for s in spans]


def test_settings_stay_with_their_rows() -> None:
    """Four drafts with a penalty, none without rules, two with a ban, in all orders: each as if alone."""
    jobs = [
        ([5, 6, 5], greedy(24, frequency_penalty=2.0), 4),
        ([5, 6, 6], greedy(24), 0),
        ([5, 6, 7], greedy(24, banned_token_ids=(5, 22), logit_bias={6: 4.0}), 2),
    ]
    wants = [plain(TARGET, prompt, params) for prompt, params, _ in jobs]
    assert len({want.token_ids for want in wants}) == 3
    for order in itertools.permutations(range(3)):
        drafter = Assorted({tuple(prompt): n for prompt, _, n in jobs})
        engine = make_engine(TARGET, drafter)
        for i, got in zip(order, run_all(engine, [jobs[i][:2] for i in order]), strict=True):
            assert_same(got, wants[i], order)
            assert (got.stats.drafted > 0) == (jobs[i][2] > 0)


@pytest.mark.parametrize(
    "name", ["ngram tree", "model other", "model other tree", "model self", "medusa likely", "eagle tree"]
)
def test_identical_prompts_in_one_batch(name: str) -> None:
    """Three of four are the same: outputs and acceptance are the same, and a solo run's."""
    prompts = [PROMPT, [1, 2], PROMPT, PROMPT]
    solo = run_all(make_engine(TARGET, DRAFTERS[name](context_for(TARGET))), [(PROMPT, greedy(30))])[0]
    engine = make_engine(TARGET, DRAFTERS[name](context_for(TARGET)), num_kv_blocks=128)
    got = run_all(engine, [(prompt, greedy(30)) for prompt in prompts])
    for same in (got[0], got[2], got[3]):
        assert_same(same, solo)
        assert (same.stats.accepted, same.stats.drafted) == (solo.stats.accepted, solo.stats.drafted)
    assert_same(got[1], plain(TARGET, [1, 2], greedy(30)))


def test_junk_under_load() -> None:
    """The same four ids for everybody, 64 at once, random arrivals and aborts: no exception, outputs right."""
    rng = random.Random(3)
    engine = make_engine(
        TARGET, Script(3, 1, 4, 1), num_kv_blocks=300, max_num_seqs=64, max_num_batched_tokens=200, block_size=8
    )
    requests: list[Request] = []
    alive: list[Request] = []
    for _ in range(120):
        while len(alive) < 64:
            request = engine.add_request(prompt_of(rng.randrange(1, 12), len(requests)), greedy(rng.randrange(4, 30)))
            requests.append(request)
            alive.append(request)
        if rng.random() < 0.3:
            engine.abort(rng.choice(alive).id)
        engine.step()
        engine.check_integrity()
        alive = [request for request in alive if request.finished is None]
    finish(engine)
    whole = [r for r in requests if r.answers[0].finish is FinishReason.LENGTH]
    assert len(requests) > len(whole) > 100
    for request in rng.sample(whole, 10):
        assert ids(request) == plain(TARGET, request.prompt_ids, request.answers[0].seq.params).token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    "name",
    [
        "ngram tree",
        "model self",
        "model other",
        "model other tree",
        "medusa likely",
        "eagle chain",
        "eagle third tree",
        "random",
    ],
)
def test_prompts_of_different_lengths(temperature: float, name: str) -> None:
    """2 and 5, then 1, 7 and 33 tokens in one call: chains and trees, greedy and seeded, each as if alone."""
    build: Build = DRAFTERS.get(name, lambda _: RandomTree(32, Shape(tree=True, sampled=True)))
    for lengths in ((2, 5), (1, 7, 33)):
        jobs = [
            (prompt_of(n), SamplingParams(temperature=temperature, seed=n if temperature else None, max_tokens=20))
            for n in lengths
        ]
        got = run_all(make_engine(TARGET, build(context_for(TARGET))), jobs)
        for job, answer in zip(jobs, got, strict=True):
            assert_same(answer, run_all(make_engine(TARGET, build(context_for(TARGET))), [job])[0])
            if temperature == 0:
                assert_same(answer, plain(TARGET, *job))


class Recorder(Proposer):
    """Passes on what another drafter proposes, and remembers it by sequence length."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.needs = inner, inner.needs
        self.start, self.copy_blocks = inner.start, inner.copy_blocks  # type: ignore[method-assign]
        self.observe, self.release = inner.observe, inner.release  # type: ignore[method-assign]
        self.drafts: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        drafts = self.inner.propose(spans)
        for span, draft in zip(spans, drafts, strict=True):
            self.drafts[tuple(span.seq.prompt_ids), len(span.seq)] = draft.tokens
        return drafts


@pytest.mark.parametrize("name", ["model other", "model other tree", "ngram tree", "medusa likely", "eagle chain"])
def test_different_draft_lengths_in_one_batch(name: str) -> None:
    """Lengths 7 and 2 together: each request's drafts are those it gets alone, the output is plain's."""
    jobs = [(PROMPT, greedy(30), SpecParams(max_draft=7)), ([5, 6, 5, 6, 5], greedy(30), SpecParams(max_draft=2))]
    together = Recorder(DRAFTERS[name](context_for(TARGET, 7)))
    got = run_all(make_engine(TARGET, together, gamma=7), jobs)
    alone: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    for job, answer in zip(jobs, got, strict=True):
        assert_same(answer, plain(TARGET, *job[:2]))
        recorder = Recorder(DRAFTERS[name](context_for(TARGET, 7)))
        run_all(make_engine(TARGET, recorder, gamma=7), [job])
        alone |= recorder.drafts
    assert together.drafts == alone
    assert {len(tokens) for (prompt, _), tokens in alone.items() if len(prompt) == 5} <= {0, 1, 2}


class Schedule(DraftController):
    """A draft length by step: a stand-in for an adaptive controller that pauses and comes back."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        gamma = self.lengths[0] if self.lengths else 4
        budgets = []
        for span in spans:
            budgets.append(min(gamma, span.budget, rows))
            rows -= budgets[-1]
        return budgets

    def observe(self, record: StepRecord) -> None:
        self.lengths = self.lengths[1:]


@pytest.mark.parametrize("tree", ["", "2,1,1,1"])
def test_drafting_resumes_where_the_text_is(tree: str) -> None:
    """Draft length 4, then 0, then 4: the draft model reads what it missed, and is right again at once."""
    params = greedy(150)
    want = plain(TARGET, PROMPT, params)
    drafter = self_drafter(TARGET, draft_tree=tree)
    gamma = 8 if tree else 4
    controller = Schedule(*[gamma] * 12, *[0] * 10, *[gamma] * 100)
    engine = make_engine(TARGET, drafter, controller=controller)
    request = engine.add_request(PROMPT, params)
    emitted: list[int] = []
    finish(engine, lambda deltas: emitted.extend(len(delta.token_ids) for delta in deltas))
    assert ids(request) == want.token_ids
    assert emitted[:12] == [5] * 12
    assert emitted[12:22] == [1] * 10
    assert set(emitted[22:-3]) == {5}


def test_a_pause_after_a_rejected_draft() -> None:
    """What was drafted before a pause is no longer believed after it, under every rule: KV stays a fresh prefill's."""
    for method in ("standard", "block", "coupled"):
        for seed in range(8):
            drafter = DRAFTERS["model other"](context_for(TARGET, method=method))
            lengths = [3, 0, 0, 0] * 20
            engine = make_engine(TARGET, drafter, method=method, controller=Schedule(*lengths), block_size=2)
            engine.add_request([1, 2, 3], SamplingParams(temperature=2.0, top_k=3, seed=seed, max_tokens=24))

            def check(_: object, engine: Engine = engine, drafter: Proposer = drafter) -> None:
                for seq in engine.sequences:
                    follower = drafter._followers.get(seq.id)  # type: ignore[attr-defined]
                    if follower is not None:
                        assert_kv(drafter.runner, seq, follower.valid)  # type: ignore[attr-defined]

            finish(engine, check)


def test_cancelled_and_sent_again() -> None:
    """Five requests cancelled in the middle of drafting and resent at once, ten times: each equals its solo run."""
    prompts = [prompt_of(6, i) for i in range(5)]
    wants = [plain(TARGET, prompt, greedy(25)).token_ids for prompt in prompts]
    for name in ("model other tree", "ngram tree"):
        engine = make_engine(TARGET, DRAFTERS[name](context_for(TARGET)), num_kv_blocks=40)
        for _ in range(10):
            first = [engine.add_request(prompt, greedy(25)) for prompt in prompts]
            while all(len(ids(request)) < 10 for request in first):
                engine.step()
            for request in first:
                engine.abort(request.id)
            engine.check_integrity()
            again = [engine.add_request(prompt, greedy(25)) for prompt in prompts]
            finish(engine)
            assert [ids(request) for request in again] == wants
            assert {request.answers[0].finish for request in first} == {FinishReason.ABORT}


def test_aborts_at_awkward_moments() -> None:
    """Twice, unknown, before the first chunk, in the middle of a prompt, after the end: blocks are freed once."""
    long, want = prompt_of(60), plain(TARGET, PROMPT, greedy(20))
    engine = make_engine(TARGET, self_drafter(TARGET), max_num_batched_tokens=16)
    other = engine.add_request(PROMPT, greedy(20))
    never, middle = engine.add_request(long, greedy(20)), engine.add_request(long, greedy(20))
    engine.abort(never.id)
    engine.abort(never.id)
    engine.abort(999)
    for _ in range(2):
        engine.step()
    assert 0 < middle.answers[0].seq.n_computed < 60
    engine.abort(middle.id)
    engine.abort(middle.id)
    finish(engine)
    engine.abort(other.id)
    assert ids(other) == want.token_ids
    assert other.answers[0].finish is FinishReason.LENGTH
    assert (engine.metrics.requests_aborted, engine.metrics.requests_finished) == (2, 1)


@pytest.mark.parametrize("when", [0, 3, 9])
def test_aborts_from_inside_a_step(when: int) -> None:
    """A processor (between draft and verify) that aborts its own request and a neighbour, also as it finishes."""
    engine = make_engine(TARGET, self_drafter(TARGET))
    requests: list[Request] = []

    def spoil(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(output) == when:
            for request in requests[:2]:
                engine.abort(request.id)
        return logits

    requests += [
        engine.add_request(PROMPT, greedy(10, processors=(spoil,))),
        engine.add_request([4, 5], greedy(30, n=2)),
        engine.add_request([6, 7, 8], greedy(30)),
    ]
    finish(engine)
    first, second, third = requests
    # the step of the last token ends the answer before its abort is heard
    assert first.answers[0].finish is (FinishReason.LENGTH if when == 9 else FinishReason.ABORT)
    assert [answer.finish for answer in second.answers] == [FinishReason.ABORT] * 2
    assert ids(third) == plain(TARGET, [6, 7, 8], greedy(30)).token_ids
    assert ids(first) == plain(TARGET, PROMPT, greedy(10)).token_ids[: len(ids(first))]


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_a_rule_that_raises_ends_its_own_request_only(method: str) -> None:
    """The error's text is in the answer, the tokens before it stand, neighbours and later requests are untouched."""

    def fail(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(output) >= 6:
            raise RuntimeError("no more than six")
        return logits

    def poison(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits * np.nan if len(output) >= 6 else logits

    def nothing_left(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return np.full_like(logits, -np.inf) if len(output) >= 6 else logits

    def wrong_shape(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits[:5] if len(output) >= 6 else logits

    free = plain(TARGET, PROMPT, greedy(20))
    for rule, said in ((fail, "no more"), (poison, "nan"), (nothing_left, "no token"), (wrong_shape, "shape")):
        engine = make_engine(TARGET, self_drafter(TARGET, method), method=method, num_kv_blocks=40)
        good, bad = engine.add_request(PROMPT, greedy(20)), engine.add_request(PROMPT, greedy(20, processors=(rule,)))
        finish(engine)
        assert ids(good) == free.token_ids
        answer = RequestOutput.of(bad).completions[0]
        assert answer.finish_reason is FinishReason.ERROR
        assert said in answer.error
        assert answer.token_ids == free.token_ids[: len(answer.token_ids)]
        assert run_all(engine, [(PROMPT, greedy(20))])[0].token_ids == free.token_ids


def test_a_rule_that_raises_off_the_path_does_no_harm() -> None:
    """A token that cannot be drawn has no future to ask rules about: drafting it changes nothing."""

    def strict(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if 9 in output:
            raise RuntimeError("9 was to be impossible")
        return logits

    params = greedy(20, banned_token_ids=(9,), processors=(strict,))
    want = plain(TARGET, PROMPT, params)
    for method in ("standard", "block", "coupled"):
        got = run_all(make_engine(TARGET, Script(9, 9, 9), method=method), [(PROMPT, params)])[0]
        assert_same(got, want, method)


def test_a_seed_is_the_request_and_nothing_else() -> None:
    """Seed 42 twice alone and once among eight unseeded ones: three equal outputs; seed 43 differs."""
    for method in ("standard", "block", "coupled"):

        def fresh(method: str = method) -> Engine:
            return make_engine(TARGET, self_drafter(TARGET, method), method=method, num_kv_blocks=200)

        hot = SamplingParams(temperature=2.0, max_tokens=10, seed=42)
        alone = [run_all(fresh(), [(PROMPT, hot)])[0].token_ids for _ in range(2)]
        unseeded = (PROMPT, SamplingParams(temperature=2.0, max_tokens=10))
        crowd = run_all(fresh(), [*[unseeded] * 4, (PROMPT, hot), *[unseeded] * 4])
        assert alone[0] == alone[1] == crowd[4].token_ids
        assert len({answer.token_ids for answer in crowd}) == 9
        other = SamplingParams(temperature=2.0, max_tokens=10, seed=43)
        assert run_all(fresh(), [(PROMPT, other)])[0].token_ids != alone[0]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_speculation_can_be_turned_off_for_one_request(name: str) -> None:
    """Its drafts are none, the neighbour's are some, both are plain's; with logprobs on drafts are still made."""
    engine = make_engine(TARGET, DRAFTERS[name](context_for(TARGET)))
    jobs = [(PROMPT[:-1], greedy(24), SpecParams(enabled=False)), (PROMPT[:-1], greedy(24, logprobs=1), SpecParams())]
    off, on = run_all(engine, jobs)
    zero = run_all(engine, [(PROMPT[:-1], greedy(24), SpecParams(max_draft=0))])[0]
    for got in (off, on, zero):
        assert_same(got, plain(TARGET, PROMPT[:-1], greedy(24)))
    assert off.stats.drafted == zero.stats.drafted == 0 < on.stats.drafted


def test_engines_built_anew_behave_the_same() -> None:
    """Twenty fresh engines: the same acceptance each time."""
    want = plain(TARGET, PROMPT, greedy(10)).token_ids
    counts = set()
    for _ in range(20):
        got = run_all(make_engine(TARGET, Oracle({tuple(PROMPT): want})), [(PROMPT, greedy(10))])[0]
        counts.add((got.token_ids, got.stats.accepted, got.stats.drafted))
    assert counts == {(want, 8, 8)}
