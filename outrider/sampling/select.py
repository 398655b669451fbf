"""Choosing the best tokens of a vocabulary without sorting it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_COARSE = (1e-2, 1e-4)  # weights relative to the best token that often hold a nucleus already


def best(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Where the ``k`` greatest of ``values`` [N] are: i64[k] ascending; of equals the lower index wins. 1 <= k <= N."""
    return _at_least(values, np.partition(values, len(values) - k)[len(values) - k], k)


def nucleus(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Where the fewest of ``weights`` f64[N] are that hold at least ``mass`` of their sum: i64[K] ascending, K >= 1.

    ``weights`` are relative to the greatest, which is 1. Greater ones are taken first, of equals the lower index.
    """
    need = mass * weights.sum()
    pool = weights
    for floor in _COARSE:  # an upper set with enough mass holds the nucleus, so only that set must be sorted
        upper = weights[weights >= floor]
        if upper.sum() >= need:
            pool = upper
            break
    descending = np.sort(pool)[::-1]
    k = min(int(np.searchsorted(np.cumsum(descending), need)) + 1, len(descending))
    return _at_least(weights, descending[k - 1], k)


def _at_least(values: NDArray[np.floating], edge: np.floating, k: int) -> NDArray[np.int64]:
    """Where the ``k`` values >= ``edge``, the k-th greatest, are; of those that tie at the edge the last stay out."""
    at: NDArray[np.int64] = np.flatnonzero(values >= edge)
    surplus = len(at) - k
    return np.delete(at, np.flatnonzero(values[at] == edge)[-surplus:]) if surplus else at
