"""Prompt lookup against a brute-force search, and the shapes of its drafts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.spec.drafts.ngram import SCANNED, Ngram, NgramSettings

FAST = settings(max_examples=200, deadline=None, derandomize=True, database=None)
texts = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=40))


def propose(drafter: Ngram, tokens: list[int], budget: int = 4, seq_id: int = 0) -> Draft:
    """The draft for a sequence that holds ``tokens``."""
    seq = Sequence(seq_id, list(tokens), 1, SamplingParams(), SpecParams(), seed=0)
    (draft,) = drafter.propose([Span(seq, len(tokens) - 1, 1, budget=budget)])
    assert len(draft) <= budget
    assert set(draft.q) <= {None}, "a look-up is certain"
    return draft


def lookup(shortest: int = 1, longest: int = 4, selection: str = "recent", branches: int = 1) -> Ngram:
    """Without a limit to how far a match goes on, however unlikely."""
    return Ngram(NgramSettings(longest, shortest, selection, branches, 256, 0))


def oracle(tokens: list[int], shortest: int, longest: int, selection: str, branches: int) -> list[int]:
    """Where to copy from, best first: each longest match, newest or most frequent first, with a new first token.

    Of the places of an n-gram the newest ``SCANNED`` count.
    """
    starts: dict[int, int] = {}
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]][::-1][:SCANNED]
        if selection == "frequent":
            seen = Counter(tokens[e] for e in ends)
            ends.sort(key=lambda e: seen[tokens[e]], reverse=True)
        for end in ends:
            starts.setdefault(tokens[end], end)
    return list(starts.values())[:branches]


def continued(tokens: list[int], start: int, n: int) -> list[int]:
    """What follows ``start`` if the text goes on as a repetition of itself from there."""
    text = list(tokens)
    for i in range(n):
        text.append(text[start + i])
    return text[len(tokens) :]


@FAST
@given(texts, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["recent", "frequent"]), st.integers(1, 8))
def test_a_chain_is_what_a_brute_force_search_finds(
    tokens: list[int], shortest: int, more: int, selection: str, budget: int
) -> None:
    draft = propose(lookup(shortest, shortest + more, selection), tokens, budget)
    starts = oracle(tokens, shortest, shortest + more, selection, 1)
    if starts:
        assert draft.is_chain
        assert list(draft.tokens) == continued(tokens, starts[0], budget)
    else:
        assert len(draft) == 0
        assert draft.reason == "no n-gram of the end was seen before"


@FAST
@given(texts, st.integers(1, 3), st.sampled_from(["recent", "frequent"]), st.integers(2, 5), st.integers(1, 12))
def test_branches_are_the_best_continuations_by_their_first_token(
    tokens: list[int], shortest: int, selection: str, branches: int, budget: int
) -> None:
    draft = propose(lookup(shortest, 3, selection, branches), tokens, budget)
    starts = oracle(tokens, shortest, 3, selection, branches)
    firsts = [draft.tokens[child] for child in draft.children(-1)]
    assert firsts == [tokens[s] for s in starts][: len(firsts)]
    assert len(firsts) >= min(len(starts), budget, 2), "the second best branch got no node"
    if starts:
        assert len(draft) == budget, "nodes are left unused"
    for child, start in zip(draft.children(-1), starts, strict=False):
        path, node = [], child
        while True:
            path.append(draft.tokens[node])
            following = draft.children(node)
            if not following:
                break
            (node,) = following
        assert path == continued(tokens, start, len(path))


def test_a_list_that_shrank_is_indexed_anew() -> None:
    drafter = lookup()
    assert propose(drafter, [1, 2, 3, 9, 9, 1, 2]).tokens[0] == 3
    assert propose(drafter, [1, 2, 4, 1, 2]).tokens == (4, 1, 2, 4)
    other = lookup()
    assert propose(other, [9, 9, 9, 1, 2, 3, 3, 3]).tokens
    assert propose(other, [1, 2, 4, 9, 1, 2], 1).tokens == (4,)
    assert propose(drafter, [7, 8]).reason


def test_a_longer_match_beats_a_newer_one() -> None:
    tokens = [1, 2, 3, 7, 5, 3, 8, 1, 2, 3]
    assert propose(lookup(), tokens, 1).tokens == (7,)
    assert propose(lookup(longest=1), tokens, 1).tokens == (8,)
    assert propose(lookup(shortest=4, longest=5), tokens, 1).reason


def test_recent_and_frequent_differ() -> None:
    tokens = [1, 5, 1, 5, 1, 6, 1]
    assert propose(lookup(longest=1), tokens, 1).tokens == (6,)
    assert propose(lookup(longest=1, selection="frequent"), tokens, 1).tokens == (5,)


def test_a_copy_that_reaches_the_end_goes_on_as_a_period() -> None:
    assert propose(lookup(), [9, 1, 2, 3, 1, 2, 3], 7).tokens == (1, 2, 3, 1, 2, 3, 1)
    assert propose(lookup(), [4, 4], 5).tokens == (4, 4, 4, 4, 4)


def test_branches_share_no_node_and_the_first_gets_most() -> None:
    draft = propose(lookup(longest=1, branches=3), [1, 5, 6, 7, 8, 1, 2, 3, 4, 1], 8)
    assert [draft.tokens[i] for i in draft.children(-1)] == [2, 5]
    assert sorted(Counter(draft.tokens[draft.path(node)[0]] for node in range(len(draft))).values()) == [2, 6]
    tight = propose(lookup(longest=1, branches=3), [1, 5, 1, 6, 1, 7, 1], 2)
    assert [tight.tokens[i] for i in tight.children(-1)] == [7, 6]


def test_paths_with_a_common_beginning_share_its_nodes_within_the_budget() -> None:
    draft = Draft.branches([[1, 2, 3], [1, 2, 4], [1, 5], [6]], 6)
    assert draft.tokens == (1, 2, 3, 4, 5, 6)
    assert draft.parents == (-1, 0, 1, 1, 0, -1)
    assert Draft.branches([[1, 2, 3], [1, 2, 4], [6]], 4).tokens == (1, 2, 3, 4)
    assert len(Draft.branches([[1, 2]], 0)) == 0


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3]])
def test_short_prompts_without_a_match_give_a_reason(tokens: list[int]) -> None:
    for branches in (1, 3):
        draft = propose(lookup(longest=8, branches=branches), tokens)
        assert (len(draft), bool(draft.reason)) == (0, True)


def test_sequences_do_not_see_each_other_and_are_forgotten_when_released() -> None:
    drafter = lookup()
    assert propose(drafter, [1, 2, 3, 1, 2], seq_id=0).tokens[0] == 3
    assert propose(drafter, [2, 7, 2], seq_id=1).tokens[0] == 7
    assert propose(drafter, [5, 1, 2], seq_id=2).reason
    for seq_id in (0, 1, 2, 2, 99):
        drafter.release(seq_id)
    assert not drafter._indexes


def test_of_a_very_common_token_only_the_newest_places_are_looked_at() -> None:
    tokens = [1, 2] * 3 + [1, 3] * SCANNED + [1]
    draft = propose(lookup(longest=1, branches=2), tokens, 8)
    assert [draft.tokens[child] for child in draft.children(-1)] == [3]


def chance(matched: int, alike: int, places: int, n: int, depth: int) -> float:
    """By hand: ``alike`` of the ``places`` of an n-gram go on so; of ``matched`` tokens two do not count."""
    held = max(2, matched - 2)
    return alike / (places + 4 ** (1 - n)) * held / (held + depth)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 7, 8, 9, 1], [chance(1, 1, 1, 1, d) for d in (1, 2, 3, 4)]),
        ([1, 7, 1, 7, 1, 8, 1], [chance(1, 1, 3, 1, d) for d in (1, 2, 3, 4)]),
        ([3, 1, 7, 3, 1, 7, 9, 1, 8, 3, 1], [chance(2, 2, 2, 2, d) for d in (1, 2, 3, 4)]),
        ([*range(6), 9, 9, *range(6)], [chance(6, 1, 1, 4, d) for d in (1, 2, 3, 4)]),
    ],
)
def test_the_confidence_is_the_share_of_places_and_how_long_a_match_lasts(
    tokens: list[int], wanted: list[float]
) -> None:
    assert propose(lookup(), tokens, 4).confidence == pytest.approx(wanted)


def test_what_is_not_likely_enough_is_not_drafted() -> None:
    text = list(range(10, 40))
    sure = Ngram(NgramSettings(prompt_lookup_min_token_prob=0.5))
    assert len(propose(sure, [*text, 10], 8)) == 0, "a single token has a chance of a third"
    assert propose(sure, [*text, 10]).reason == "no continuation is likely enough"
    draft = propose(Ngram(NgramSettings(prompt_lookup_min_token_prob=0.5)), [*text, *text[:8]], 8)
    assert list(draft.tokens) == text[8:13]
    assert min(draft.confidence or ()) >= 0.5
    assert chance(8, 1, 1, 4, 6) < 0.5


def test_a_longer_match_goes_on_further() -> None:
    drafter = Ngram(NgramSettings(prompt_lookup_max_spec_factor=2, prompt_lookup_min_token_prob=0))
    for matched, wanted in ((1, 2), (2, 4), (3, 6), (4, 8), (6, 12)):
        text = list(range(10, 40))
        text += [7, *text[5 : 5 + matched]]
        assert list(propose(drafter, text, 20).tokens) == text[5 + matched : 5 + matched + wanted]
        drafter.release(0)
    assert len(propose(drafter, [1, 2, 3, 1], 1)) == 1, "the budget holds as well"
