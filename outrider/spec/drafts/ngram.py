"""Prompt lookup: propose what followed the last time the newest n tokens stood in the prompt or the output.

Source: Saxena, "Prompt Lookup Decoding", 2023; the same idea as LLMA (Yang et al., 2023). It costs no model, and pays
where the answer repeats its context: editing, summaries, code, translation with names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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
            if commit.seq.max_draft and commit.finish is None:
                self._index_of(commit.seq.id).keep_up(commit.seq.tokens, commit.seq.n_computed)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _index_of(self, seq_id: int) -> TextIndex:
        if seq_id not in self._indexes:
            self._indexes[seq_id] = TextIndex(self._lengths)
        return self._indexes[seq_id]

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
        lengths = [start.worth(n, least) for start, n in zip(starts, lengths, strict=True)]
        draft = Draft.branches([_copy(tokens, s.at, n) for s, n in zip(starts, lengths, strict=True)], budget)
        if not draft:
            return Draft.nothing("no continuation is likely enough")
        # The branches differ in their first token, so that no node belongs to two of them.
        sure = [start.chance(depth) for start, n in zip(starts, lengths, strict=True) for depth in range(1, n + 1)]
        return draft.sure(sure[: len(draft)])

    def _continuations(self, index: TextIndex, tokens: list[int]) -> list[_Start]:
        """The continuations, best first, each with another first token."""
        starts: dict[int, _Start] = {}  # by first token
        for n in index.lengths:
            if n > len(tokens):
                continue
            places = list(islice(index.places(tokens[-n:]), SCANNED))
            counts = Counter(tokens[at] for at in places)
            if self.settings.prompt_lookup_selection == "frequent":
                places.sort(key=lambda at: -counts[tokens[at]])  # stable: among equals the newest stays first
            for at in places:
                first = tokens[at]
                if first not in starts:
                    matched = index.agreeing(at, tokens[-COMPARED:], n)
                    share = counts[first] / (len(places) + OTHERWISE ** (1 - n))
                    starts[first] = _Start(at, matched, share)
                    if len(starts) == self.settings.prompt_lookup_branches:
                        return list(starts.values())
        return list(starts.values())


@dataclass(frozen=True)
class _Start:
    """Where a continuation begins, how many tokens before it agree, and how likely its first token is, if it lasts."""

    at: int
    matched: int
    share: float

    def chance(self, depth: int) -> float:
        """That the first ``depth`` tokens are right."""
        return self.share * lasting(self.matched, depth)

    def worth(self, most: int, least: float) -> int:
        """How many tokens, of ``most``, have a chance of ``least``."""
        return next((n for n in range(most) if self.chance(n + 1) < least), most)


def _copy(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """``n`` tokens from ``start`` on; past the end it goes on with its own copy, as a repetition would."""
    out: list[int] = []
    for i in range(start, start + n):
        out.append(tokens[i] if i < len(tokens) else out[i - len(tokens)])
    return out


def build(context: DraftContext, settings: NgramSettings) -> Proposer:
    return Ngram(settings)
