"""Counter-based randomness: every random number is a pure function of (seed, counters).

There is no generator state, so batch composition, preemption and speculation cannot shift anybody's random numbers.
The hash is the SplitMix64 finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
chained over the counters.
"""

from __future__ import annotations

import os
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_TO_UNIT = 2.0**-53
_CHUNK = 16384  # tokens hashed at a time, so that they stay in the cache


class Stream(IntEnum):
    """What a random number is for; two uses never share one."""

    ACCEPT = 1  # may this draft token stay?
    SAMPLE = 2  # the target's own draw: replacement or bonus token
    DRAFT = 3  # the drafter's draw
    NOISE = 4  # Gumbel noise shared by target and drafter (coupled verification)
    CHOICE = 5  # seeds of the 2nd, 3rd, ... of n choices


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MUL_1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL_2) & _MASK
    return x ^ (x >> 31)


def bits(seed: int, *counters: int) -> int:
    """64 hashed bits of ``seed`` and ``counters`` (each reduced modulo 2**64)."""
    state = _mix((seed + _GOLDEN) & _MASK)
    for counter in counters:
        state = _mix((state ^ ((counter * _GOLDEN + _MUL_1) & _MASK)) & _MASK)
    return state


def uniform(seed: int, *counters: int) -> float:
    """A number in [0, 1) that depends on nothing but ``seed`` and ``counters``."""
    return (bits(seed, *counters) >> 11) * _TO_UNIT


def token_uniforms(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in (0, 1) for each of the tokens ``ids`` i64[K] at ``position``, f64[K]: the same for whoever asks."""
    golden, mul_1, mul_2 = np.uint64(_GOLDEN), np.uint64(_MUL_1), np.uint64(_MUL_2)
    key = np.uint64(bits(seed, int(Stream.NOISE), position))
    u = np.empty(len(ids))
    for start in range(0, len(ids), _CHUNK):
        x = ids[start : start + _CHUNK].astype(np.uint64)
        x *= golden
        x += mul_1
        x ^= key
        x ^= x >> np.uint64(30)
        x *= mul_1
        x ^= x >> np.uint64(27)
        x *= mul_2
        x ^= x >> np.uint64(31)
        x >>= np.uint64(11)
        u[start : start + _CHUNK] = x
    u += 0.5
    u *= _TO_UNIT
    return u


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise f64[K] made of ``token_uniforms``."""
    noise: NDArray[np.float64] = -np.log(-np.log(token_uniforms(seed, position, ids)))
    return noise


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request with n > 1; choice 0 keeps the request's own seed."""
    return seed if index == 0 else bits(seed, int(Stream.CHOICE), index) >> 1


def fresh_seed() -> int:
    """A seed for a request that gave none: 63 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1
