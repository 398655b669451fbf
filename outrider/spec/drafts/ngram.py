"""Prompt lookup: propose what followed the last time the newest n tokens stood in the prompt or the output.

Source: Saxena, "Prompt Lookup Decoding", 2023; the same idea as LLMA (Yang et al., 2023). It costs no model, and pays
where the answer repeats its context: editing, summaries, code, translation with names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.text_index import TextIndex, lasting

SCANNED = 16
"""Occurrences of an n-gram that are looked at, newest first: bounds the cost of a very common one."""
COMPARED = 24
"""Tokens before an occurrence that are compared at most, to see how far the match really goes."""
OTHERWISE = 4.0
"""An occurrence that goes on otherwise is imagined; it counts so many times less for an n-gram of one token more."""


@dataclass(frozen=True)
class NgramSettings:
    """Longest matches are tried first, from ``prompt_lookup_max`` tokens down to ``prompt_lookup_min``.

    The longer the match and the more of its occurrences go on alike, the further the draft goes: a single token that
    was seen before says little.
    """

    prompt_lookup_max: int = setting(4, "longest n-gram to look up", low=1, high=32)
    prompt_lookup_min: int = setting(1, "shortest n-gram to look up", low=1, high=32)
    prompt_lookup_selection: str = setting(
        "recent", "which continuation of an n-gram to take first", choices=("recent", "frequent")
    )
    prompt_lookup_branches: int = setting(1, "continuations proposed at once, as a tree", low=1, high=16)
    prompt_lookup_max_spec_factor: float = setting(4.0, "draft tokens for each token that matched", low=1, high=256)
    prompt_lookup_min_token_prob: float = setting(
        0.25, "how likely a draft token must be, by the occurrences found", low=0, high=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SettingError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; allowed is at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )


class Ngram(Proposer):
    """Looks up n-grams per sequence; its drafts are certain."""

    def __init__(self, settings: NgramSettings) -> None:
        self.settings = settings
        self._indexes: dict[int, TextIndex] = {}
        self._lengths = range(settings.prompt_lookup_max, settings.prompt_lookup_min - 1, -1)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._look_up(span.seq.id, span.seq.tokens, span.budget) for span in spans]

    def observe(self, commits: Sequence[Commit]) -> None:
        """Indexes a long prompt chunk by chunk, so that the first look-up does not stall a step."""
        for commit in commits:
            seq = commit.span.seq
            if seq.max_draft and commit.finish is None:
                self._index_of(seq.id).keep_up(seq.tokens, seq.n_computed)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _index_of(self, seq_id: int) -> TextIndex:
        index = self._indexes.get(seq_id)
        if index is None:
            index = self._indexes[seq_id] = TextIndex(self._lengths)
        return index

    def _look_up(self, seq_id: int, tokens: list[int], budget: int) -> Draft:
        index = self._index_of(seq_id)
        index.follow(tokens, len(tokens))
        starts = self._continuations(index, tokens)
        if not starts:
            return Draft.nothing("no n-gram of the end was seen before")
        budget = min(budget, int(self.settings.prompt_lookup_max_spec_factor * starts[0].matched))
        # The first branch gets what the others leave: branch j gets a 2**(j+1)th of the nodes, one at least.
        lengths = [max(1, budget >> (j + 1)) for j in range(1, len(starts))]
        lengths = [max(1, budget - sum(lengths)), *lengths]
        least = self.settings.prompt_lookup_min_token_prob
        drafted: list[int] = []
        parents: list[int] = []
        sure: list[float] = []
        for start, most in zip(starts, lengths, strict=True):
            chances = start.chances(min(most, budget - len(drafted)), least)
            if chances:  # the branches differ in their first token, so that no node belongs to two of them
                parents += [-1, *range(len(drafted), len(drafted) + len(chances) - 1)]
                drafted += _copy(tokens, start.at, len(chances))
                sure += chances
        if not drafted:
            return Draft.nothing("no continuation is likely enough")
        return Draft(tuple(drafted), tuple(parents), (None,) * len(drafted), confidence=tuple(sure))

    def _continuations(self, index: TextIndex, tokens: list[int]) -> list[_Start]:
        """The continuations, best first, each with another first token."""
        starts: dict[int, _Start] = {}  # by first token
        for n in index.lengths:
            if n > len(tokens):
                continue
            places = index.places(tokens[-n:], SCANNED)
            following = [tokens[at] for at in places]
            if self.settings.prompt_lookup_selection == "frequent":
                places.sort(key=lambda at: -following.count(tokens[at]))  # stable: of equals the newest stays first
            for at in places:
                first = tokens[at]
                if first not in starts:
                    matched = index.agreeing(at, tokens[-COMPARED:], n)
                    share = following.count(first) / (len(places) + OTHERWISE ** (1 - n))
                    starts[first] = _Start(at, matched, share)
                    if len(starts) == self.settings.prompt_lookup_branches:
                        return list(starts.values())
        return list(starts.values())


class _Start(NamedTuple):
    """Where a continuation begins, how many tokens before it agree, and how likely its first token is, if it lasts."""

    at: int
    matched: int
    share: float

    def chances(self, most: int, least: float) -> list[float]:
        """How likely it is right as far as each of its tokens, of ``most``; while that is ``least``."""
        chances: list[float] = []
        while len(chances) < most:
            chance = self.share * lasting(self.matched, len(chances) + 1)
            if chance < least:
                break
            chances.append(chance)
        return chances


def _copy(tokens: list[int], start: int, n: int) -> list[int]:
    """``n`` tokens from ``start`` on; past the end it goes on with its own copy, as a repetition would."""
    copy = tokens[start : start + n]
    return copy if len(copy) == n else (copy * (n // len(copy) + 1))[:n]


def build(context: DraftContext, settings: NgramSettings) -> Proposer:
    return Ngram(settings)
