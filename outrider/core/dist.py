"""A distribution over tokens, kept as the few tokens that have mass.

Greedy decoding is a distribution with one token, top-k one with k: the verifier needs no other case.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from outrider.core.rng import token_uniforms

_FEW = 1024  # tokens that are looked up one by one; for more a table of all is quicker
_BLOCK = 1024  # tokens whose probabilities are added up before the one that is drawn is looked for
_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


@lru_cache(maxsize=8)
def all_ids(size: int) -> NDArray[np.int64]:
    """0 .. size - 1: the ids of a distribution over all tokens, the same array for all of them; not to be written."""
    ids = np.arange(size, dtype=np.int64)
    ids.flags.writeable = False
    return ids


@dataclass(frozen=True, eq=False)
class Dist:
    """``ids`` i64[K] ascending and distinct; ``probs`` f64[K], all above zero, summing to 1; K >= 1."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    @staticmethod
    def point(token: int) -> Dist:
        """All mass on one token: a certain choice."""
        return _Point(token)

    @staticmethod
    def of(ids: NDArray[np.int64], weights: NDArray[np.float64]) -> Dist:
        """From ascending ``ids`` and weights >= 0 with a positive sum; tokens of weight zero are left out."""
        if not weights.min() > 0.0:
            at = np.flatnonzero(weights > 0.0)
            ids, weights = at if ids[-1] == len(ids) - 1 else ids[at], weights[at]
        return Dist(ids, weights / weights.sum())

    @staticmethod
    def dense(weights: NDArray[np.float64]) -> Dist:
        """From weights f64[V] of all tokens."""
        return Dist.of(all_ids(len(weights)), weights)

    @property
    def certain(self) -> bool:
        """Whether one token has all the mass."""
        return len(self.ids) == 1

    def prob(self, token: int) -> float:
        """The probability of ``token``."""
        i = int(np.searchsorted(self.ids, token))
        return float(self.probs[i]) if i < len(self.ids) and self.ids[i] == token else 0.0

    def probs_of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probabilities f64[N] of the tokens ``ids`` i64[N]."""
        if ids is self.ids:
            return self.probs
        if len(ids) > _FEW:
            table = np.zeros(max(int(ids.max()), int(self.ids[-1])) + 1)
            table[self.ids] = self.probs
            return table[ids]
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probs[at], 0.0)

    def without(self, token: int) -> Dist | None:
        """This distribution given that ``token`` is not drawn; None when nothing else has mass."""
        i = int(np.searchsorted(self.ids, token))
        if i == len(self.ids) or self.ids[i] != token:
            return self
        return None if self.certain else Dist.of(np.delete(self.ids, i), np.delete(self.probs, i))

    def excess(self, other: Dist, scale: float = 1.0) -> NDArray[np.float64]:
        """max(scale * self - other, 0) at each of ``self.ids``: f64[K]."""
        left = scale * self.probs
        if len(other.ids) <= _FEW:
            at = np.minimum(np.searchsorted(self.ids, other.ids), len(self.ids) - 1)
            hit = self.ids[at] == other.ids
            left[at[hit]] -= other.probs[hit]
        else:
            left -= other.probs_of(self.ids)
        return np.maximum(left, 0.0, out=left)

    def residual(self, other: Dist, scale: float = 1.0) -> Dist:
        """norm(max(scale * self - other, 0)); this distribution itself when no float mass is left."""
        weights = self.excess(other, scale)
        return Dist.of(self.ids, weights) if weights.sum() > 0.0 else self

    def sample(self, u: float) -> int:
        """The token at quantile ``u`` in [0, 1)."""
        if self.certain:
            return int(self.ids[0])
        blocks = np.cumsum(np.add.reduceat(self.probs, np.arange(0, len(self.ids), _BLOCK)))
        mark = u * blocks[-1]
        block = min(int(np.searchsorted(blocks, mark, side="right")), len(blocks) - 1)
        first = block * _BLOCK
        cumulative = (blocks[block - 1] if block else 0.0) + np.cumsum(self.probs[first : first + _BLOCK])
        i = int(np.searchsorted(cumulative, mark, side="right"))
        return int(self.ids[first + min(i, len(cumulative) - 1)])

    def gumbel_max(self, seed: int, position: int) -> int:
        """The token with the greatest log-probability plus noise: a sample that is a function of seed and position.

        That is the greatest p / E with E = -log(uniform). As E >= 1 - uniform, few tokens need logarithms.
        """
        if self.certain:
            return int(self.ids[0])
        u = token_uniforms(seed, position, self.ids)
        with np.errstate(divide="ignore"):  # a uniform number may round to 1: infinite noise, and the token wins
            bound = self.probs / (1.0 - u)
            first = int(np.argmax(bound))
            at = np.flatnonzero(bound >= self.probs[first] / -np.log(u[first]) * (1.0 - 1e-9))
            return int(self.ids[at[int(np.argmax(np.log(self.probs[at]) - np.log(-np.log(u[at]))))]])


class _Point(Dist):
    """All mass on ``token``. A greedy step makes one for every row, so the array of ids is made where it is used."""

    probs = _CERTAIN
    certain = True
    token: int

    def __init__(self, token: int) -> None:
        object.__setattr__(self, "token", token)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        return np.array([self.token], dtype=np.int64)

    def prob(self, token: int) -> float:
        return 1.0 if token == self.token else 0.0

    def without(self, token: int) -> Dist | None:
        return None if token == self.token else self

    def sample(self, u: float) -> int:
        return self.token

    def gumbel_max(self, seed: int, position: int) -> int:
        return self.token
