"""The caller's own prediction of the answer as the draft: rewriting a file, filling in a form, a known text again.

As OpenAI's ``prediction``. The draft goes on in the prediction from where the answer has got to. Where the answer goes
another way, that place is lost; it is found again when the newest tokens of the answer stand in the prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.settings import check_settings, setting
from outrider.core.types import Span
from outrider.spec.proposer import DraftContext, Needs, Proposer

COMPARED = 32
"""Tokens that are compared to tell one place in the prediction from another."""
NEAR = 16
"""Places that are looked at before and behind where the answer was: bounds the cost of a common one."""


@dataclass(frozen=True)
class PredictionSettings:
    """When to trust the prediction again."""

    prediction_match: int = setting(
        2, "tokens of the answer that must stand in the prediction to go on from there", low=1, high=COMPARED
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass
class _Follower:
    """How far one answer has followed its prediction."""

    ends: dict[tuple[int, ...], list[int]]  # where each n-gram of the prediction ends
    at: int = 0  # the place in the prediction where the answer is, or was when it was lost
    lost: bool = False
    read: int = 0  # tokens of the answer that were taken in
    failures: int = 0  # places in a row that were right for no token


class Prediction(Proposer):
    """Drafts from ``SpecParams.prediction``; its drafts are certain."""

    needs = Needs(prediction=True)

    def __init__(self, settings: PredictionSettings) -> None:
        self.settings = settings
        self._followers: dict[int, _Follower] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._draft(span) for span in spans]

    def release(self, seq_id: int) -> None:
        self._followers.pop(seq_id, None)

    def _draft(self, span: Span) -> Draft:
        seq = span.seq
        predicted = seq.spec.prediction
        if not predicted or isinstance(predicted, str):
            return Draft.nothing("no prediction was given")
        if seq.id not in self._followers:
            self._followers[seq.id] = _Follower(_places(predicted, self.settings.prediction_match))
        follower = self._followers[seq.id]
        self._follow(follower, seq.tokens, seq.n_prompt, predicted)
        if follower.lost:
            return Draft.nothing("the answer has left the prediction")
        draft = predicted[follower.at : follower.at + span.budget]
        return Draft.chain(draft) if draft else Draft.nothing("the prediction has come to its end")

    def _follow(self, follower: _Follower, tokens: list[int], n_prompt: int, predicted: tuple[int, ...]) -> None:
        """Takes in the newest tokens of the answer, and looks for its place if it has left the prediction."""
        for token in tokens[n_prompt + follower.read :]:
            if follower.lost:
                break
            if follower.at < len(predicted) and predicted[follower.at] == token:
                follower.at += 1
                follower.failures = 0
            else:
                follower.lost = True
                follower.failures += 1
        follower.read = len(tokens) - n_prompt
        if follower.lost:
            # Each place that was right for no token at all asks for one token more that agrees.
            wanted = min(self.settings.prediction_match + follower.failures - 1, COMPARED)
            place = self._place(follower, tokens[n_prompt:][-COMPARED:], wanted, predicted)
            if place is not None:
                follower.at, follower.lost = place, False

    def _place(self, follower: _Follower, tail: list[int], wanted: int, predicted: tuple[int, ...]) -> int | None:
        """Where in the prediction the end of the answer stands, in ``wanted`` tokens at least.

        Of several places the one that agrees most, then the next one behind where the answer was.
        """
        if len(tail) < wanted:
            return None
        ends = follower.ends.get(tuple(tail[-self.settings.prediction_match :]), [])
        middle = bisect_left(ends, follower.at)
        best: tuple[int, bool, int] | None = None
        place = None
        for end in ends[max(0, middle - NEAR) : middle + NEAR]:
            agreeing = _agreeing(predicted, end, tail)
            rank = (agreeing, end >= follower.at, -abs(end - follower.at))
            if agreeing >= wanted and (best is None or rank > best):
                best, place = rank, end
        return place


def _places(predicted: tuple[int, ...], n: int) -> dict[tuple[int, ...], list[int]]:
    ends: dict[tuple[int, ...], list[int]] = {}
    for end in range(n, len(predicted) + 1):
        ends.setdefault(predicted[end - n : end], []).append(end)
    return ends


def _agreeing(predicted: tuple[int, ...], end: int, tail: list[int]) -> int:
    """How many tokens before ``end`` agree with the end of ``tail``."""
    most = min(end, len(tail))
    return next((n for n in range(most) if predicted[end - n - 1] != tail[-n - 1]), most)


def build(context: DraftContext, settings: PredictionSettings) -> Proposer:
    return Prediction(settings)
