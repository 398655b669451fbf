"""Suffix decoding: the end of the text is looked up in the text and in earlier answers; what followed is drafted.

Source: Oliaro et al., "SuffixDecoding", 2024. As there, a longer match drafts more, and branches are grown where most
occurrences go. Other than there, not one pattern length is chosen by a score: all occurrences count, one that agrees in
one token more ``SHARPNESS`` times as much. And the occurrences are found by n-grams, in place of a suffix tree, so that
old text can be forgotten exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, FinishReason, Span
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.text_index import BETWEEN, TextIndex, lasting

LENGTHS = (8, 4, 2, 1)
"""The n-grams that are kept; a match is then followed backwards to its full length."""
SCANNED = 16
"""Occurrences that are looked at, those of the longest n-grams first and of these the newest: bounds the cost."""
SHARPNESS = 4.0
"""How many times as much an occurrence counts that agrees with the end of the text in one token more."""


@dataclass(frozen=True)
class SuffixSettings:
    """How much to draft, and how much to remember."""

    suffix_decoding_max_tree_depth: int = setting(24, "tokens of the end of the text that are compared", low=1, high=64)
    suffix_decoding_max_spec_factor: float = setting(4.0, "draft tokens for each token that matched", low=0, high=256)
    suffix_decoding_min_token_prob: float = setting(
        0.2, "how likely a draft token must be, by the occurrences found", low=0, high=1
    )
    suffix_decoding_branches: int = setting(3, "continuations of a draft token; 1 drafts a chain", low=1, high=16)
    suffix_decoding_max_cached_requests: int = setting(0, "finished answers to remember for later requests", low=0)
    suffix_decoding_max_cached_tokens: int = setting(100_000, "tokens of remembered answers together", low=0)

    def __post_init__(self) -> None:
        check_settings(self)


class Memory:
    """Finished answers, by tenant. The oldest are forgotten when there are too many."""

    def __init__(self, max_answers: int, max_tokens: int) -> None:
        self.max_answers, self.max_tokens = max_answers, max_tokens
        self.n_tokens = 0
        self._indexes: dict[str, TextIndex] = {}
        self._answers: deque[tuple[str, int]] = deque()  # tenant and size, the oldest first

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Takes in one answer, unless it is longer than the whole memory."""
        if not self.max_answers or len(tokens) > self.max_tokens:
            return
        while len(self._answers) >= self.max_answers or self.n_tokens + len(tokens) > self.max_tokens:
            self._forget_oldest()
        index = self._indexes.setdefault(tenant, TextIndex(LENGTHS))
        index.extend(tokens)
        index.end_text()
        self._answers.append((tenant, len(tokens)))
        self.n_tokens += len(tokens)

    def of(self, tenant: str) -> TextIndex | None:
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
        self._indexes: dict[int, TextIndex] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._look_up(span, [], span.budget) for span in spans]

    def continue_from(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        return self._look_up(span, list(tokens), budget)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Indexes a long prompt chunk by chunk; remembers answers that came to their own end."""
        for commit in commits:
            seq, finish = commit.span.seq, commit.finish
            if finish is None:
                if seq.max_draft:
                    self._index_of(seq.id).keep_up(seq.tokens, seq.n_computed)
            elif finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.memory.add(seq.spec.tenant, seq.output_ids)

    def release(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def _index_of(self, seq_id: int) -> TextIndex:
        index = self._indexes.get(seq_id)
        if index is None:
            index = self._indexes[seq_id] = TextIndex(LENGTHS)
        return index

    def _look_up(self, span: Span, ahead: list[int], budget: int) -> Draft:
        """What may follow the sequence and the tokens ``ahead`` of it."""
        tokens, depth = span.seq.tokens, self.settings.suffix_decoding_max_tree_depth
        own = self._index_of(span.seq.id)
        own.follow(tokens, len(tokens))
        remembered = self.memory.of(span.seq.spec.tenant)
        context = (tokens[-depth:] + ahead)[-depth:]
        places: list[_Place] = []
        longest = 0
        for index in (own, remembered) if remembered is not None else (own,):
            for at, agreeing in matches(index, context):
                places.append((index.tokens, at, SHARPNESS**agreeing))
                longest = max(longest, agreeing)
        if not places:
            return Draft.nothing("no end of the text was seen before")
        nodes = min(budget, int(self.settings.suffix_decoding_max_spec_factor * longest))
        if nodes < 1:
            return Draft.nothing("too little of the end of the text was seen before")
        return self._grow(places, ahead, nodes, longest)

    def _grow(self, places: list[_Place], ahead: list[int], nodes: int, longest: int) -> Draft:
        """The ``nodes`` likeliest tokens as a tree, the likeliest first.

        A path is as likely as the share of ``places`` that go along it, beside an imagined one that agrees in a single
        token and goes on otherwise; and as the match is to go on for so long.
        """
        whole = SHARPNESS + sum(weight for _, _, weight in places)
        least, branches = self.settings.suffix_decoding_min_token_prob, self.settings.suffix_decoding_branches
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        waiting: list[tuple[float, int, int, int, int, list[_Place]]] = []  # the likeliest last, of equals the earliest
        order = 0
        depth, group = 0, places
        while len(tokens) < nodes:
            following: dict[int, list[_Place]] = {}
            weights: dict[int, float] = {}
            for place in group:
                text, at, weight = place
                token = text[at + depth] if at + depth < len(text) else _token(place, depth, ahead)
                if token in following:
                    following[token].append(place)
                    weights[token] += weight
                else:
                    following[token], weights[token] = [place], weight
            depth += 1
            lasts = lasting(longest, depth) / whole
            likely = [token for token in weights if weights[token] * lasts >= least and token != BETWEEN]
            if len(likely) > 1:
                likely.sort(key=lambda token: -weights[token])
            for token in likely[:branches]:
                order -= 1
                waiting.append((weights[token] * lasts, order, len(tokens) - 1, depth, token, following[token]))
            if not waiting:
                break
            if len(waiting) > 1:
                waiting.sort()
            chance, _, parent, depth, token, group = waiting.pop()
            tokens.append(token)
            parents.append(parent)
            confidence.append(chance)
        if not tokens:
            return Draft.nothing("no continuation is likely enough")
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), confidence=tuple(confidence))


def matches(index: TextIndex, context: list[int]) -> list[tuple[int, int]]:
    """Places in the index before which the end of ``context`` stands, each with how many tokens agree."""
    found: dict[int, int] = {}
    for n in LENGTHS:
        if n > len(context):
            continue
        for at in index.places(context[-n:], SCANNED):
            if len(found) == SCANNED:
                return list(found.items())
            if at not in found:
                found[at] = index.agreeing(at, context, n)
        context = context[1 - n :]  # the places that are still to be found agree in less than n tokens
    return list(found.items())


def _token(place: _Place, depth: int, ahead: list[int]) -> int:
    """What stands ``depth`` tokens behind a place; past the end, text and ``ahead`` go on as a repetition would."""
    text, at, _ = place
    i = at + depth % (len(text) + len(ahead) - at)
    return text[i] if i < len(text) else ahead[i - len(text)]


def build(context: DraftContext, settings: SuffixSettings) -> Proposer:
    return Suffix(settings)
