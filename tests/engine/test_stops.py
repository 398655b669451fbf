"""Where an answer ends: ids, text, stream, logprobs and counts are cut at the same place, whatever was drafted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.engine.request import RequestOutput
from tests.engine.drafters import Oracle, RandomTree, Shape, Wrong, context_for, registered, self_drafter
from tests.engine.harness import (
    ToyTokenizer,
    assert_same,
    finish,
    greedy,
    make_engine,
    plain,
    run_all,
    toy_target,
    with_eos,
)
from tests.engine.laws import raw_logits

LETTERS = ToyTokenizer([*"abcdefghijklmnopqrstuvwxy", "<end>", *"ABCDEF"], special=25)
TARGET = toy_target(seed=1, tokenizer=LETTERS)
PROMPT = [7, 3, 9, 7, 3, 9, 7, 3, 9, 7, 30]
FREE = plain(TARGET, PROMPT, greedy(40))
ORACLE = {tuple(PROMPT): FREE.token_ids}
TEXT = "".join(LETTERS.pieces[token].decode() for token in FREE.token_ids)


def fresh_places(length: int) -> list[int]:
    """Indices of tokens that complete a string of ``length`` tokens which did not occur before."""
    return [i for i in range(length - 1, 20) if TEXT.find(TEXT[i + 1 - length : i + 1]) == i + 1 - length]


def test_the_free_answer_is_plain_text() -> None:
    """Guards the tests below: one character a token, and stops that end at every offset of a block of five."""
    assert FREE.text == TEXT
    assert len(TEXT) == 40
    for length in (1, 2, 3):
        assert len({place % 5 for place in fresh_places(length)}) >= 4


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_anywhere_in_a_block(length: int) -> None:
    """Ids end with the token that completes the stop, text before it; logprobs and counts fit; over two blocks too."""
    for place in fresh_places(length):
        params = greedy(40, stop=(TEXT[place + 1 - length : place + 1], "?"), logprobs=2)
        want = plain(TARGET, PROMPT, params)
        assert want.token_ids == FREE.token_ids[: place + 1]
        assert want.text == TEXT[: place + 1 - length]
        for drafter in (Oracle(ORACLE), self_drafter(TARGET, draft_tree="2,2,2"), Wrong(ORACLE, 32)):
            engine = make_engine(TARGET, drafter, gamma=4)
            request = engine.add_request(PROMPT, params)
            pieces, ids = [], []
            while request.finished is None:
                for delta in engine.step():
                    pieces.append(delta.text)
                    ids += delta.token_ids
                engine.check_integrity()
            got = RequestOutput.of(request)
            assert_same(got, want)
            assert got.completions[0].finish_reason is FinishReason.STOP
            assert "".join(pieces) == want.text, "streamed text is never taken back"
            assert tuple(ids) == want.token_ids
            assert got.usage["completion_tokens"] == place + 1
            assert len(got.completions[0].logprobs or ()) == len(got.completions[0].drafted) == place + 1
            assert got.stats.emitted == place + 1
            assert engine.metrics.generated_tokens == place + 1


def test_accepted_tokens_behind_the_end_do_not_count() -> None:
    """A block of six accepted tokens cut at the third: drafted six, accepted three, one step."""
    for params, target in (
        (greedy(40), with_eos(TARGET, FREE.token_ids[2])),
        (greedy(40, stop=(TEXT[1:3],)), TARGET),
    ):
        engine = make_engine(target, Oracle(ORACLE), gamma=6)
        got = run_all(engine, [(PROMPT, params)])[0]
        assert len(got.token_ids) == 3
        for stats in (got.stats, engine.metrics.spec["drafter"]):
            assert (stats.steps, stats.drafts, stats.drafted, stats.accepted, stats.emitted) == (1, 1, 6, 3, 3)
            assert stats.accepted_per_position == [1, 1, 1]
            assert stats.tokens_per_step == 3


def test_no_stop_before_min_tokens() -> None:
    """A newline comes early and late: the answer stops at the first one that ends at or after ``min_tokens``."""
    lines = ToyTokenizer(["\n" if i == 5 else chr(ord("a") + i) for i in range(32)])
    target = toy_target(seed=1, tokenizer=lines)

    def newlines(prompt: object, output: list[int], logits: np.ndarray) -> np.ndarray:
        logits[5] = 1e6 if len(output) in (1, 49, 60) else -1e6
        return logits

    for min_tokens, length in ((0, 2), (2, 2), (3, 50), (50, 50), (51, 61)):
        params = greedy(80, stop=("\n",), min_tokens=min_tokens, processors=(newlines,))
        want = plain(target, PROMPT, params)
        assert len(want.token_ids) == length
        for drafter in (self_drafter(target), dict(registered())["ngram chain"](context_for(target))):
            assert_same(run_all(make_engine(target, drafter), [(PROMPT, params)])[0], want)


def test_a_stop_string_that_was_complete_before_min_tokens_does_not_count_later() -> None:
    """Also beside a longer stop string, whose length must not make the search look back at old text."""
    short, long = TEXT[1], TEXT[2:5] + "?????"
    assert TEXT.count(short, 2) > 0
    again = TEXT.index(short, 4)
    for min_tokens in (3, 4):
        params = greedy(40, stop=(short, long), min_tokens=min_tokens)
        for drafter in (None, Oracle(ORACLE)):
            got = run_all(make_engine(TARGET, drafter), [(PROMPT, params)])[0]
            assert got.text == TEXT[:again]
            assert len(got.token_ids) == again + 1


def test_text_that_may_become_a_stop_is_held_back() -> None:
    """Half a stop string is not streamed until it is clear that it is none; then all of it comes."""
    params = greedy(40, stop=(TEXT[3:6] + "?",))
    engine = make_engine(TARGET)
    request = engine.add_request(PROMPT, params)
    shown, lengths = "", []
    while request.finished is None:
        shown += "".join(delta.text for delta in engine.step())
        lengths.append(len(shown))
    assert lengths[2:7] == [3, 3, 3, 3, 7]
    assert shown == request.answers[0].text == TEXT


def test_characters_over_several_tokens() -> None:
    """Bytes of one character spread over tokens: streamed text is whole characters; a rest ends as U+FFFD."""
    heart = "❤".encode()
    pieces: list[str | bytes] = [bytes([heart[i % 3]]) if i < 30 else "x" for i in range(32)]
    target = toy_target(seed=1, tokenizer=ToyTokenizer(pieces))
    params = greedy(8, processors=(in_turn,))
    for drafter in (None, self_drafter(target)):
        engine = make_engine(target, drafter)
        request = engine.add_request([31], params)
        shown = ""
        while request.finished is None:
            for delta in engine.step():
                shown += delta.text
                assert "�" not in delta.text or delta.finish_reason is not None
        assert shown == request.answers[0].text == "❤❤�"
        assert len(request.answers[0].seq.output_ids) == 8


def in_turn(prompt: object, output: list[int], logits: np.ndarray) -> np.ndarray:
    logits[:] = -1e9
    logits[len(output) % 3] = 0.0
    return logits


def test_special_tokens_in_the_text() -> None:
    """EOS is never text; another special token is left out unless asked for."""
    params = {"logit_bias": {25: 100.0}, "max_tokens": 3, "temperature": 0.0}
    for skip, text in ((True, ""), (False, "<end><end><end>")):
        got = run_all(make_engine(TARGET), [(PROMPT, SamplingParams(skip_special_tokens=skip, **params))])[0]
        assert got.text == text
    ended = run_all(make_engine(with_eos(TARGET, 25)), [(PROMPT, SamplingParams(skip_special_tokens=False, **params))])[
        0
    ]
    assert (ended.text, ended.token_ids) == ("", (25,))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("asked", [0, 1, 5])
def test_logprobs_are_the_models_own(temperature: float, asked: int) -> None:
    """One entry a token, of the asked size, equal to a cache-free pass, before any rule, drafts or not."""
    params = SamplingParams(
        temperature=temperature, seed=4, max_tokens=32, logprobs=asked, top_k=9, frequency_penalty=0.4
    )
    got = run_all(make_engine(TARGET, RandomTree(32, Shape(tree=True, sampled=True))), [(PROMPT, params)])[0]
    assert got.stats.drafted > 0
    answer = got.completions[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 32
    after = raw_logits(TARGET, PROMPT)
    for i, entry in enumerate(answer.logprobs):
        z = after(answer.token_ids[:i])
        row = z - z.max() - math.log(np.exp(z - z.max()).sum())
        assert entry.token == answer.token_ids[i]
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-9)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:asked].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:asked].tolist(), abs=1e-9)
    none = run_all(make_engine(TARGET), [(PROMPT, greedy(2))])[0]
    assert none.completions[0].logprobs is None


@pytest.mark.parametrize(
    "rules",
    [
        {"presence_penalty": 0.7, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 1.8},
        {"presence_penalty": -2.0},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_penalties_count_each_token_once_at_every_row(rules: dict[str, float], temperature: float) -> None:
    """Row i sees the output so far and drafts 0..i-1, each once: a right draft is accepted whole, as in plain."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, **rules)
    want = plain(TARGET, PROMPT, params)
    assert want.token_ids != FREE.token_ids[:24]
    for drafter in (Oracle({tuple(PROMPT): want.token_ids}), self_drafter(TARGET)):
        got = run_all(make_engine(TARGET, drafter, gamma=3), [(PROMPT, params)])[0]
        assert_same(got, want)
        assert got.stats.accepted == got.stats.drafted == 18
    for _, build in registered():
        got = run_all(make_engine(TARGET, build(context_for(TARGET, 5)), gamma=5), [(PROMPT, params)])[0]
        assert_same(got, want)


def test_a_processor_sees_every_node_with_its_own_history() -> None:
    """Whatever a drafter makes the verifier look at, the history ends at the node in question."""
    seen: list[tuple[int, ...]] = []

    def watch(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        assert list(prompt) == PROMPT
        seen.append(tuple(output))
        return logits

    params = greedy(12, processors=(watch,))
    got = run_all(make_engine(TARGET, Oracle(ORACLE), gamma=3), [(PROMPT, params)])[0]
    assert seen == [got.token_ids[:i] for i in range(12)], "each node on the path once, and no other"


def test_suppressed_tokens_are_not_copied_from_the_prompt() -> None:
    """Prompt lookup finds a banned token in a repeated n-gram: it may draft it, but it never comes out."""
    prompt = [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 3, 4]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, banned_token_ids=(9,))
        got = run_all(make_engine(TARGET, dict(registered())["ngram long"](context_for(TARGET))), [(prompt, params)])[0]
        assert got.stats.drafted > 0
        assert 9 not in got.token_ids
        if temperature == 0:
            assert_same(got, plain(TARGET, prompt, params))


def test_counts_add_up_over_choices_and_requests() -> None:
    """Emitted = tokens, accepted as marked, for each choice, each request and the whole engine; no counter falls."""
    target = with_eos(TARGET, 24)
    engine = make_engine(target, RandomTree(32, Shape(quality=0.7), {}), gamma=4)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20)
    requests = [engine.add_request(PROMPT, params), engine.add_request([1, 2], greedy(20))]
    seen = [0] * 5

    def check(_: object) -> None:
        spec = engine.metrics.spec["drafter"]
        now = [engine.metrics.generated_tokens, spec.steps, spec.drafted, spec.accepted, spec.emitted]
        assert all(before <= after for before, after in zip(seen, now, strict=True))
        seen[:] = now

    finish(engine, check)
    outputs = [RequestOutput.of(request) for request in requests]
    choices = [choice for output in outputs for choice in output.completions]
    assert len({choice.token_ids for choice in outputs[0].completions}) == 3
    for choice in choices:
        assert choice.stats.emitted == len(choice.token_ids) == len(choice.drafted)
        assert choice.stats.accepted == sum(choice.drafted) == sum(choice.stats.accepted_per_position)
        assert choice.stats.accepted_per_position == sorted(choice.stats.accepted_per_position, reverse=True)
    for output in outputs:
        assert output.usage["completion_tokens"] == sum(len(c.token_ids) for c in output.completions)
    total = engine.metrics.spec["drafter"]
    assert total.emitted == engine.metrics.generated_tokens == sum(len(choice.token_ids) for choice in choices)
    assert total.drafted == sum(choice.stats.drafted for choice in choices)
    assert total.accepted == sum(choice.stats.accepted for choice in choices)
