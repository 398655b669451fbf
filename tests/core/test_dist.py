"""Distributions: the arithmetic of verification, and draws from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.core.dist import Dist
from outrider.core.rng import gumbel

P = Dist.dense(np.array([0.5, 0.3, 0.2, 0.0]))
Q = Dist.dense(np.array([0.1, 0.6, 0.2, 0.1]))

dists = st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.7, 1.0, 1e-12]), min_size=6, max_size=6).filter(any)


def dense(dist: Dist, size: int = 4) -> list[float]:
    return dist.probs_of(np.arange(size)).tolist()


def test_tokens_without_mass_are_left_out_and_the_rest_sums_to_one() -> None:
    d = Dist.of(np.array([2, 5, 9]), np.array([1.0, 0.0, 3.0]))
    assert d.ids.tolist() == [2, 9]
    assert d.probs.tolist() == [0.25, 0.75]
    assert [d.prob(t) for t in (0, 2, 5, 9, 10)] == [0, 0.25, 0, 0.75, 0]
    assert d.probs_of(np.array([9, 5, 2, 11])).tolist() == [0.75, 0, 0.25, 0]
    assert not d.certain
    assert Dist.point(3).certain
    assert Dist.point(3).prob(3) == 1.0


def test_residuals_are_theorys_numbers() -> None:
    assert dense(P.residual(Q)) == [1.0, 0.0, 0.0, 0.0]
    assert dense(Q.residual(P)) == pytest.approx([0, 0.75, 0, 0.25])
    assert P.residual(P) is P  # no mass left: itself, never NaN
    assert P.excess(Q, 0.5).tolist() == pytest.approx([0.15, 0, 0])
    assert dense(P.residual(Dist.point(1))) == pytest.approx([5 / 7, 0, 2 / 7, 0])


def test_without_a_token() -> None:
    rest = P.without(0)
    assert rest is not None
    assert dense(rest) == pytest.approx([0, 0.6, 0.4, 0])
    assert P.without(3) is P
    assert Dist.point(2).without(2) is None


@settings(max_examples=100, deadline=None)
@given(p=dists, q=dists, scale=st.sampled_from([1.0, 0.5, 1e-9]))
def test_residual_is_the_dense_formula(p: list[float], q: list[float], scale: float) -> None:
    a, b = Dist.dense(np.array(p)), Dist.dense(np.array(q))
    weights = np.maximum(scale * np.array(p) / sum(p) - np.array(q) / sum(q), 0.0)
    got = np.array(dense(a.residual(b, scale), 6))
    assert got.sum() == pytest.approx(1.0, abs=1e-12)
    if weights.sum() > 1e-9 * scale:
        assert got == pytest.approx(weights / weights.sum(), abs=1e-6)
    assert a.excess(b, scale).sum() == pytest.approx(weights.sum(), abs=1e-15)


def test_samples_stand_at_their_quantiles() -> None:
    d = Dist.of(np.array([3, 7, 8]), np.array([0.25, 0.5, 0.25]))
    assert [d.sample(u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [3, 3, 7, 7, 8, 8]
    assert Dist.point(5).sample(0.99) == 5
    n = 10_000
    counts = [sum(P.sample((i + 0.5) / n) == t for i in range(n)) for t in range(4)]
    assert counts == [5000, 3000, 2000, 0]


def test_gumbel_max_has_the_law_and_depends_on_seed_and_position_only() -> None:
    n = 5000
    for draws in ([P.gumbel_max(1, i) for i in range(n)], [P.gumbel_max(i, 1) for i in range(n)]):
        counts = np.bincount(draws, minlength=4)
        assert counts[3] == 0
        assert stats.chisquare(counts[:3], n * P.probs).pvalue > 0.001
        assert stats.chisquare(counts[:3], n * np.array([0.45, 0.35, 0.2])).pvalue < 1e-6  # a negative control
    assert [P.gumbel_max(1, i) for i in range(50)] == [P.gumbel_max(1, i) for i in range(50)]


def test_gumbel_max_keeps_its_token_when_an_other_one_is_taken_away() -> None:
    """The noise belongs to the token, not to its place in the array: what makes coupling work."""
    for i in range(200):
        token = P.gumbel_max(2, i)
        rest = P.without((token + 1) % 3)
        assert rest is not None
        assert rest.gumbel_max(2, i) == token


def test_large_distributions_do_as_small_ones() -> None:
    rng = np.random.default_rng(0)
    p, q = (Dist.dense(rng.exponential(size=5000) * (rng.random(5000) < 0.9)) for _ in range(2))
    dense_p, dense_q = np.array(dense(p, 5000)), np.array(dense(q, 5000))
    left = np.maximum(dense_p - dense_q, 0)
    assert np.array(dense(p.residual(q), 5000)) == pytest.approx(left / left.sum(), abs=1e-15)
    assert np.array(dense(p.residual(Dist.point(7)), 5000))[7] == 0
    assert p.probs_of(np.array([4999] * 2000 + [10**6])).tolist() == [dense_p[4999]] * 2000 + [0.0]
    edges = np.cumsum(dense_p)
    for u in (0.0, 0.2, 0.5, 0.999, 1 - 2**-53):
        token = p.sample(u)
        assert edges[token] - dense_p[token] - 1e-12 <= u <= edges[token] + 1e-12
    for i in range(20):
        noise = gumbel(3, i, p.ids)
        assert p.gumbel_max(3, i) == p.ids[np.argmax(np.log(p.probs) + noise)]
    assert p.without(int(p.ids[9])).prob(int(p.ids[9])) == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("token", [0, 2, 5])
def test_a_certain_choice_without_arrays_is_the_distribution_of_one_token(token: int) -> None:
    """``Dist.point`` answers by itself what a distribution with arrays looks up: the law must be the same."""
    point, plain = Dist.point(token), Dist(np.array([token], dtype=np.int64), np.ones(1))
    wide = Dist.dense(np.array([0.4, 0.1, 0.3, 0.0, 0.0, 0.2]))
    assert (point.ids.tolist(), point.probs.tolist(), point.certain) == ([token], [1.0], True)
    assert point.ids.dtype == np.int64
    for other in range(7):
        assert point.prob(other) == plain.prob(other) == (other == token)
        rest, same = point.without(other), plain.without(other)
        assert (rest is None) == (same is None) == (other == token)
        assert rest is None or rest is point
    for u in (0.0, 0.5, 1 - 2**-53):
        assert point.sample(u) == plain.sample(u) == token
    assert point.gumbel_max(7, 3) == plain.gumbel_max(7, 3) == token
    assert dense(point, 6) == dense(plain, 6)
    for one, two in ((point, plain), (plain, point)):
        assert dense(wide.residual(one), 6) == dense(wide.residual(two), 6)
        assert dense(one.residual(wide), 6) == dense(two.residual(wide), 6)
        assert one.residual(two) is one
