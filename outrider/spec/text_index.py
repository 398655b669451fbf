"""Where n-grams of a text stood before: of each the newest place is in a table, and a place knows the one before it.

An n-gram is known by a polynomial hash, the difference of two running sums (Karp and Rabin, 1987), so that a long text
is taken in by whole arrays and a token by a few operations. A place is compared with the text before it is believed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

BETWEEN = -1
"""Stands between two texts."""

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MASK = (1 << 64) - 1
_MANY = 64  # tokens from which on arrays are faster
_SOME = 16  # tokens that cost a third of what they cost one by one


class TextIndex:
    """Where the n-grams of one or several texts end. A token more or less costs nearly the same at any size."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """``lengths`` are those of the n-grams that are kept, the longest first."""
        self.lengths = tuple(lengths)
        self._power = {n: pow(_BASE, n, 1 << 64) for n in self.lengths}
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        self._sums = array("Q", [0])  # [i]: over the first i tokens
        self._forgotten = 0  # tokens before those that are left; a place is counted from the very first token
        self._start = 0  # where the newest text begins
        self._newest: dict[int, dict[int, int]] = {n: {} for n in self.lengths}  # hash of an n-gram -> its last end
        self._before = {n: array("q") for n in self.lengths}  # [i]: where the n-gram ending with token i ended before
        self._tables = [(n, self._power[n], self._newest[n], self._before[n]) for n in self.lengths]

    def follow(self, tokens: Sequence[int], stop: int) -> None:
        """Takes in what is new of one growing text up to ``stop``; one that shrank is another text."""
        if len(self.tokens) > len(tokens):
            self._clear()
        if len(self.tokens) < stop:
            self.extend(tokens[len(self.tokens) : stop])

    def keep_up(self, tokens: Sequence[int], stop: int) -> None:
        """The same once it is some tokens: cheap where nothing is looked up, and never much is left to ``follow``."""
        if stop - len(self.tokens) >= _SOME:
            self.follow(tokens, stop)

    def extend(self, tokens: Sequence[int]) -> None:
        """Continues the newest text."""
        if len(tokens) >= _MANY:
            self._extend_many(tokens)
            return
        sums, size, last = self._sums, len(self.tokens), self._sums[-1]
        self.tokens.extend(tokens)
        for token in tokens:
            size += 1
            last = (last * _BASE + token + 1) & _MASK
            sums.append(last)
            place, length = self._forgotten + size, size - self._start
            for n, power, newest, before in self._tables:
                if n <= length:
                    key = (last - sums[size - n] * power) & _MASK
                    before.append(newest.get(key, -1))
                    newest[key] = place
                else:
                    before.append(-1)

    def _extend_many(self, tokens: Sequence[int]) -> None:
        first, count = len(self.tokens) + 1, len(tokens)
        powers, inverses = (np.cumprod(np.full(count, base, np.uint64)) for base in (_BASE, _INVERSE))
        values = (np.asarray(tokens, np.int64) + 1).astype(np.uint64)
        new = powers * (np.uint64(self._sums[-1]) + np.cumsum(values * inverses, dtype=np.uint64))
        self._sums.frombytes(new.tobytes())
        self.tokens.extend(tokens)
        sums = np.array(self._sums, np.uint64)
        for n in self.lengths:
            before = np.full(count, -1, np.int64)
            ends = np.arange(max(first, self._start + n), len(self.tokens) + 1)
            if ends.size:
                keys = sums[ends] - sums[ends - n] * np.uint64(self._power[n])
                self._link(n, keys, ends + self._forgotten, before[ends[0] - first :])
            self._before[n].frombytes(before.tobytes())

    def _link(self, n: int, keys: np.ndarray, places: np.ndarray, before: np.ndarray) -> None:
        """Fills in ``before`` for the n-grams ``keys`` that end at ``places``, and makes them the newest ones."""
        order = np.argsort(keys, kind="stable")
        alike = keys[order[1:]] == keys[order[:-1]]
        before[order[1:][alike]] = places[order[:-1][alike]]
        newest = self._newest[n]
        if newest:
            firsts = order[np.append(True, ~alike)]
            before[firsts] = [newest.get(key, -1) for key in keys[firsts].tolist()]
        lasts = order[np.append(~alike, True)]
        newest.update(zip(keys[lasts].tolist(), places[lasts].tolist(), strict=True))

    def end_text(self) -> None:
        """The next token begins another text."""
        self.tokens.append(BETWEEN)
        self._sums.append((self._sums[-1] * _BASE) & _MASK)
        for n in self.lengths:
            self._before[n].append(-1)
        self._start = len(self.tokens)

    def forget(self, size: int) -> None:
        """Drops the oldest text, which has ``size`` tokens, and the mark behind it."""
        for n in self.lengths:
            newest = self._newest[n]
            for end in range(n, size + 1):
                key = self._key(end, n)
                if newest.get(key) == self._forgotten + end:
                    del newest[key]
            del self._before[n][: size + 1]
        del self._sums[: size + 1]
        del self.tokens[: size + 1]
        self._forgotten += size + 1
        self._start -= size + 1

    def places(self, tail: list[int], most: int) -> list[int]:
        """Where in ``tokens`` this n-gram, of one of the lengths, ended before their very end: the newest, at most so
        many."""
        n, tokens = len(tail), self.tokens
        return [at for at in self._ends(tail, most) if tokens[at - n : at] == tail]

    def matches(self, context: list[int], most: int) -> list[tuple[int, int]]:
        """Places before which the end of ``context`` stands, at most so many, each with how many tokens agree: those of
        the longest n-grams first, and of these the newest."""
        found: dict[int, int] = {}
        tokens = self.tokens
        for n in self.lengths:
            if n > len(context):
                continue
            tail = context[-n:]
            for at in self._ends(tail, most):
                if at not in found and tokens[at - n : at] == tail:
                    found[at] = self.agreeing(at, context, n)
                    if len(found) == most:
                        return list(found.items())
            context = context[1 - n :]  # the places that are still to be found agree in less than n tokens
        return list(found.items())

    def _ends(self, tail: list[int], most: int) -> list[int]:
        """The newest ``most`` places where an n-gram with the hash of ``tail`` ended; one may be another n-gram."""
        n = len(tail)
        before, forgotten = self._before[n], self._forgotten
        if self.tokens[-n:] == tail:
            end = before[-1]
        else:
            key = 0
            for token in tail:
                key = (key * _BASE + token + 1) & _MASK
            end = self._newest[n].get(key, -1)
        ends: list[int] = []
        while end > forgotten and len(ends) < most:
            ends.append(end - forgotten)
            end = before[end - forgotten - 1]
        return ends

    def agreeing(self, at: int, context: list[int], n: int) -> int:
        """How many tokens before ``at`` agree with the end of ``context``, of which ``n`` are known to."""
        tokens, most = self.tokens, min(at, len(context))
        if n < most and tokens[at - n - 1] != context[-n - 1]:
            return n
        # The farthest one first: most often it tells that not all agree.
        if tokens[at - most] == context[-most] and tokens[at - most : at] == context[-most:]:
            return most
        while tokens[at - n - 1] == context[-n - 1]:
            n += 1
        return n

    def _key(self, end: int, n: int) -> int:
        return (self._sums[end] - self._sums[end - n] * self._power[n]) & _MASK


def lasting(matched: int, depth: int) -> float:
    """The chance that a continuation which begins as the text does goes on so for ``depth`` tokens.

    As Laplace's rule has it for something that happened ``matched`` times in a row, but two tokens less: a match of a
    few tokens is seldom more than a common phrase (measured on Spec-Bench, see docs/drafters/ngram.md).
    """
    held = max(2, matched - 2)
    return held / (held + depth)
