"""Choosing the best tokens of a vocabulary without sorting it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_COARSE = (1e-2, 1e-4)  # weights relative to the best token that often hold a nucleus already
_ROWS = 64  # values behind each of the maxima that bound the k-th greatest from below
_FEW = 4096  # values that are sorted without more ado


def best(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Where the ``k`` greatest of ``values`` [N] are: i64[k] ascending; of equals the lower index wins. 1 <= k <= N."""
    columns = len(values) // _ROWS
    if columns < 2 * k:
        return _at_least(values, np.partition(values, len(values) - k)[len(values) - k], k)
    # The k-th greatest of many separate maxima is at most the k-th greatest of all.
    maxima = values[: _ROWS * columns].reshape(_ROWS, columns).max(axis=0)
    at = np.flatnonzero(values >= np.partition(maxima, columns - k)[columns - k])
    few = values[at]
    return at[_at_least(few, np.partition(few, len(few) - k)[len(few) - k], k)]


def nucleus(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """Where the fewest of ``weights`` f64[N] are that hold at least ``mass`` of their sum: i64[K] ascending, K >= 1.

    ``weights`` are relative to the greatest, which is 1. Greater ones are taken first, of equals the lower index.
    """
    need = mass * weights.sum()
    for floor in _COARSE:  # an upper set with enough mass holds the nucleus, so only that set must be looked at
        upper = weights >= floor
        if np.count_nonzero(upper) > len(weights) // 8:  # not few: taking them out would cost more than it saves
            break
        at = np.flatnonzero(upper)
        pool = weights[at]
        if pool.sum() >= need:
            return at[_at_least(pool, *_edge(pool, need))]
    return _at_least(weights, *_edge(weights, need))


def _edge(weights: NDArray[np.float64], need: float) -> tuple[np.float64, int]:
    """The least weight of the nucleus that holds ``need``, and its size: quickselect by mass, then a sort."""
    pool, better, taken = weights, 0, 0.0  # what is better than the pool is in the nucleus: how many, their mass
    while len(pool) > _FEW:
        half = len(pool) // 2
        parted = np.partition(pool, half)
        upper = float(parted[half:].sum())
        if taken + upper >= need:
            pool = parted[half:]
        else:
            better, taken, pool = better + len(pool) - half, taken + upper, parted[:half]
    descending = np.sort(pool)[::-1]
    n = min(int(np.searchsorted(taken + np.cumsum(descending), need)) + 1, len(descending))
    return descending[n - 1], better + n


def _at_least(values: NDArray[np.floating], edge: np.floating, k: int) -> NDArray[np.int64]:
    """Where the ``k`` values >= ``edge``, the k-th greatest, are; of those that tie at the edge the last stay out."""
    at: NDArray[np.int64] = np.flatnonzero(values >= edge)
    surplus = len(at) - k
    return np.delete(at, np.flatnonzero(values[at] == edge)[-surplus:]) if surplus else at
