"""Suffix decoding: the end of the text is looked up in the text and in earlier answers; what followed is drafted.

Source: Oliaro et al., "SuffixDecoding", 2024. As there, a longer match drafts more, and branches are grown where most
occurrences go. Other than there, not one pattern length is chosen by a score: all occurrences count, for a token or
against it (``odds``). And they are found by n-grams, in place of a suffix tree, so that old text can be forgotten
exactly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, FinishReason, Span
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.text_index import BETWEEN, TextIndex

LENGTHS = (8, 4, 2, 1)
"""The n-grams that are kept; a match is then followed backwards to its full length."""
SCANNED = 16
"""Occurrences that are looked at, those of the longest n-grams first and of these the newest: bounds the cost."""
LEFT = 4
"""Occurrences in the memory that are looked at even where the text itself has had all of these."""
EVIDENCE = 0.8
"""The odds of what followed a single token the one other time it was there."""
REMEMBERED = 1 / 12
"""What a place in the memory is worth; see ``_remembered``."""


@dataclass(frozen=True)
class SuffixSettings:
    """How much to draft, and how much to remember."""

    suffix_decoding_max_tree_depth: int = setting(24, "tokens of the end of the text that are compared", low=1, high=64)
    suffix_decoding_max_spec_factor: float = setting(4.0, "draft tokens for each token that matched", low=0, high=256)
    suffix_decoding_min_token_prob: float = setting(
        0.18, "how likely a draft token must be, by the occurrences found", low=0, high=1
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
"""A text, where in it the continuation begins, and how many tokens before agree with the end of the text (for what is
remembered: how many of this text would be worth as much)."""


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
        found = matches(own, context)
        places: list[_Place] = [(own.tokens, at, agreeing) for at, agreeing in found]
        if remembered is not None:
            earlier = matches(remembered, context, max(LEFT, SCANNED - len(found)))
            places += [(remembered.tokens, at, _remembered(agreeing)) for at, agreeing in earlier]
            found += earlier
        if not found:
            return Draft.nothing("no end of the text was seen before")
        longest = max([agreeing for _, agreeing in found])
        nodes = min(budget, int(self.settings.suffix_decoding_max_spec_factor * longest))
        if nodes < 1:
            return Draft.nothing("too little of the end of the text was seen before")
        return self._grow(places, ahead, nodes)

    def _grow(self, places: list[_Place], ahead: list[int], nodes: int) -> Draft:
        """The ``nodes`` likeliest tokens as a tree, the likeliest first; of the places that go along a path, those that
        go on with a token speak for it, and the others against it."""
        least, branches = self.settings.suffix_decoding_min_token_prob, self.settings.suffix_decoding_branches
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        waiting: list[tuple[float, int, int, int, int, list[_Place]]] = []  # the likeliest last, of equals the earliest
        order = 0
        group, sure = places, 1.0
        trunk = _alike(places, ahead, nodes)
        if trunk:  # where text repeats, most often the whole draft
            chance = _chances({trunk[0]: places})[0][0]
            for token in trunk:
                if sure * chance < least:
                    break
                sure *= chance
                tokens.append(token)
                confidence.append(sure)
            parents += range(-1, len(tokens) - 1)
        depth = len(tokens)
        while len(tokens) < nodes:
            following: dict[int, list[_Place]] = {}
            for place in group:
                text, at, _ = place
                token = text[at + depth] if at + depth < len(text) else _token(place, depth, ahead)
                if token in following:
                    following[token].append(place)
                else:
                    following[token] = [place]
            depth += 1
            likely = [(sure * chance, token) for chance, token in _chances(following) if sure * chance >= least]
            if len(likely) > 1:
                likely.sort(key=lambda each: -each[0])
            for chance, token in likely[:branches]:
                order -= 1
                waiting.append((chance, order, len(tokens) - 1, depth, token, following[token]))
            if not waiting:
                break
            if len(waiting) > 1:
                waiting.sort()
            sure, _, parent, depth, token, group = waiting.pop()
            tokens.append(token)
            parents.append(parent)
            confidence.append(sure)
        if not tokens:
            return Draft.nothing("no continuation is likely enough")
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), confidence=tuple(confidence))


def odds(agreeing: float, places: int, rival: float, others: int) -> float:
    """The odds of a token that stands at ``places`` places, the best of which agrees in ``agreeing`` tokens with the
    end of the text, where at ``others`` places, the best of which agrees in ``rival`` tokens, another one stands.

    This rule does as well as a logistic fit with ten factors. ``EVIDENCE`` is the likeliest for 450 answers of the
    default model to prompts other than those of the benchmarks.
    """
    return EVIDENCE * agreeing * places / ((1 + rival) * math.sqrt(1 + others))


def _remembered(agreeing: int) -> float:
    """How many tokens would have to agree in this text to say as much as ``agreeing`` do in an earlier answer.

    A common phrase goes on in another way there, so that a short match says little; but a long one is an answer that
    comes back. The factor is the likeliest for the same answers as above, each with those before it remembered.
    """
    return REMEMBERED * agreeing * agreeing


def _chances(following: dict[int, list[_Place]]) -> list[tuple[float, int]]:
    """The chance of each token by the places that it follows, in their order; no token ends a text."""
    best: list[float] = []
    first = second = 0.0
    total = 0
    for places in following.values():
        agreeing = places[0][2] if len(places) == 1 else max([agreeing for _, _, agreeing in places])
        best.append(agreeing)
        total += len(places)
        if agreeing > first:
            first, second = agreeing, first
        elif agreeing > second:
            second = agreeing
    chances = []
    for (token, places), agreeing in zip(following.items(), best, strict=True):
        if token != BETWEEN:
            rival = second if agreeing == first else first
            fair = odds(agreeing, len(places), rival, total - len(places))
            chances.append((fair / (1 + fair), token))
    return chances


def matches(index: TextIndex, context: list[int], most: int = SCANNED) -> list[tuple[int, int]]:
    """Places in the index before which the end of ``context`` stands, each with how many tokens agree."""
    found: dict[int, int] = {}
    for n in LENGTHS:
        if n > len(context):
            continue
        for at in index.places(context[-n:], most):
            if len(found) == most:
                return list(found.items())
            if at not in found:
                found[at] = index.agreeing(at, context, n)
        context = context[1 - n :]  # the places that are still to be found agree in less than n tokens
    return list(found.items())


def _alike(places: list[_Place], ahead: list[int], most: int) -> list[int]:
    """The tokens, ``most`` of them at most, with which all places go on in the same way."""
    runs = []
    for place in places:
        text, at, _ = place
        run = text[at : at + most]
        runs.append(run + [_token(place, depth, ahead) for depth in range(len(run), most)] if len(run) < most else run)
    tokens = []
    for column in zip(*runs, strict=True):
        if column[0] == BETWEEN or column.count(column[0]) < len(column):
            break
        tokens.append(column[0])
    return tokens


def _token(place: _Place, depth: int, ahead: list[int]) -> int:
    """What stands ``depth`` tokens behind a place; past the end, text and ``ahead`` go on as a repetition would."""
    text, at, _ = place
    i = at + depth % (len(text) + len(ahead) - at)
    return text[i] if i < len(text) else ahead[i - len(text)]


def build(context: DraftContext, settings: SuffixSettings) -> Proposer:
    return Suffix(settings)
