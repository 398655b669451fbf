"""Draft trees as plain data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.dist import Dist
from outrider.core.draft import Draft


def test_a_chain() -> None:
    d = Draft.chain([5, 6, 7])
    assert d.parents == (-1, 0, 1)
    assert d.depths == (1, 2, 3)
    assert d.q == (None, None, None)
    assert d.n_verify == len(d) == 3
    assert d.is_chain
    assert d.path(2) == [0, 1, 2]
    assert d.path(-1) == []
    assert [d.children(n) for n in (-1, 0, 1, 2)] == [[0], [1], [2], []]


def test_a_chain_is_one_however_its_parents_are_given() -> None:
    parents: Any = [-1, 0, 1]
    d = Draft((5, 6, 7), parents, (None,) * 3)
    assert d.is_chain
    assert d.depths == (1, 2, 3)


def test_a_tree_visits_siblings_in_order_and_hides_probes() -> None:
    d = Draft((1, 2, 3, 4, 5), (-1, -1, 0, 0, -1), (None,) * 5, n_verify=4)
    assert not d.is_chain
    assert d.depths == (1, 1, 2, 2, 1)
    assert d.children(-1) == [0, 1]
    assert d.children(0) == [2, 3]
    assert d.path(3) == [0, 3]


@pytest.mark.parametrize("parents", [(0, -1), (-1, 1), (-1, 2), (-2, 0)])
def test_a_parent_comes_before_its_child(parents: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a parent must come before its child"):
        Draft.tree((1, 2), parents)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="draft of 2 tokens"):
        Draft((1, 2), (-1,), (None, None))
    with pytest.raises(ValueError, match="draft of 1 tokens"):
        Draft.chain([1], [None, None])
    with pytest.raises(ValueError, match="draft of 1 tokens"):
        Draft((1,), (-1,), (None,), n_verify=2)


def test_branches_share_prefixes_and_stop_at_the_budget() -> None:
    d = Draft.branches([[1, 2, 3], [1, 4], [5]], 10)
    assert d.tokens == (1, 2, 3, 4, 5)
    assert d.parents == (-1, 0, 1, 0, -1)
    for budget in range(6):
        assert len(Draft.branches([[1, 2, 3], [1, 4], [5]], budget)) == min(budget, 5)
    cut = Draft.branches([[1, 2, 3], [1, 4]], 2)
    assert (cut.tokens, cut.parents) == ((1, 2), (-1, 0))
    assert len(Draft.branches([], 4)) == 0


def test_truncating_keeps_the_first_nodes_with_all_they_have() -> None:
    q = Dist.point(2)
    d = Draft((1, 2, 3), (-1, 0, 0), (None, q, None), n_verify=2, confidence=(0.9, 0.8, 0.7))
    cut = d.truncated(2)
    assert (cut.tokens, cut.parents, cut.q, cut.n_verify, cut.confidence) == ((1, 2), (-1, 0), (None, q), 2, (0.9, 0.8))
    assert d.truncated(1).n_verify == 1
    assert d.truncated(3) is d
    assert len(d.truncated(0)) == 0
    assert d.truncated(0).is_chain


def test_nothing_says_why() -> None:
    d = Draft.nothing("no match")
    assert (len(d), d.n_verify, d.reason) == (0, 0, "no match")
    assert d == Draft(reason="no match") != Draft.nothing() == Draft()


@given(st.lists(st.integers(-1, 5), max_size=7), st.integers(0, 7))
def test_a_chain_answers_as_any_tree_does(parents: list[int], kept: int) -> None:
    """What is known of a chain without a look at its nodes is what a walk over them says."""
    above = [min(parent, node - 1) for node, parent in enumerate(parents)]
    for shape in (above, list(range(-1, len(above) - 1))):
        n, n_verify = len(shape), min(kept, len(shape))
        d = Draft(tuple(range(10, 10 + n)), tuple(shape), (None,) * n, n_verify)
        paths = [d.path(node) for node in range(-1, n)]
        assert d.is_chain == all(parent == node - 1 for node, parent in enumerate(shape))
        assert d.depths == tuple(len(path) for path in paths[1:])
        for node, path in enumerate(paths, -1):
            assert path == ([*paths[shape[node] + 1], node] if node >= 0 else [])
            assert list(d.tokens_to(node)) == [10 + i for i in path]
            assert d.children(node) == [i for i in range(n_verify) if shape[i] == node]


def test_ancestor_words_hold_a_node_and_its_ancestors() -> None:
    assert Draft.tree((1, 2, 3), (-1, -1, 0)).ancestor_words() == [[0b001], [0b010], [0b101]]
    words = Draft.chain(list(range(130))).ancestor_words()
    assert all(len(row) == 3 for row in words)
    assert words[63] == [-1, 0, 0]  # 64 ones in a signed word
    assert words[62] == [2**63 - 1, 0, 0]
    assert words[64] == [-1, 1, 0]
    assert words[129] == [-1, -1, 3]
