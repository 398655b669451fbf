"""The index of a text against a search by comparison, taken in by the token and at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec.text_index import _MANY, _SOME, TextIndex, lasting

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)
LENGTHS = (5, 3, 2, 1)


def found(index: TextIndex, tail: list[int]) -> list[int]:
    return index.places(tail, len(index.tokens))


def searched(tokens: list[int], tail: list[int]) -> list[int]:
    n = len(tail)
    return [end for end in range(len(tokens) - 1, n - 1, -1) if tokens[end - n : end] == tail]


@FAST
@given(st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=3 * _MANY)), st.data())
def test_places_are_those_that_a_search_finds_however_the_text_came(tokens: list[int], data: st.DataObject) -> None:
    index = TextIndex(LENGTHS)
    while len(index.tokens) < len(tokens):
        more = data.draw(st.sampled_from([1, 3, _MANY, 2 * _MANY]))
        index.follow(tokens, min(len(tokens), len(index.tokens) + more))
    assert index.tokens == tokens
    for n in LENGTHS:
        if n <= len(tokens):
            assert found(index, tokens[-n:]) == searched(tokens, tokens[-n:])
    assert not found(index, [9])


def test_many_at_once_leave_the_same_as_one_by_one() -> None:
    rng = random.Random(3)
    together, apart = TextIndex(LENGTHS), TextIndex(LENGTHS)
    for _ in range(6):
        text = [rng.choice([0, 1, 49151]) for _ in range(rng.randrange(1, 3 * _MANY))]
        together.extend(text)
        for token in text:
            apart.extend([token])
        if rng.random() < 0.5:
            for index in (together, apart):
                index.end_text()
    assert together._sums == apart._sums
    assert together._newest == apart._newest
    assert together._before == apart._before


def test_one_that_keeps_up_is_never_far_behind_and_loses_nothing() -> None:
    rng = random.Random(5)
    tokens: list[int] = []
    late, close = TextIndex(LENGTHS), TextIndex(LENGTHS)
    held = 0
    for _ in range(300):
        tokens += [rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 40, 200]))]
        size = len(late.tokens)
        late.keep_up(tokens, len(tokens) - 1)
        assert late.tokens == tokens[: len(late.tokens)]
        assert len(tokens) - len(late.tokens) <= _SOME
        held += len(late.tokens) == size
        close.follow(tokens, len(tokens))
        if rng.random() < 0.2:
            late.follow(tokens, len(tokens))
            assert (late._sums, late._newest, late._before) == (close._sums, close._newest, close._before)
    assert held > 50, "a few tokens are left for later"


def test_no_place_lies_across_two_texts_and_what_is_forgotten_is_not_found() -> None:
    index = TextIndex(LENGTHS)
    for text in ([1, 2], [3, 1] * _MANY, [2, 3]):
        index.extend(text)
        index.end_text()
    assert not found(index, [2, 3, 1])
    assert found(index, [1, 2]) == [2]
    index.forget(2)
    assert not found(index, [1, 2])
    assert found(index, [3, 1]) == list(range(2 * _MANY, 0, -2))
    index.forget(2 * _MANY)
    assert not found(index, [3, 1])
    assert found(index, [2, 3]) == [2]


def test_a_text_that_shrank_is_taken_in_anew() -> None:
    index = TextIndex(LENGTHS)
    index.follow([1, 2, 1, 2, 1], 5)
    index.follow([2, 2, 2], 3)
    assert index.tokens == [2, 2, 2]
    assert found(index, [2, 2]) == [2]
    assert not found(index, [1])


def test_places_are_compared_with_the_text_and_not_only_by_their_hash() -> None:
    index = TextIndex((2,))
    index.extend([1, 2, 5, 6, 1, 2, 9])
    index._newest[2][index._key(2, 2)] = 4  # as if 5, 6 had the hash of 1, 2
    index._before[2][3] = 2
    assert found(index, [1, 2]) == [2]


def test_how_far_a_match_goes() -> None:
    index = TextIndex((1,))
    index.extend([7, 1, 2, 3, 8])
    assert index.agreeing(4, [7, 1, 2, 3], 1) == 4
    assert index.agreeing(4, [0, 9, 1, 2, 3], 1) == 3
    assert index.agreeing(4, [2, 3], 1) == 2


def test_a_longer_match_lasts_longer() -> None:
    assert [lasting(2, depth) for depth in (0, 1, 2)] == pytest.approx([1, 2 / 3, 1 / 2])
    assert lasting(4, 3) == lasting(1, 3)
    assert lasting(12, 5) == pytest.approx(2 / 3)
