"""Suffix decoding: the end of the text is looked up in the text and in earlier answers; what followed is drafted.

Source: Oliaro et al., "SuffixDecoding", 2024. As there, a longer match drafts more, and branches are grown where most
occurrences go. Other than there, not one pattern length is chosen by a score: all occurrences count, one that agrees in
one token more ``SHARPNESS`` times as much. And the occurrences are found by n-grams, in place of a suffix tree: an
n-gram's newest place is in a table, and every place knows the one before it, so that old text can be forgotten exactly.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, FinishReason, Span
from outrider.spec.proposer import DraftContext, Proposer

LENGTHS = (8, 4, 2, 1)
"""The n-grams that are kept; a match is then followed backwards to its full length."""
SCANNED = 16
"""Occurrences that are looked at, those of the longest n-grams first and of these the newest: bounds the cost."""
SHARPNESS = 4.0
"""How many times as much an occurrence counts that agrees with the end of the text in one token more."""
BETWEEN = -1
"""Stands between two texts."""


@dataclass(frozen=True)
class SuffixSettings:
    """How much to draft, and how much to remember."""

    suffix_decoding_max_tree_depth: int = setting(24, "tokens of the end of the text that are compared", low=1, high=64)
    suffix_decoding_max_spec_factor: float = setting(2.0, "draft tokens for each token that matched", low=0, high=256)
    suffix_decoding_min_token_prob: float = setting(
        0.1, "how likely a draft token must be, by the occurrences found", low=0, high=1
    )
    suffix_decoding_branches: int = setting(3, "continuations of a draft token; 1 drafts a chain", low=1, high=16)
    suffix_decoding_max_cached_requests: int = setting(0, "finished answers to remember for later requests", low=0)
    suffix_decoding_max_cached_tokens: int = setting(100_000, "tokens of remembered answers together", low=0)

    def __post_init__(self) -> None:
        check_settings(self)


class SuffixIndex:
    """Where the n-grams of one or several texts end. Taking in or forgetting a token costs the same at any size."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._forgotten = 0  # tokens before those that are left; a place is counted from the very first token
        self._start = 0  # where the newest text begins
        self._newest: dict[int, dict[int, int]] = {n: {} for n in LENGTHS}  # hash of an n-gram -> where it ended last
        self._before = {n: array("q") for n in LENGTHS}  # [i]: where the n-gram ending with token i ended before

    def extend(self, tokens: Sequence[int]) -> None:
        """Continues the newest text."""
        for token in tokens:
            self.tokens.append(token)
            size = len(self.tokens)
            for n in LENGTHS:
                before = -1
                if n <= size - self._start:
                    newest, key = self._newest[n], hash(tuple(self.tokens[-n:]))
                    before = newest.get(key, -1)
                    newest[key] = self._forgotten + size
                self._before[n].append(before)

    def end_text(self) -> None:
        """The next token begins another text."""
        self.tokens.append(BETWEEN)
        for n in LENGTHS:
            self._before[n].append(-1)
        self._start = len(self.tokens)

    def forget(self, size: int) -> None:
        """Drops the oldest text, which has ``size`` tokens, and the mark behind it."""
        for n in LENGTHS:
            newest = self._newest[n]
            for end in range(n, size + 1):
                key = hash(tuple(self.tokens[end - n : end]))
                if newest.get(key) == self._forgotten + end:
                    del newest[key]
            del self._before[n][: size + 1]
        del self.tokens[: size + 1]
        self._forgotten += size + 1
        self._start -= size + 1

    def matches(self, context: list[int]) -> list[tuple[int, int]]:
        """Places in ``tokens`` before which the end of ``context`` stands, each with how many tokens agree."""
        found: dict[int, int] = {}
        for n in LENGTHS:
            tail = context[-n:]
            end = self._newest[n].get(hash(tuple(tail)), -1) if n <= len(context) else -1
            while end > self._forgotten and len(found) < SCANNED:
                at = end - self._forgotten
                if at not in found and at < len(self.tokens) and self.tokens[at - n : at] == tail:
                    found[at] = self._agreeing(at, context, n)
                end = self._before[n][at - 1]
        return list(found.items())

    def _agreeing(self, at: int, context: list[int], n: int) -> int:
        """How many tokens before ``at`` agree with the end of ``context``, of which ``n`` are known to."""
        most = min(at, len(context))
        if self.tokens[at - most : at] == context[len(context) - most :]:
            return most
        while self.tokens[at - n - 1] == context[-n - 1]:
            n += 1
        return n


class Memory:
    """Finished answers, by tenant. The oldest are forgotten when there are too many."""

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        self.max_answers, self.max_tokens = max_answers, max_tokens
        self.n_tokens = 0
        self._indexes: dict[str, SuffixIndex] = {}
        self._answers: deque[tuple[str, int]] = deque()  # tenant and size, the oldest first

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Takes in one answer, unless it is longer than the whole memory."""
        if not self.max_answers or len(tokens) > self.max_tokens:
            return
        while len(self._answers) >= self.max_answers or self.n_tokens + len(tokens) > self.max_tokens:
            self._forget_oldest()
        index = self._indexes.setdefault(tenant, SuffixIndex())
        index.extend(tokens)
        index.end_text()
        self._answers.append((tenant, len(tokens)))
        self.n_tokens += len(tokens)

    def of(self, tenant: str) -> SuffixIndex | None:
        """What is remembered for this tenant."""
        return self._indexes.get(tenant)

    def _forget_oldest(self) -> None:
        tenant, size = self._answers.popleft()
        self._indexes[tenant].forget(size)
        self.n_tokens -= size
        if not self._indexes[tenant].tokens:
            del self._indexes[tenant]


_Place = tuple[list[int], int, float]
"""A text, where in it the continuation begins, and how much that counts."""


class Suffix(Proposer):
    """Looks up suffixes per sequence and in the memory; its drafts are certain."""

    def __init__(self, settings: SuffixSettings) -> None:
        self.settings = settings
        self.memory = Memory(settings.suffix_decoding_max_cached_requests, settings.suffix_decoding_max_cached_tokens)
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._look_up(span, [], span.budget) for span in spans]

    def continue_from(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        return self._look_up(span, list(tokens), budget)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Indexes a long prompt chunk by chunk; remembers answers that came to their own end."""
        for commit in commits:
            seq = commit.seq
            if commit.finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.memory.add(seq.spec.tenant, seq.output_ids)
            elif seq.max_draft and commit.finish is None:
                self._index_of(seq.id, seq.tokens, seq.n_computed)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _index_of(self, seq_id: int, tokens: list[int], stop: int) -> SuffixIndex:
        """The index of a sequence, which then holds its tokens up to ``stop`` at least."""
        index = self._indexes.setdefault(seq_id, SuffixIndex())
        if len(index.tokens) > len(tokens):  # another text than before
            index = self._indexes[seq_id] = SuffixIndex()
        index.extend(tokens[len(index.tokens) : stop])
        return index

    def _look_up(self, span: Span, ahead: list[int], budget: int) -> Draft:
        """What may follow the sequence and the tokens ``ahead`` of it."""
        tokens, depth = span.seq.tokens, self.settings.suffix_decoding_max_tree_depth
        own = self._index_of(span.seq.id, tokens, len(tokens))
        remembered = self.memory.of(span.seq.spec.tenant)
        context = (tokens[-depth:] + ahead)[-depth:]
        places: list[_Place] = []
        longest = 0
        for index in (own, remembered) if remembered is not None else (own,):
            for at, agreeing in index.matches(context):
                places.append((index.tokens, at, SHARPNESS**agreeing))
                longest = max(longest, agreeing)
        if not places:
            return Draft.nothing("no end of the text was seen before")
        nodes = min(budget, int(self.settings.suffix_decoding_max_spec_factor * longest))
        if nodes < 1:
            return Draft.nothing("too little of the end of the text was seen before")
        return self._grow(places, ahead, nodes, longest)

    def _grow(self, places: list[_Place], ahead: list[int], nodes: int, longest: int) -> Draft:
        """The ``nodes`` likeliest tokens as a tree: a path is as likely as the share of ``places`` that go along it.

        For how sure that is, Laplace's rule: what agreed ``longest`` times goes on for d more with probability
        (longest + 1) / (longest + 1 + d).
        """
        whole = sum(weight for _, _, weight in places)
        least = self.settings.suffix_decoding_min_token_prob * whole
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        waiting: list[tuple[float, int, int, int, int, list[_Place]]] = []  # the heaviest first, then the earliest
        order = 0

        def offer(parent: int, depth: int, group: list[_Place]) -> None:
            nonlocal order
            following: dict[int, list[_Place]] = {}
            for place in group:
                following.setdefault(_token(place, depth, ahead), []).append(place)
            following.pop(BETWEEN, None)
            weighed = [(sum(weight for _, _, weight in heirs), token, heirs) for token, heirs in following.items()]
            weighed.sort(key=lambda child: -child[0])
            for weight, token, heirs in weighed[: self.settings.suffix_decoding_branches]:
                if weight >= least:
                    heapq.heappush(waiting, (-weight, order, parent, depth + 1, token, heirs))
                    order += 1

        offer(-1, 0, places)
        while waiting and len(tokens) < nodes:
            weight, _, parent, depth, token, heirs = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            confidence.append(-weight / whole * (longest + 1) / (longest + 1 + depth))
            if len(tokens) < nodes:
                offer(len(tokens) - 1, depth, heirs)
        if not tokens:
            return Draft.nothing("no continuation is likely enough")
        return Draft.tree(tokens, parents).sure(confidence)


def _token(place: _Place, depth: int, ahead: list[int]) -> int:
    """What stands ``depth`` tokens behind a place; past the end, text and ``ahead`` go on as a repetition would."""
    text, at, _ = place
    i = at + depth % (len(text) + len(ahead) - at)
    return text[i] if i < len(text) else ahead[i - len(text)]


def build(context: DraftContext, settings: SuffixSettings) -> Proposer:
    return Suffix(settings)
