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
from operator import itemgetter

from outrider.core.draft import Draft
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, FinishReason, Span
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.text_index import BETWEEN, TextIndex

LENGTHS = (8, 4, 2, 1)
"""The n-grams that are kept; a match is then followed backwards to its full length."""
SCANNED = 12
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


_Continuation = tuple[list[int], float]
"""What followed a place where the end of the text stood before, and how many tokens before it agree with the end of the
text (for what is remembered: how many of this text would be worth as much)."""


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
        found = own.matches(context, SCANNED)
        earlier = [] if remembered is None else remembered.matches(context, max(LEFT, SCANNED - len(found)))
        if not found and not earlier:
            return Draft.nothing("no end of the text was seen before")
        longest = max([agreeing for _, agreeing in (*found, *earlier)])
        nodes = min(budget, int(self.settings.suffix_decoding_max_spec_factor * longest))
        if nodes < 1:
            return Draft.nothing("too little of the end of the text was seen before")
        going: list[_Continuation] = [(_continuation(own.tokens, at, ahead, nodes), agreeing) for at, agreeing in found]
        if remembered is not None:
            going += [
                (_continuation(remembered.tokens, at, [], nodes), _remembered(agreeing)) for at, agreeing in earlier
            ]
        going.sort(key=itemgetter(1), reverse=True)
        return self._grow(going, nodes)

    def _grow(self, group: list[_Continuation], nodes: int) -> Draft:
        """The ``nodes`` likeliest tokens as a tree, the likeliest first; of the continuations along a path, those that
        go on with a token speak for it, and the others against it. ``group``: all of them, what agrees most first."""
        least, branches = self.settings.suffix_decoding_min_token_prob, self.settings.suffix_decoding_branches
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # The likeliest last, of equals the earliest.
        waiting: list[tuple[float, int, int, int, int, list[_Continuation]]] = []
        order = depth = 0
        parent, sure = -1, 1.0
        while len(tokens) < nodes:
            column = [following[depth] for following, _ in group]
            token = column[0]
            depth += 1
            if column.count(token) == len(column):  # where text repeats, nearly always
                likely = [(_united(group), token, group)] if token != BETWEEN else []
            else:
                likely = _split(column, group)
            for chance, token, going in likely[:branches]:
                if sure * chance >= least:
                    order -= 1
                    waiting.append((sure * chance, order, parent, depth, token, going))
            if not waiting:
                break
            if len(waiting) > 1:
                waiting.sort()
            sure, _, parent, depth, token, group = waiting.pop()
            parents.append(parent)
            parent = len(tokens)
            tokens.append(token)
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


def _united(group: list[_Continuation]) -> float:
    """The chance of the token with which all of these go on."""
    fair = odds(group[0][1], len(group), 0, 0)
    return fair / (1 + fair)


def _split(column: list[int], group: list[_Continuation]) -> list[tuple[float, int, list[_Continuation]]]:
    """The chance of each token of ``column``, which are the next ones in the group, and who goes on with it; the
    likeliest first. No token ends a text."""
    following: dict[int, list[_Continuation]] = {}
    for token, continuation in zip(column, group, strict=True):
        alike = following.get(token)
        if alike is None:
            following[token] = [continuation]
        else:
            alike.append(continuation)
    # The best place of the second token speaks against the first one, that of the first one against all others.
    best, rival = (alike[0][1] for alike in list(following.values())[:2])
    likely = []
    for token, alike in following.items():
        if token != BETWEEN:
            fair = odds(alike[0][1], len(alike), rival, len(group) - len(alike))
            likely.append((fair / (1 + fair), token, alike))
        rival = best
    likely.sort(key=itemgetter(0), reverse=True)
    return likely


def _continuation(text: list[int], at: int, ahead: list[int], n: int) -> list[int]:
    """``n`` tokens from the place on; past the end, text and ``ahead`` go on as a repetition would."""
    following = text[at : at + n]
    if len(following) < n:
        following += ahead
        following = (following * (n // len(following) + 1))[:n]
    return following


def build(context: DraftContext, settings: SuffixSettings) -> Proposer:
    return Suffix(settings)
