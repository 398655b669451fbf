"""A distribution over tokens, kept as the few tokens that have mass.

Greedy decoding is a distribution with one token, top-k one with k: the verifier needs no other case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.rng import gumbel


@dataclass(frozen=True, eq=False)
class Dist:
    """``ids`` i64[K] ascending and distinct; ``probs`` f64[K], all above zero, summing to 1; K >= 1."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    @staticmethod
    def point(token: int) -> Dist:
        """All mass on one token: a certain choice."""
        return Dist(np.array([token], dtype=np.int64), np.ones(1))

    @staticmethod
    def of(ids: NDArray[np.int64], weights: NDArray[np.float64]) -> Dist:
        """From ascending ``ids`` and weights >= 0 with a positive sum; tokens of weight zero are left out."""
        keep = weights > 0.0
        if not keep.all():
            ids, weights = ids[keep], weights[keep]
        return Dist(ids, weights / weights.sum())

    @staticmethod
    def dense(weights: NDArray[np.float64]) -> Dist:
        """From weights f64[V] of all tokens."""
        return Dist.of(np.arange(len(weights), dtype=np.int64), weights)

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
        if len(ids) == len(self.ids) and np.array_equal(ids, self.ids):
            return self.probs
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.probs[at], 0.0)

    def without(self, token: int) -> Dist | None:
        """This distribution given that ``token`` is not drawn; None when nothing else has mass."""
        keep = self.ids != token
        if keep.all():
            return self
        return Dist.of(self.ids[keep], self.probs[keep]) if keep.any() else None

    def excess(self, other: Dist, scale: float = 1.0) -> NDArray[np.float64]:
        """max(scale * self - other, 0) at each of ``self.ids``: f64[K]."""
        return np.maximum(scale * self.probs - other.probs_of(self.ids), 0.0)

    def residual(self, other: Dist, scale: float = 1.0) -> Dist:
        """norm(max(scale * self - other, 0)); this distribution itself when no float mass is left."""
        weights = self.excess(other, scale)
        return Dist.of(self.ids, weights) if weights.sum() > 0.0 else self

    def sample(self, u: float) -> int:
        """The token at quantile ``u`` in [0, 1)."""
        if self.certain:
            return int(self.ids[0])
        cumulative = np.cumsum(self.probs)
        i = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        return int(self.ids[min(i, len(self.ids) - 1)])

    def gumbel_max(self, seed: int, position: int) -> int:
        """The token with the greatest log-probability plus noise: a sample that is a function of seed and position."""
        if self.certain:
            return int(self.ids[0])
        return int(self.ids[int(np.argmax(np.log(self.probs) + gumbel(seed, position, self.ids)))])
