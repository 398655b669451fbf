"""The tokens that a request's rules look back at, counted as they come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.models.grammars import CompiledGrammar
from outrider.sampling.grammar import Account, Matcher


class History:
    """Prompt and output of one sequence. ``tokens`` is its own list, read and never copied; it may only grow.

    Counts are kept per distinct token and catch up when they are asked for, so a step costs time in its new tokens.
    ``account`` is where the time for the request's grammar goes, in common with its other answers.
    """

    def __init__(self, tokens: Sequence[int], n_prompt: int, account: Account | None = None) -> None:
        self.tokens = tokens
        self.n_prompt = n_prompt
        self._place: dict[int, int] = {}  # token -> where it stands in the two arrays
        self._ids = np.empty(64, dtype=np.int64)
        self._times = np.zeros(64)
        self._counted = 0  # tokens taken in
        self._account = account
        self._matcher: Matcher | None = None

    @property
    def prompt(self) -> list[int]:
        return list(self.tokens[: self.n_prompt])

    def output(self, path: Sequence[int] = ()) -> list[int]:
        """Every token after the prompt, then those of ``path``."""
        return [*self.tokens[self.n_prompt :], *path]

    def n_output(self, path: Sequence[int] = ()) -> int:
        return len(self.tokens) - self.n_prompt + len(path)

    def counts(self, path: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The distinct tokens i64[K] of prompt, output and ``path``, and how often each is in the last two: f64[K].

        ``path`` are draft tokens on the way to a node. The arrays hold until the next call.
        """
        for i in range(self._counted, len(self.tokens)):
            self._take(self.tokens[i], i >= self.n_prompt)
        self._counted = len(self.tokens)
        known = len(self._place)
        ids, times = self._ids[:known], self._times[:known]
        if not path:
            return ids, times
        new = [token for token in dict.fromkeys(path) if token not in self._place]
        place = dict(zip(new, range(known, known + len(new)), strict=True))
        ids, times = np.append(ids, np.array(new, dtype=np.int64)), np.append(times, np.zeros(len(new)))
        for token in path:
            times[place.get(token, self._place.get(token, 0))] += 1
        return ids, times

    def matcher(self, grammar: CompiledGrammar) -> Matcher:
        """Where the output stands in the request's grammar, always the same one."""
        if self._matcher is None:
            self._matcher = Matcher(grammar, self.tokens, self.n_prompt, self._account)
        return self._matcher

    def _take(self, token: int, drawn: bool) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._times = np.tile(self._ids, 2), np.append(self._times, np.zeros(place))
        self._ids[place] = token
        self._times[place] += drawn
