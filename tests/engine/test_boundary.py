"""Edges of answers, contexts and drafts: output, finish reason and counts equal plain decoding at every edge."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.drafters import Oracle, RandomTree, Script, Shape, Wrong, context_for, registered, self_drafter
from tests.engine.harness import assert_same, greedy, make_engine, plain, run_all, toy_target, with_eos
from tests.toy import toy_config

TARGET = toy_target(seed=1)
PROMPT = [7, 3, 9, 7, 3, 9, 7, 3, 9, 7, 30]
FREE = plain(TARGET, PROMPT, greedy(40)).token_ids
ORACLE = {tuple(PROMPT): FREE}
NGRAM = dict(registered())["ngram chain"]


def first_time(token: int) -> int:
    return FREE.index(token)


EOS_PLACES = [i for i, token in enumerate(FREE[:14]) if first_time(token) == i]


def test_eos_places_reach_every_offset_of_a_block() -> None:
    assert {place % 6 for place in EOS_PLACES} == set(range(6))
    assert 0 in EOS_PLACES


@pytest.mark.parametrize("place", EOS_PLACES)
def test_eos_anywhere_in_a_block_ends_the_answer(place: int) -> None:
    """An accepted EOS, at each offset of a block of six, ends ids, logprobs, stream, counts and accepted tokens."""
    target = with_eos(TARGET, FREE[place])
    params = greedy(40, logprobs=1)
    want = plain(target, PROMPT, params)
    assert want.token_ids == FREE[: place + 1]
    engine = make_engine(target, Oracle(ORACLE), gamma=5)
    request = engine.add_request(PROMPT, params)
    streamed: list[int] = []
    while request.finished is None:
        for delta in engine.step():
            streamed += delta.token_ids
            assert delta.logprobs is not None
            assert len(delta.logprobs) == len(delta.token_ids)
        engine.check_integrity()
    answer = request.answers[0]
    assert tuple(streamed) == tuple(answer.seq.output_ids) == want.token_ids
    assert answer.finish is FinishReason.STOP
    assert len(answer.logprobs) == len(answer.drafted) == answer.stats.emitted == place + 1
    assert answer.stats.accepted == sum(answer.drafted)
    assert engine.metrics.generated_tokens == place + 1


@pytest.mark.parametrize("place", EOS_PLACES[:4])
def test_ignore_eos_runs_on(place: int) -> None:
    target = with_eos(TARGET, FREE[place])
    got = run_all(make_engine(target, Oracle(ORACLE), gamma=5), [(PROMPT, greedy(40, ignore_eos=True))])[0]
    assert got.token_ids == FREE
    assert got.completions[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", EOS_PLACES[:4])
def test_a_stop_token_of_the_request_ends_it_like_eos(place: int) -> None:
    params = greedy(40, stop_token_ids=(FREE[place],))
    got = run_all(make_engine(TARGET, Oracle(ORACLE), gamma=5), [(PROMPT, params)])[0]
    assert got.token_ids == FREE[: place + 1]
    assert got.completions[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("gamma", [1, 4])
def test_min_tokens_holds_at_every_row(min_tokens: int, gamma: int) -> None:
    """EOS at index 2: it may first be drawn when ``min_tokens`` outputs exist, not a row earlier or later."""
    target = with_eos(TARGET, FREE[2])
    params = greedy(16, min_tokens=min_tokens)
    want = plain(target, PROMPT, params)
    assert (want.token_ids == FREE[:3]) == (min_tokens <= 2)
    assert len(want.token_ids) > min_tokens or want.token_ids[-1] != FREE[2]
    for drafter in (Oracle(ORACLE), self_drafter(target), Script(FREE[2])):
        assert_same(run_all(make_engine(target, drafter, gamma=gamma), [(PROMPT, params)])[0], want)


def test_eos_comes_at_once_when_min_tokens_allows_it() -> None:
    """A bias that makes EOS certain: exactly ``min_tokens`` other tokens come first, drafted EOS or not."""
    target = with_eos(TARGET, 5)
    for min_tokens in range(8):
        params = greedy(20, min_tokens=min_tokens, logit_bias={5: 100.0})
        got = run_all(make_engine(target, Script(5), gamma=4), [(PROMPT, params)])[0]
        assert 5 not in got.token_ids[:-1]
        assert (len(got.token_ids), got.token_ids[-1]) == (min_tokens + 1, 5)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10, 17, 18, 19])
def test_exactly_max_tokens_come_out(max_tokens: int) -> None:
    """Around 0, k, k + 1 and 2 (k + 1) tokens with k = 8: never one more, whatever was accepted."""
    for drafter in (Oracle(ORACLE), Wrong(ORACLE, 32), self_drafter(TARGET, draft_tree="2,1,2")):
        engine = make_engine(TARGET, drafter, gamma=8)
        request = engine.add_request(PROMPT, greedy(max_tokens))
        streamed: list[int] = []
        while request.finished is None:
            for delta in engine.step():
                streamed += delta.token_ids
        assert tuple(streamed) == FREE[:max_tokens]
        assert request.answers[0].finish is FinishReason.LENGTH
        assert request.answers[0].stats.emitted == max_tokens


def test_nothing_is_drafted_for_the_last_token() -> None:
    """A step that accepts all yields one token more than it drafts: the last token of an answer needs no draft."""
    drafter = Oracle(ORACLE)
    run_all(make_engine(TARGET, drafter, gamma=8), [(PROMPT, greedy(12))])
    assert [budget for _, _, budget in drafter.asked] == [8, 2]
    one = Oracle(ORACLE)
    run_all(make_engine(TARGET, one, gamma=8), [(PROMPT, greedy(1))])
    assert one.asked == []


@pytest.mark.parametrize("gamma", [1, 5, 16])
@pytest.mark.parametrize("prompt_length", [50, 62, 63])
def test_the_end_of_the_context(gamma: int, prompt_length: int) -> None:
    """max_model_len 64: the last ids and logprobs equal plain, and the answer ends with the context."""
    prompt = (PROMPT * 6)[:prompt_length]
    params = greedy(100, logprobs=1)
    want = plain(TARGET, prompt, params, max_model_len=64)
    assert len(want.token_ids) == 64 - prompt_length
    assert want.completions[0].finish_reason is FinishReason.LENGTH
    for drafter in (Oracle({tuple(prompt): want.token_ids}), self_drafter(TARGET), NGRAM(context_for(TARGET))):
        got = run_all(make_engine(TARGET, drafter, gamma=gamma, max_model_len=64), [(prompt, params)])[0]
        assert_same(got, want)
        for mine, theirs in zip(got.completions[0].logprobs or (), want.completions[0].logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_the_end_of_the_models_own_context() -> None:
    """Everything is accepted with k = 16 right up to the last position that the model knows."""
    target = toy_target(toy_config(max_position=128), seed=1)
    prompt = list(range(20)) * 3
    want = plain(target, prompt, greedy(300, ignore_eos=True))
    assert len(want.token_ids) == 68
    oracle = Oracle({tuple(prompt): want.token_ids})
    got = run_all(make_engine(target, oracle, gamma=16), [(prompt, greedy(300, ignore_eos=True))])[0]
    assert_same(got, want)
    assert got.stats.steps == 4


@pytest.mark.parametrize("tree", ["", "2,2,1,1"])
def test_an_answer_grows_out_of_the_draft_models_context(tree: str) -> None:
    """Draft context 64, target 256: all 50 tokens come, drafts stop at the limit, others keep speculating."""
    drafter = self_drafter(TARGET, max_model_len=64, draft_tree=tree)
    long, short = (PROMPT * 6)[:56], PROMPT
    wants = [plain(TARGET, prompt, greedy(50)) for prompt in (long, short)]
    engine = make_engine(TARGET, drafter)
    requests = [engine.add_request(prompt, greedy(50)) for prompt in (long, short)]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    for request, want in zip(requests, wants, strict=True):
        assert tuple(request.answers[0].seq.output_ids) == want.token_ids
    out = requests[0].answers[0].stats
    assert 0 < out.drafted < 30
    assert sum(count for reason, count in out.no_draft.items() if "64" in reason) > 30
    near = requests[1].answers[0].stats
    assert near.drafted >= 40
    assert not near.no_draft  # it ends before its own limit


def test_a_short_draft_model_of_its_own() -> None:
    """The limit is the draft model's own position table, when that is all it has."""
    small = toy_target(toy_config(max_position=24), seed=1)
    want = plain(TARGET, PROMPT, greedy(40))
    engine = make_engine(TARGET, TwoModels(small, TARGET, "standard", ModelSettings("toy")), gamma=6)
    got = run_all(engine, [(PROMPT, greedy(40))])[0]
    assert_same(got, want)
    assert got.stats.accepted > 0
    assert got.stats.no_draft


def test_a_prompt_longer_than_the_draft_models_context() -> None:
    """No draft, a reason that says so, the right output; a later short prompt is drafted for."""
    engine = make_engine(TARGET, self_drafter(TARGET, max_model_len=64))
    long = (PROMPT * 10)[:100]
    got = run_all(engine, [(long, greedy(20))])[0]
    assert_same(got, plain(TARGET, long, greedy(20)))
    assert got.stats.drafted == 0
    assert got.stats.no_draft["the draft model's context of 64 tokens is full"] == 19
    got = run_all(engine, [(PROMPT, greedy(20))])[0]
    assert got.stats.acceptance_rate == 1.0


def test_lookup_with_nothing_to_find() -> None:
    """Prompts shorter than the n-gram, and without repeats, alone and beside one that matches: no draft, =plain."""
    build = dict(registered())["ngram long"]
    prompts = [[1], [1, 2], [1, 2, 3], list(range(20))]
    matching = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    for alone in (True, False):
        for prompt in prompts:
            engine = make_engine(TARGET, build(context_for(TARGET)))
            jobs = [(prompt, greedy(1 if alone else 12))] + ([] if alone else [(matching, greedy(12))])
            for job, got in zip(jobs, run_all(engine, jobs), strict=True):
                assert_same(got, plain(TARGET, *job))
    engine = make_engine(TARGET, build(context_for(TARGET)))
    requests = [engine.add_request(prompt, greedy(8)) for prompt in (*prompts, matching)]
    engine.step()
    assert [request.answers[0].stats.drafted > 0 for request in requests] == [False] * 4 + [True]


@pytest.mark.parametrize("gamma", [1, 2, 8, 16, 64, 256])
def test_full_drafts_of_any_length(gamma: int) -> None:
    """One sequence, and four at once, each with 1 + k rows; 64 and more nodes need several mask words."""
    prompts = [[i, 3, 9, i] for i in range(4)]
    wants = [plain(TARGET, prompt, greedy(30)) for prompt in prompts]
    answers = {tuple(prompt): want.token_ids for prompt, want in zip(prompts, wants, strict=True)}
    for drafter in (Oracle(answers), RandomTree(32, Shape(tree=True, quality=0.9), answers)):
        engine = make_engine(TARGET, drafter, gamma=gamma, num_kv_blocks=400, max_num_batched_tokens=2000)
        for got, want in zip(run_all(engine, [(prompt, greedy(30)) for prompt in prompts]), wants, strict=True):
            assert_same(got, want)
            assert got.stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_wider_than_what_may_be_drawn(temperature: float) -> None:
    """Width 4 where top_k or the allowed tokens leave one token: the tree shrinks to what there is."""
    for rules in ({"top_k": 1}, {"allowed_token_ids": (9,)}, {"allowed_token_ids": (9, 4)}):
        params = SamplingParams(temperature=temperature, max_tokens=12, seed=1, **rules)
        drafter = self_drafter(TARGET, draft_tree="4,4,4")
        got = run_all(make_engine(TARGET, drafter, gamma=20), [(PROMPT, params)])[0]
        if temperature == 0 or "top_k" in rules or len(rules["allowed_token_ids"]) == 1:
            assert_same(got, plain(TARGET, PROMPT, params))
        if "allowed_token_ids" in rules:
            assert set(got.token_ids) <= set(rules["allowed_token_ids"])
        assert got.stats.accepted > 0


def test_requests_that_can_never_be_served_are_refused() -> None:
    """One sentence each, and the engine is as if they had not come."""
    engine = make_engine(TARGET, max_model_len=32)
    bad: list[tuple[Sequence[int], str]] = [
        ([], "empty"),
        (list(range(32)), "32 tokens"),
        ([1, 32], "token id 32"),
        ([1, -1], "token id -1"),
    ]
    for prompt, said in bad:
        with pytest.raises(SettingError, match=said):
            engine.add_request(prompt, greedy(4))
    for rules in ({"stop": ("x",)}, {"logit_bias": {32: 1.0}}, {"stop_token_ids": (40,)}):
        with pytest.raises(SettingError):
            engine.add_request([1], greedy(4, **rules))
    for rules in ({"max_tokens": 0}, {"temperature": -1.0}, {"logit_bias": {1: float("nan")}}):
        with pytest.raises(SettingError, match=next(iter(rules))):
            SamplingParams(**rules)
    assert not engine.has_work
    assert run_all(engine, [([1], greedy(4))])[0].completions[0].finish_reason is FinishReason.LENGTH
