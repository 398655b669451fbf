"""One answer: where it ends, which text is handed out when, what came from a draft, and its counters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as List
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import FinishReason, Sequence
from outrider.engine.answer import Answer, Segment, SpecStats
from outrider.models.detokenizer import Detokenizer
from tests.engine.harness import ToyTokenizer

EOS = 0
PIECES: list[str | bytes] = ["<eos>", "a", "b", "ab", "ba", "", "c", b"\xc3", b"\xa9", "\u00e9a", b"\xf0\x9f", b"a\xc3"]
"""Token 0 is special; 7 and 8 together are one letter; 10 and 11 end with an incomplete one."""


def answer(max_len: int = 100, **rules: Any) -> Answer:
    """An answer to a prompt of two tokens."""
    seq = Sequence(0, [1, 1], 2, SamplingParams(**rules), SpecParams(), seed=0, max_len=max_len)
    detokenizer = Detokenizer(cast(Any, ToyTokenizer(PIECES, special=EOS)))
    return Answer(seq, cast(Any, None), detokenizer, (EOS,))


def push(to: Answer, token: int, drafted: bool = False) -> FinishReason | None:
    to.seq.tokens.append(token)
    return to.push(token, drafted)


def feed(to: Answer, tokens: List[int]) -> str:
    """Pushes tokens until the answer ends; returns what was handed out, checking that it ends as the text."""
    out = ""
    for token in tokens:
        if push(to, token) is not None:
            break
        out += "".join(s.text for s in to.release())
        assert to.text.startswith(out)
    return out + "".join(s.text for s in to.release())


def end_of(tokens: List[int], stops: List[str], min_tokens: int) -> tuple[int, str, bool]:
    """Brute force: tokens in the answer, its text, and whether a stop string ended it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for n, token in enumerate(tokens, 1):
        before = len(text)
        piece = PIECES[token]
        text += decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        places = [i for s in stops for i in range(len(text)) if text.startswith(s, i) and i + len(s) > before]
        if n >= min_tokens and places:
            return n, text[: min(places)], True
    return len(tokens), text + decoder.decode(b"", final=True), False


stop_strings = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3)
outputs = st.lists(st.tuples(st.integers(1, len(PIECES) - 1), st.booleans()), min_size=1, max_size=14)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(outputs, stop_strings, st.integers(0, 6), st.data())
def test_text_is_cut_at_the_first_stop_string_and_never_taken_back(
    output: list[tuple[int, bool]], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    tokens = [token for token, _ in output]
    n, text, stopped = end_of(tokens, stops, min_tokens)
    got = answer(2 + len(tokens), stop=stops, min_tokens=min_tokens, max_tokens=20)
    segments: list[Segment] = []
    finish = None
    for token, drafted in output[:n]:
        assert finish is None, "ended too early"
        finish = push(got, token, drafted)
        if data.draw(st.booleans()):
            segments += got.release()
        out = "".join(s.text for s in segments)
        assert got.text.startswith(out)
    segments += got.release()
    assert finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert got.finish is finish
    assert got.text == text == "".join(s.text for s in segments)
    assert got.drafted == [drafted for _, drafted in output[:n]]
    assert got.release() == []


def tail_may_stop(text: str, k: int, stops: List[str]) -> bool:
    return any(len(s) > k and s.startswith(text[-k:]) for s in stops)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(outputs, stop_strings)
def test_exactly_the_text_that_may_begin_a_stop_string_is_held_back(
    output: list[tuple[int, bool]], stops: list[str]
) -> None:
    got = answer(stop=stops)
    out = ""
    for token, _ in output:
        if push(got, token) is not None:
            break
        out += "".join(s.text for s in got.release())
        held = max((k for k in range(1, len(got.text) + 1) if tail_may_stop(got.text, k, stops)), default=0)
        assert out == got.text[: len(got.text) - held]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(outputs)
def test_each_letter_is_marked_as_the_token_that_completed_it(output: list[tuple[int, bool]]) -> None:
    got = answer(2 + len(output))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    want: list[tuple[str, bool]] = []
    for token, drafted in output:
        push(got, token, drafted)
        piece = PIECES[token]
        want += [(c, drafted) for c in decoder.decode(piece.encode() if isinstance(piece, str) else piece)]
    want += [(c, False) for c in decoder.decode(b"", final=True)]
    segments = got.release()
    assert [(c, s.drafted) for s in segments for c in s.text] == want
    assert all(s.text for s in segments)


def test_a_stop_string_across_tokens_and_inside_one() -> None:
    assert feed(answer(stop=["bab"]), [1, 3, 4, 4]) == "aab"
    assert feed(answer(stop="\u00e9"), [1, 7, 8]) == "a"
    assert feed(answer(stop=["b", "ab"]), [3]) == ""


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_counts() -> None:
    got = answer(stop=["a", "\u00e9a"])
    assert feed(got, [6, 9]) == "c"
    assert got.finish is FinishReason.STOP


def test_before_min_tokens_a_complete_stop_string_does_not_count_then_or_later() -> None:
    got = answer(stop=["ab", "cccccc"], min_tokens=3)
    assert feed(got, [3, 6, 6, 2, 3]) == "abccb"
    assert got.finish is FinishReason.STOP
    assert got.seq.n_output == 5


def test_eos_and_stop_tokens_end_the_answer_without_their_text() -> None:
    got = answer()
    assert feed(got, [1, EOS]) == "a"
    assert (got.finish, got.seq.n_output) == (FinishReason.STOP, 2)
    got = answer(stop_token_ids=(2,))
    assert feed(got, [1, 2]) == "a"
    assert got.finish is FinishReason.STOP


def test_ignored_eos_is_a_token_like_any_other_but_stop_tokens_still_count() -> None:
    got = answer(ignore_eos=True, stop_token_ids=(6,))
    assert feed(got, [1, EOS, 2, 6, 1]) == "ab"
    assert got.seq.n_output == 4


def test_the_last_allowed_token_ends_the_answer_and_a_stop_wins_over_it() -> None:
    got = answer(max_len=4)
    assert feed(got, [1, 2, 3]) == "ab"
    assert got.finish is FinishReason.LENGTH
    got = answer(max_len=4, stop="b")
    assert feed(got, [1, 2]) == "a"
    assert got.finish is FinishReason.STOP


def test_an_incomplete_letter_comes_out_as_a_replacement_at_the_end_only() -> None:
    got = answer(max_len=4)
    push(got, 1, True)
    push(got, 10, True)
    assert got.release() == [Segment("a", True), Segment("\ufffd", False)]


def test_text_held_back_for_a_stop_string_comes_out_when_the_answer_is_aborted() -> None:
    got = answer(stop="abc")
    push(got, 3)
    assert got.release() == []
    got.end(FinishReason.ABORT, "why")
    assert (got.release(), got.error) == ([Segment("ab", False)], "why")


def test_without_a_tokenizer_there_is_no_text() -> None:
    seq = Sequence(0, [1], 1, SamplingParams(), SpecParams(), seed=0, max_len=3)
    got = Answer(seq, cast(Any, None), None, ())
    assert feed(got, [5, 6]) == ""
    assert got.finish is FinishReason.LENGTH


steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda t: (max(t), min(t))), max_size=10)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(steps, max_size=4))
def test_counters_add_up(answers: list[list[tuple[int, int]]]) -> None:
    parts = []
    for one in answers:
        parts.append(SpecStats())
        for drafted, accepted in one:
            parts[-1].add_step(drafted, accepted, accepted + 1, "" if drafted else "nothing found")
    total = SpecStats.total(parts)
    everything = [step for one in answers for step in one]
    assert total.steps == len(everything)
    assert total.drafts == sum(drafted > 0 for drafted, _ in everything)
    assert total.drafted == sum(drafted for drafted, _ in everything)
    assert total.accepted == sum(accepted for _, accepted in everything) == sum(total.accepted_per_position)
    assert total.accepted_per_position == [
        sum(accepted > d for _, accepted in everything) for d in range(max((a for _, a in everything), default=0))
    ]
    assert sum(total.no_draft.values()) == sum(drafted == 0 for drafted, _ in everything)
    if everything:
        assert total.tokens_per_step == pytest.approx(1 + total.accepted / total.steps)
    if total.drafts:
        assert total.acceptance_rate == total.accepted / total.drafted
        assert total.mean_acceptance_length == 1 + total.accepted / total.drafts


def test_rates_of_nothing_are_plain_numbers() -> None:
    empty = SpecStats()
    assert (empty.tokens_per_step, empty.acceptance_rate, empty.mean_acceptance_length) == (0.0, 0.0, 1.0)
