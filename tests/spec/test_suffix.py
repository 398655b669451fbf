"""Suffix decoding against a plain loop over every place of the text, and its memory of earlier answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Commit, FinishReason, Sequence, Span
from outrider.spec.drafts.suffix import LEFT, LENGTHS, SCANNED, Memory, Suffix, SuffixSettings, odds
from outrider.spec.text_index import TextIndex

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)
texts = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=3 * SCANNED))


def suffix(branches: int = 3, **options: float) -> Suffix:
    named = {f"suffix_decoding_{name}": value for name, value in {"min_token_prob": 0.1, **options}.items()}
    return Suffix(SuffixSettings(suffix_decoding_branches=branches, **named))  # type: ignore[arg-type]


def span_of(tokens: list[int], budget: int = 8, seq_id: int = 0, tenant: str = "", n_prompt: int = 1) -> Span:
    seq = Sequence(seq_id, list(tokens), n_prompt, SamplingParams(), SpecParams(tenant=tenant), seed=0, max_draft=8)
    return Span(seq, len(tokens) - 1, 1, budget=budget)


def propose(drafter: Suffix, tokens: list[int], budget: int = 8, **of: object) -> Draft:
    (draft,) = drafter.propose([span_of(tokens, budget, **of)])  # type: ignore[arg-type]
    assert len(draft) <= budget
    assert set(draft.q) <= {None}, "a look-up is certain"
    return draft


def answer(drafter: Suffix, output: list[int], tenant: str = "", finish: FinishReason = FinishReason.STOP) -> None:
    """A request of this tenant ends with this answer."""
    span = span_of([0, *output], tenant=tenant, seq_id=99)
    drafter.observe([Commit(span, (), (), 0, finish=finish)])
    drafter.release(99)


def plain_loop(
    tokens: list[int], ahead: list[int], answers: list[int], depth: int, factor: float, least: float, branches: int
) -> tuple[list[tuple[int, ...]], list[float], float]:
    """The paths to draft, best first, their chances, and how many at most: every place of both texts is compared token
    by token.

    ``answers`` are the remembered ones, each with a -1 behind it.
    """
    context, own = (tokens + ahead)[-depth:], tokens + ahead
    places: list[tuple[list[int], int, float]] = []  # text, where the continuation begins, what the match is worth
    longest = 0
    for text, end in (own, len(tokens)), (answers, len(answers)):
        found = []
        for at in range(1, end):
            agree = 0
            while agree < min(at, len(context)) and text[at - 1 - agree] == context[-1 - agree]:
                agree += 1
            if agree:
                found.append((max(n for n in LENGTHS if n <= agree), at, agree))
        found = sorted(found, reverse=True)[: max(LEFT, SCANNED - len(places))]
        places += [(text, at, agree * agree / 12 if text is answers else agree) for _, at, agree in found]
        longest = max([longest, *(agree for _, _, agree in found)])
    places.sort(key=lambda place: -place[2])
    paths: list[tuple[int, ...]] = []
    sure: list[float] = []
    path: tuple[int, ...] = ()
    chance, group = 1.0, places
    offers: list[tuple[float, tuple[int, ...], list[tuple[list[int], int, float]]]] = []
    while len(paths) < 12:
        children: dict[int, list[tuple[list[int], int, float]]] = {}
        for text, at, worth in group:
            token = text[at + len(path) % (len(text) - at)]  # the own text goes on as a repetition of itself
            children.setdefault(token, []).append((text, at, worth))
        weighed = []
        for token, heirs in children.items():
            others = [place for other, their in children.items() if other != token for place in their]
            best, rival = max(p[2] for p in heirs), max((p[2] for p in others), default=0)
            fair = 0.8 * best * len(heirs) / ((1 + rival) * (1 + len(others)) ** 0.5)
            if token != -1:
                weighed.append((chance * (fair / (1 + fair)), (*path, token), heirs))
        offers += [offer for offer in sorted(weighed, key=_chance)[:branches] if offer[0] >= least]
        if not offers:
            break
        offers.sort(key=_chance)
        chance, path, group = offers.pop(0)
        paths.append(path)
        sure.append(chance)
    return paths, sure, factor * longest


def _chance(offer: tuple[float, object, object]) -> float:
    return -offer[0]


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]


@FAST
@given(
    texts,
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 10),
    st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_the_tree_is_what_a_plain_loop_finds(
    tokens: list[int], ahead: list[int], depth: int, factor: float, least: float, branches: int, budget: int
) -> None:
    drafter = suffix(branches, max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least)
    draft = drafter.continue_from(span_of(tokens), ahead, budget) if ahead else propose(drafter, tokens, budget)
    paths, sure, most = plain_loop(tokens, ahead, [], depth, factor, least, branches)
    assert paths_of(draft) == paths[: min(budget, int(most))]
    assert list(draft.confidence or ()) == pytest.approx(sure[: len(draft)])
    assert bool(draft.reason) == (len(draft) == 0)


@FAST
@given(texts, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 8))
def test_remembered_answers_count_by_the_square_of_what_agrees(
    tokens: list[int], answers: list[list[int]], budget: int
) -> None:
    drafter = suffix(max_cached_requests=10, max_spec_factor=8.0, min_token_prob=0.02)
    for output in answers:
        answer(drafter, output)
    joined = [token for output in answers for token in (*output, -1)]
    paths, sure, most = plain_loop(tokens, [], joined, 24, 8.0, 0.02, 3)
    draft = propose(drafter, tokens, budget)
    assert paths_of(draft) == paths[: min(budget, int(most))]
    assert list(draft.confidence or ()) == pytest.approx(sure[: len(draft)])


def test_what_speaks_for_a_token_and_what_against_it() -> None:
    assert odds(1, 1, 0, 0) == pytest.approx(0.8)
    assert odds(6, 1, 0, 0) == odds(3, 2, 0, 0) == pytest.approx(4.8)
    assert odds(3, 1, 2, 3) == pytest.approx(0.4)
    tokens = [1, 2, 7, 2, 8, 1, 2]  # 7 after two tokens that agree, 8 after one
    draft = propose(suffix(2, min_token_prob=0), tokens, 2)
    assert (draft.tokens, draft.parents) == ((7, 2), (-1, 0))
    first = odds(2, 1, 1, 1)
    assert draft.confidence == pytest.approx((first / (1 + first), first / (1 + first) * 1.6 / 2.6))


def test_a_phrase_in_the_memory_says_little_and_an_answer_that_comes_back_much() -> None:
    drafter = suffix(max_cached_requests=10, min_token_prob=0)
    answer(drafter, [*range(20, 40)])
    for agreeing, worth in ((1, 1 / 12), (3, 9 / 12), (12, 12.0)):
        draft = propose(drafter, [*range(20, 20 + agreeing)], seq_id=agreeing)
        assert draft.tokens[0] == 20 + agreeing
        fair = odds(worth, 1, 0, 0)
        assert draft.confidence is not None
        assert draft.confidence[0] == pytest.approx(fair / (1 + fair))
    draft = propose(drafter, [20, 21, 7, 1, 2, 3, 20, 21], 1, seq_id=0)
    assert draft.tokens == (7,), "what stands in the text itself counts more"
    draft = propose(suffix(min_token_prob=0), [20, 21, 7, 1, 2, 3, 20, 21], 1)
    assert draft.confidence == pytest.approx((1.6 / 2.6,))
    for _ in range(3):
        answer(drafter, [20, 21, 8])
    sure = propose(drafter, [20, 21, 7, 1, 2, 3, 20, 21], 8, seq_id=9).confidence
    assert sure is not None
    fair = odds(2, 1, 4 / 12, 4)
    assert sure[0] == pytest.approx(fair / (1 + fair)), "other places in the memory speak against it"


def test_a_longer_match_drafts_more_and_counts_more() -> None:
    tokens = [1, 2, 3, 7, 7, 7, 7, 7, 8, 3, 6, 9, 1, 2, 3]
    assert propose(suffix(1, max_spec_factor=1.0, min_token_prob=0.05), tokens).tokens == (7, 7, 7)
    assert propose(suffix(1, max_spec_factor=2.0, min_token_prob=0.05), tokens).tokens == (7, 7, 7, 7, 7, 8)
    assert propose(suffix(max_tree_depth=1), tokens, 1).tokens == (6,), "of equals the newest comes first"
    assert propose(suffix(max_spec_factor=0.5), [5, 1, 5]).reason == "too little of the end of the text was seen before"


def test_branches_go_where_most_occurrences_go() -> None:
    tokens = [1, 5, 1, 5, 1, 6, 1]
    draft = propose(suffix(3, max_tree_depth=1, max_spec_factor=2.0), tokens)
    assert draft.tokens[0] == 5
    assert propose(suffix(3, max_tree_depth=1, min_token_prob=0.9), tokens).reason == "no continuation is likely enough"
    assert propose(suffix(1, max_spec_factor=2.0), [1, 2, 3, 1, 2], 8).tokens == (3, 1, 2, 3)


def test_tenants_share_nothing_and_only_finished_answers_are_remembered() -> None:
    drafter = suffix(max_cached_requests=10)
    answer(drafter, [5, 6, 7, 8], tenant="a")
    answer(drafter, [5, 6, 1, 1], tenant="b", finish=FinishReason.LENGTH)
    for finish in (FinishReason.ABORT, FinishReason.ERROR):
        answer(drafter, [5, 6, 3, 3], tenant="c", finish=finish)
    assert propose(drafter, [4, 5, 6], 1, tenant="a").tokens == (7,)
    assert propose(drafter, [4, 5, 6], 1, tenant="b", seq_id=1).tokens == (1,)
    for tenant in ("", "c"):
        assert propose(drafter, [4, 5, 6], 1, tenant=tenant, seq_id=2).reason
    forgetful = suffix()
    answer(forgetful, [5, 6, 7, 8])
    assert propose(forgetful, [4, 5, 6]).reason, "remembering is off unless it is asked for"


def test_the_memory_is_bounded_and_what_it_forgets_leaves_nothing_behind() -> None:
    rng = random.Random(1)
    memory = Memory(max_answers=5, max_tokens=60)
    kept: list[tuple[str, list[int]]] = []
    for _ in range(200):
        tenant, tokens = rng.choice("ab"), [rng.randrange(3) for _ in range(rng.randrange(0, 30))]
        memory.add(tenant, tokens)
        kept.append((tenant, tokens))
        while len(kept) > 5 or sum(len(tokens) for _, tokens in kept) > 60:
            kept.pop(0)
        assert memory.n_tokens == sum(len(tokens) for _, tokens in kept)
        for name in "ab":
            fresh = TextIndex(LENGTHS)
            for _, tokens in (entry for entry in kept if entry[0] == name):
                fresh.extend(tokens)
                fresh.end_text()
            index = memory.of(name)
            if index is None:
                assert not fresh.tokens
                continue
            assert index.tokens == fresh.tokens
            assert {n: set(index._newest[n]) for n in LENGTHS} == {n: set(fresh._newest[n]) for n in LENGTHS}
            context = [rng.randrange(3) for _ in range(6)]
            assert index.matches(context, SCANNED) == fresh.matches(context, SCANNED)
    memory.add("a", [1] * 61)
    assert memory.n_tokens <= 60, "an answer longer than the memory is not taken in"


def test_of_a_very_common_token_only_some_places_are_looked_at() -> None:
    index = TextIndex(LENGTHS)
    index.extend([1] * (3 * SCANNED))
    assert len(index.matches([1] * 24, SCANNED)) == SCANNED
    assert len(index.matches([1] * 24, LEFT)) == LEFT


def test_an_index_that_grows_equals_a_fresh_one_and_is_forgotten_when_released() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(3) for _ in range(80)]
    growing = suffix()
    for end in range(1, len(tokens) + 1, 3):
        assert propose(growing, tokens[:end]) == propose(suffix(), tokens[:end])
    assert propose(growing, [1, 2, 1]) == propose(suffix(), [1, 2, 1]), "a list that shrank is indexed anew"
    growing.release(0)
    growing.release(0)
    assert not growing._indexes


@pytest.mark.parametrize("name", ["max_tree_depth", "max_spec_factor", "min_token_prob", "max_cached_requests"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"suffix_decoding_{name} is -1; allowed is a value"):
        suffix(**{name: -1})
