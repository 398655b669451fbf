"""Counter-based numbers: uniform, independent across every counter, and the same for ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from outrider.core.rng import Stream, bits, choice_seed, fresh_seed, gumbel, uniform

N = 6000
KEYS: dict[str, Callable[[int, int], float]] = {
    "seeds": lambda i, s: uniform(i, 7, 1, 0, s),
    "bases": lambda i, s: uniform(42, i, 1, 0, s),
    "depths": lambda i, s: uniform(42, 7, i, 0, s),
    "indexes": lambda i, s: uniform(42, 7, 1, i, s),
}


def chi_square_p(values: np.ndarray, cells: int = 50) -> float:
    return float(stats.chisquare(np.histogram(values, cells, (0.0, 1.0))[0]).pvalue)


def independence_p(a: np.ndarray, b: np.ndarray, cells: int = 10) -> float:
    table = np.histogram2d(a, b, cells, ((0.0, 1.0), (0.0, 1.0)))[0]
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.parametrize("key", KEYS)
def test_numbers_are_uniform_and_independent_of_their_neighbours(key: str) -> None:
    u = np.array([KEYS[key](i, int(Stream.ACCEPT)) for i in range(N)])
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert chi_square_p(u) > 0.001
    assert independence_p(u[:-1], u[1:]) > 0.001


def test_streams_are_independent() -> None:
    streams = [np.array([uniform(3, i, 1, 0, s) for i in range(N)]) for s in Stream]
    for i, a in enumerate(streams):
        assert chi_square_p(a) > 0.001
        for b in streams[:i]:
            assert independence_p(a, b) > 0.001


def test_counters_do_not_stand_in_for_one_another() -> None:
    """(base, depth) and (base + 1, depth - 1) are the same position, and must be different numbers."""
    a = np.array([uniform(3, i, 2, 0, 1) for i in range(N)])
    for other in (
        lambda i: uniform(3, i + 1, 1, 0, 1),
        lambda i: uniform(3, 2, i, 0, 1),
        lambda i: uniform(i, 3, 2, 0, 1),
    ):
        assert independence_p(a, np.array([other(i) for i in range(N)])) > 0.001


def test_negative_control_shifted_and_skewed_numbers_fail() -> None:
    u = np.array([uniform(3, i, 1, 0, 1) for i in range(N)])
    assert chi_square_p(u**1.2) < 1e-6
    assert independence_p(u, (u + 0.3) % 1.0) < 1e-6
    assert independence_p(u, 0.9 * u + 0.1 * u[::-1]) < 1e-6


def test_numbers_never_change_between_versions() -> None:
    assert bits(0) == 0xE220A8397B1DCDAF
    assert bits(1, 2, 3) == 0xC8DD56004884B5E0
    assert uniform(42, 7, 1, 0, Stream.ACCEPT) == 0.39309946711383614
    assert gumbel(5, 6, np.array([0, 100_000])).tolist() == pytest.approx(
        [1.3617234218967416, 1.9669223848092918], rel=1e-13
    )
    assert choice_seed(5, 1) == 3806197621091124830


def test_gumbel_noise_has_the_gumbel_law_and_belongs_to_its_token() -> None:
    ids = np.arange(N)
    noise = gumbel(1, 2, ids)
    assert np.isfinite(noise).all()
    assert chi_square_p(np.exp(-np.exp(-noise))) > 0.001
    assert gumbel(1, 2, ids[100:110]).tolist() == noise[100:110].tolist()
    for other in (gumbel(1, 3, ids), gumbel(2, 2, ids)):
        assert independence_p(np.exp(-np.exp(-noise)), np.exp(-np.exp(-other))) > 0.001


def test_choices_have_their_own_seeds_and_the_first_keeps_the_requests() -> None:
    assert choice_seed(9, 0) == 9
    seeds = {choice_seed(s, i) for s in range(50) for i in range(1, 50)}
    assert len(seeds) == 50 * 49
    assert all(0 <= s < 2**63 for s in seeds)


def test_fresh_seeds_differ_and_fit() -> None:
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= s < 2**63 for s in seeds)
