"""Greedy output equals plain decoding, token for token, whatever drafts, lengths, batches, chunks, pools and caches."""

from __future__ import annotations

import functools

import pytest

from outrider.core.params import SpecParams
from outrider.core.types import FinishReason
from outrider.engine.request import RequestOutput
from tests.engine.drafters import (
    Build,
    Oracle,
    Wrong,
    context_for,
    registered,
    scripted,
    self_drafter,
)
from tests.engine.harness import (
    all_pairs,
    assert_same,
    finish,
    greedy,
    make_engine,
    plain,
    run_all,
    toy_target,
    with_eos,
)
from tests.toy import full_logits, toy_config

TARGET = toy_target(seed=1)
VOCAB = TARGET.config.vocab_size
COMMON = [7, 3, 9, 7, 3, 9, 7]
PROMPTS = [
    [*COMMON, 3],
    [*COMMON, 2, 5, 2],
    [*COMMON, 3, 9, 7, 30],
    [11],
    [4, 4, 4, 4, 4, 4, 4, 4, 4],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [*COMMON, 3, 9, 7, 31],
    [20, 21],
]
PARAMS = greedy(20)


@functools.cache
def reference(eos: int | None) -> tuple[RequestOutput, ...]:
    model = TARGET if eos is None else with_eos(TARGET, eos)
    return tuple(plain(model, prompt, PARAMS) for prompt in PROMPTS)


@functools.cache
def eos_token() -> int:
    """A token that ends some of the answers early, at different places, and leaves others alone."""
    outputs = [answer.token_ids for answer in reference(None)]

    def spread(token: int) -> int:
        ends = [out.index(token) for out in outputs if token in out]
        return len(set(ends) - {0}) if len(ends) < len(outputs) - 1 else 0

    return max(range(VOCAB), key=spread)


def answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    """Greedy outputs that run on behind EOS."""
    return {tuple(prompt): answer.token_ids for prompt, answer in zip(PROMPTS, reference(None), strict=True)}


def drafters() -> dict[str, Build]:
    return {**dict(registered()), **dict(scripted(answers(), VOCAB))}


def test_plain_decoding_is_the_cache_free_argmax() -> None:
    """The reference itself: the engine without a drafter against a dense pass a token."""
    for prompt, answer in zip(PROMPTS, reference(None), strict=True):
        text = list(prompt)
        while len(text) < len(prompt) + PARAMS.max_tokens:
            text.append(int(full_logits(TARGET.decoder, text)[-1].argmax()))
        assert tuple(text[len(prompt) :]) == answer.token_ids
        assert answer.completions[0].finish_reason is FinishReason.LENGTH


def test_the_references_end_in_different_ways() -> None:
    """Guards the tests below against answers that never meet EOS, or all do at once."""
    reasons = [answer.completions[0].finish_reason for answer in reference(eos_token())]
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(reasons)
    assert len({len(answer.token_ids) for answer in reference(eos_token())}) > 2


RULES = ("standard", "block")
NAMES = list(dict([*registered(), *scripted({}, VOCAB)]))
ENDS = ("eos", "length")
GRID = all_pairs(NAMES, range(1, 9), range(1, 9), (3, 7, 64), ("roomy", "tight"), (True, False), RULES, ENDS)


def test_the_grid_holds_every_pair() -> None:
    assert {(row[0], row[1]) for row in GRID} == {(name, gamma) for name in NAMES for gamma in range(1, 9)}
    assert {(row[2], row[4]) for row in GRID} == {(n, pool) for n in range(1, 9) for pool in ("roomy", "tight")}
    assert {(row[3], row[5]) for row in GRID} == {(rows, caching) for rows in (3, 7, 64) for caching in (True, False)}
    assert sum(must_preempt(*row) for row in GRID) > len(NAMES)


def must_preempt(name: str, gamma: int, batch: int, rows: int, pool: str, caching: bool, method: str, end: str) -> bool:
    """Whether the pool is sure to run out: answers that end early may fit, and few rows let few in at once."""
    return batch > 1 and rows > 3 and pool == "tight" and end == "length"


def tight_pool(batch: int) -> int:
    """Blocks of 4 that hold the longest sequence, and too few for all at once when there are several."""
    longest = max(len(prompt) for prompt in PROMPTS[:batch]) + PARAMS.max_tokens
    return -(-longest // 4) + batch - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_plain_output(name: str) -> None:
    """Draft lengths 1-8, batches 1-8, prompt chunks, forced preemption and prefix caching, in all pairs."""
    build = drafters()[name]
    for row in [row for row in GRID if row[0] == name]:
        _, gamma, batch, rows, pool, caching, method, end = row
        eos = eos_token() if end == "eos" else None
        target = TARGET if eos is None else with_eos(TARGET, eos)
        engine = make_engine(
            target,
            build(context_for(target, gamma, method)),
            gamma=gamma,
            method=method,
            num_kv_blocks=tight_pool(batch) if pool == "tight" else 128,
            enable_prefix_caching=caching,
            max_num_batched_tokens=rows,
        )
        what = f"{name=} {gamma=} {batch=} {rows=} {pool=} {caching=} {method=} {end=}"
        got = run_all(engine, [(prompt, PARAMS) for prompt in PROMPTS[:batch]])
        for mine, theirs in zip(got, reference(eos)[:batch], strict=True):
            assert_same(mine, theirs, what)
        if must_preempt(*row):
            assert engine.metrics.preemptions > 0, what


@pytest.mark.parametrize("name", NAMES)
def test_coupled_verification_is_greedy_too(name: str) -> None:
    """The coupled rule, on a batch that is preempted."""
    engine = make_engine(
        TARGET, drafters()[name](context_for(TARGET, 5, "coupled")), gamma=5, method="coupled", num_kv_blocks=16
    )
    got = run_all(engine, [(prompt, PARAMS) for prompt in PROMPTS])
    assert engine.metrics.preemptions > 0
    for mine, theirs in zip(got, reference(None), strict=True):
        assert_same(mine, theirs, name)


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_every_family(architecture: str) -> None:
    """Sliding window, biases, q/k norms: trees and chains over the same paged KV."""
    window = {"sliding_window": (6, None)} if architecture == "mistral" else {}
    target = toy_target(toy_config(architecture, **window), seed=2)
    wants = [plain(target, prompt, PARAMS) for prompt in PROMPTS[:4]]
    for name in ("ngram tree", "model self tree", "model other"):
        engine = make_engine(target, drafters()[name](context_for(target, 6)), gamma=6, num_kv_blocks=18)
        for mine, theirs in zip(run_all(engine, [(p, PARAMS) for p in PROMPTS[:4]]), wants, strict=True):
            assert_same(mine, theirs, f"{architecture} {name}")
        assert engine.metrics.preemptions > 0


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["oracle", "self", "self, top_k 1"])
def test_a_perfect_drafter_is_always_accepted(gamma: int, kind: str) -> None:
    """k + 1 tokens a step and acceptance 1 at every length: the draft model never misses the bonus token."""
    n = 8 * (gamma + 1)
    params = greedy(n)
    if kind == "self, top_k 1":
        params = type(params)(temperature=1.0, top_k=1, max_tokens=n, seed=3)
    prompt = PROMPTS[0]
    want = plain(TARGET, prompt, greedy(n))
    drafter = Oracle({tuple(prompt): want.token_ids}) if kind == "oracle" else self_drafter(TARGET)
    got = run_all(make_engine(TARGET, drafter, gamma=gamma), [(prompt, params)])[0]
    assert_same(got, want)
    assert got.stats.steps == 8
    assert got.stats.accepted == got.stats.drafted == 8 * gamma
    assert got.stats.tokens_per_step == gamma + 1
    assert all(got.completions[0].drafted[i] == (i % (gamma + 1) != gamma) for i in range(n))


def test_a_useless_drafter_costs_no_step() -> None:
    """Everything rejected: one token a step, nothing accepted."""
    want = reference(None)[0]
    drafter = Wrong(answers(), VOCAB)
    got = run_all(make_engine(TARGET, drafter), [(PROMPTS[0], PARAMS)])[0]
    assert_same(got, want)
    assert (got.stats.steps, got.stats.accepted) == (20, 0)
    assert got.stats.drafted == sum(min(4, 20 - i - 1) for i in range(20))


def test_the_draft_length_changes_nothing() -> None:
    """Temperature 0 with a fixed seed: five lengths, 80 tokens, one output."""
    params = greedy(80, seed=7)
    want = plain(TARGET, PROMPTS[1], params)
    for gamma in (1, 2, 3, 5, 8):
        for build in (dict(registered())["ngram chain"], dict(registered())["model other"]):
            engine = make_engine(TARGET, build(context_for(TARGET, gamma)), gamma=gamma)
            assert_same(run_all(engine, [(PROMPTS[1], params)])[0], want, gamma)


def test_very_repetitive_prompts() -> None:
    """One token 48 times over, looked up with n-grams of 2 to 5, again and again in one engine."""
    prompt, params = [6] * 48, greedy(32)
    want = plain(TARGET, prompt, params)
    engine = make_engine(TARGET, dict(registered())["ngram long"](context_for(TARGET)))
    for _ in range(20):
        got = run_all(engine, [(prompt, params)])[0]
        assert_same(got, want)
        assert got.stats.drafted > 0


def test_one_temperature_above_zero_still_drafts() -> None:
    """Temperatures 0, 1e-6 and 0.01 with top_k 0 or 1: drafts are made, nearly all are kept, the output is greedy."""
    want = reference(None)[0]
    for temperature in (0, 1e-6, 0.01):
        for top_k in (0, 1):
            params = type(PARAMS)(temperature=temperature, top_k=top_k, max_tokens=20, seed=1)
            got = run_all(make_engine(TARGET, self_drafter(TARGET)), [(PROMPTS[0], params)])[0]
            assert got.stats.drafted > 0
            assert got.stats.acceptance_rate == 1.0
            assert_same(got, want, (temperature, top_k))


def test_a_row_verified_among_others_has_the_same_logits() -> None:
    """The log-probabilities of rows verified 1 to 8 at a time agree with those computed one by one, to 1e-9."""
    params = greedy(100, logprobs=3)
    want = plain(TARGET, PROMPTS[2], params).completions[0]
    oracle = Oracle({tuple(PROMPTS[2]): want.token_ids})
    for gamma in range(1, 9):
        got = run_all(make_engine(TARGET, oracle, gamma=gamma), [(PROMPTS[2], params)])[0].completions[0]
        assert got.token_ids == want.token_ids
        for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]


def test_the_books_are_right_when_everything_runs_at_once() -> None:
    """Requests of several drafters in one engine, arriving while others run."""
    target = TARGET
    context = context_for(target)
    names = ["none", "ngram tree", "model other tree", "oracle"]
    engine = make_engine(target, {name: drafters()[name](context) for name in names}, num_kv_blocks=24)
    requests = []

    def arrive(_: object) -> None:
        if len(requests) < 16:
            i = len(requests)
            spec = SpecParams(drafter=names[i % len(names)])
            requests.append(engine.add_request(PROMPTS[i % 8], PARAMS, spec))

    arrive(None)
    finish(engine, arrive)
    assert len(requests) == 16
    for i, request in enumerate(requests):
        assert_same(RequestOutput.of(request), reference(None)[i % 8], names[i % len(names)])
    assert engine.metrics.preemptions > 0
    assert engine.metrics.spec["none"].drafted == 0
    assert all(engine.metrics.spec[name].drafted > 0 for name in names[1:])
