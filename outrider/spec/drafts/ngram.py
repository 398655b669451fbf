"""Prompt lookup: propose what followed the last time the newest n tokens stood in the prompt or the output.

Source: Saxena, "Prompt Lookup Decoding", 2023; the same idea as LLMA (Yang et al., 2023). It costs no model, and pays
where the answer repeats its context: editing, summaries, code, translation with names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.spec.proposer import DraftContext, Proposer

SCANNED = 64
"""Occurrences of an n-gram that are looked at, newest first: bounds the cost of a very common one."""


@dataclass(frozen=True)
class NgramSettings:
    """Longest matches are tried first, from ``prompt_lookup_max`` tokens down to ``prompt_lookup_min``.

    The longer the match, the further it goes on: a single token that was seen before says little.
    """

    prompt_lookup_max: int = setting(4, "longest n-gram to look up", low=1, high=32)
    prompt_lookup_min: int = setting(1, "shortest n-gram to look up", low=1, high=32)
    prompt_lookup_selection: str = setting(
        "recent", "which continuation of an n-gram to take first", choices=("recent", "frequent")
    )
    prompt_lookup_branches: int = setting(1, "continuations proposed at once, as a tree", low=1, high=16)
    prompt_lookup_max_spec_factor: float = setting(2.0, "draft tokens for each token that matched", low=1, high=256)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SettingError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; allowed is at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )


class NgramIndex:
    """Where every n-gram of one growing token list ended; updating it costs time in the new tokens only."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.indexed = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def update(self, tokens: Sequence[int], stop: int | None = None) -> None:
        """Takes in the tokens (up to ``stop``) that are new since the last call; a list that shrank is indexed anew."""
        if len(tokens) < self.indexed:
            self.indexed, self._ends = 0, {}
        stop = len(tokens) if stop is None else stop
        for end in range(self.indexed + 1, stop + 1):
            for n in self.lengths:
                if n <= end:
                    self._ends.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.indexed = max(self.indexed, stop)

    def matches(self, tokens: Sequence[int], n: int) -> list[int]:
        """Where the last ``n`` tokens ended before, newest first; at most ``SCANNED`` places."""
        if n > len(tokens):
            return []
        ends = self._ends.get(tuple(tokens[len(tokens) - n :]), [])
        return [end for end in ends[-SCANNED - 1 :][::-1] if end < len(tokens)]


class Ngram(Proposer):
    """Looks up n-grams per sequence; its drafts are certain."""

    def __init__(self, settings: NgramSettings) -> None:
        self.settings = settings
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._look_up(span.seq.id, span.seq.tokens, span.budget) for span in spans]

    def observe(self, commits: Sequence[Commit]) -> None:
        """Indexes a long prompt chunk by chunk, so that the first look-up does not stall a step."""
        for commit in commits:
            if commit.seq.max_draft and commit.finish is None:
                self._index_of(commit.seq.id).update(commit.seq.tokens, commit.seq.n_computed)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _index_of(self, seq_id: int) -> NgramIndex:
        if seq_id not in self._indexes:
            s = self.settings
            self._indexes[seq_id] = NgramIndex(s.prompt_lookup_min, s.prompt_lookup_max)
        return self._indexes[seq_id]

    def _look_up(self, seq_id: int, tokens: list[int], budget: int) -> Draft:
        index = self._index_of(seq_id)
        index.update(tokens)
        starts, longest = self._continuations(index, tokens)
        if not starts:
            return Draft.nothing("no n-gram of the end was seen before")
        budget = min(budget, int(self.settings.prompt_lookup_max_spec_factor * longest))
        if len(starts) == 1:
            sure = [(longest + 1) / (longest + 1 + depth) for depth in range(1, budget + 1)]  # Laplace, as in suffix
            return Draft.chain(_copy(tokens, starts[0], budget)).sure(sure)
        # The first branch gets what the others leave: branch j gets a 2**(j+1)th of the nodes, one at least.
        lengths = [max(1, budget >> (j + 1)) for j in range(1, len(starts))]
        lengths = [max(1, budget - sum(lengths)), *lengths]
        return Draft.branches([_copy(tokens, s, n) for s, n in zip(starts, lengths, strict=True)], budget)

    def _continuations(self, index: NgramIndex, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Where the continuations begin, best first, each with another first token; and the first one's n."""
        starts: dict[int, int] = {}  # first token -> where
        longest = 0
        for n in index.lengths:
            ends = index.matches(tokens, n)
            if self.settings.prompt_lookup_selection == "frequent":
                counts = Counter(tokens[end] for end in ends)
                ends.sort(key=lambda end: -counts[tokens[end]])  # stable: among equals the newest stays first
            for end in ends:
                longest = longest or n
                starts.setdefault(tokens[end], end)
                if len(starts) == self.settings.prompt_lookup_branches:
                    return list(starts.values()), longest
        return list(starts.values()), longest


def _copy(tokens: Sequence[int], start: int, n: int) -> list[int]:
    """``n`` tokens from ``start`` on; past the end it goes on with its own copy, as a repetition would."""
    out: list[int] = []
    for i in range(start, start + n):
        out.append(tokens[i] if i < len(tokens) else out[i - len(tokens)])
    return out


def build(context: DraftContext, settings: NgramSettings) -> Proposer:
    return Ngram(settings)
