"""Static trees: their notation, and that the shape that is found is the best one there is."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.core.errors import SettingError
from outrider.spec.drafts.model import ModelSettings
from outrider.spec.registry import spec_from_mapping
from outrider.spec.tree_shape import (
    Ranks,
    best_paths,
    best_shape,
    by_widths,
    child_counts,
    in_order,
    interpolated,
    levels,
    monotone,
    step_cost,
)
from tests.spec.draft_bench import PROMPT, Bench, logits_after


def table(seed: int, depth: int = 3, width: int = 3) -> list[list[float]]:
    """Acceptances by depth and rank, better ranks first."""
    rng = random.Random(seed)
    return [sorted((rng.random() ** 2 / 1.5 for _ in range(width)), reverse=True) for _ in range(depth)]


def trees(nodes: Sequence[Ranks], n: int) -> list[tuple[Ranks, ...]]:
    """Every tree of ``n`` of the nodes: all sets that hold each member's parent."""
    return [
        chosen
        for chosen in itertools.combinations(nodes, n)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]


def worth(paths: Sequence[Ranks], acceptance: Sequence[Sequence[float]]) -> float:
    total = 0.0
    for path in paths:
        share = 1.0
        for depth, rank in enumerate(path):
            share *= acceptance[depth][rank]
        total += share
    return total


@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_the_same_size_is_better(seed: int) -> None:
    acceptance = table(seed, depth=3, width=2)
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    for n in range(1, 6):
        found = best_paths(acceptance, n)
        assert len(found) == n
        assert sum(share for _, share in found) == pytest.approx(worth([path for path, _ in found], acceptance))
        assert worth([path for path, _ in found], acceptance) == pytest.approx(
            max(worth(tree, acceptance) for tree in trees(nodes, n))
        )


@pytest.mark.parametrize("seed", range(4))
def test_any_beginning_is_a_tree_and_the_best_one_of_its_size(seed: int) -> None:
    acceptance = table(seed)
    found = [path for path, _ in best_paths(acceptance, 12)]
    for n in range(1, 12):
        assert found[:n] == [path for path, _ in best_paths(acceptance, n)]
        assert in_order(found[:n], "x") == tuple(found[:n])


def test_noise_among_the_ranks_is_levelled_and_what_never_happens_is_left_out() -> None:
    assert monotone([[0.5, 0.1, 0.2], [0.0, 0.3]]) == [[0.5, 0.1, 0.1], [0.0, 0.0]]
    assert [path for path, _ in best_paths([[0.5, 0.1, 0.2], [0.0, 0.3]], 9)] == [(0,), (1,), (2,)]
    assert best_paths([[0.0]], 3) == []
    with pytest.raises(ValueError, match="no draft token was ever accepted"):
        best_shape([[0.0, 0.0]], lambda nodes: 1.0, 4)


@pytest.mark.parametrize("seed", range(4))
def test_the_size_and_depth_that_pay_most_are_found(seed: int) -> None:
    """Against every tree there is, where a pass costs more with each row and the draft makes one a level."""
    acceptance = table(seed, depth=3, width=2)
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    for draft in (0.05, 0.3, 1.0):
        cost = step_cost({n: 1 + 0.06 * n for n in range(1, 20)}, {1: draft, 2: draft, 20: draft})
        best = best_shape(acceptance, cost, 6)
        rate = max((1 + worth(tree, acceptance)) / cost(levels(tree)) for n in range(1, 7) for tree in trees(nodes, n))
        assert best.speedup == pytest.approx(rate * cost([]))
        assert best.tokens_per_step == pytest.approx(1 + worth(best.paths, acceptance))


def test_what_a_step_costs() -> None:
    target, draft = {1: 10.0, 4: 13.0, 8: 20.0}, {1: 1.0, 2: 2.0, 4: 3.0}
    cost = step_cost(target, draft)
    assert cost([]) == 10.0
    assert cost([3]) == 13.0 + 2.0
    assert cost([2, 3, 2]) == 20.0 + 2.0 + 2.0 + 2.5
    seconds = interpolated(target)
    assert [seconds(n) for n in (1, 2, 4, 6, 8, 12)] == [10.0, 11.0, 13.0, 16.5, 20.0, 27.0]
    assert interpolated({3: 5.0})(9) == 5.0


def test_a_shape_by_widths_and_its_children() -> None:
    assert by_widths([2, 1]) == ((0,), (1,), (0, 0), (1, 0))
    assert len(by_widths([64, 64, 64])) == 256
    assert by_widths([1] * 256)[-1] == (0,) * 256
    assert child_counts(by_widths([2, 3])) == {(): 2, (0,): 3, (1,): 3}


def test_paths_keep_their_order_as_far_as_a_tree_allows() -> None:
    given = [(0, 0, 0), (1,), (0, 1), (0,), (0, 0), (2,)]
    assert in_order(given, "x") == ((0,), (0, 0), (0, 0, 0), (1,), (0, 1), (2,))
    with pytest.raises(SettingError, match=r"x has the path \[0, 1\] without \[0, 0\], its better sibling"):
        in_order([(0,), (0, 1)], "x")


@pytest.mark.parametrize("budget", range(1, 8))
def test_a_smaller_budget_keeps_the_most_preferred_nodes(budget: int) -> None:
    """Not the first levels: the first paths of the list. Tokens are the draft model's guesses of these ranks."""
    paths = [(0,), (0, 0), (1,), (0, 0, 0), (1, 0), (0, 1), (2,)]
    settings = json.dumps([list(path) for path in paths])
    bench = Bench(draft_tree=settings)
    (draft,) = bench.propose(bench.add(), budget=budget)
    kept = sorted(paths[:budget], key=lambda path: (len(path), path))
    assert len(draft) == budget
    for node, path in enumerate(kept):
        text = list(PROMPT)
        for rank in path:
            text.append(logits_after(text).argsort(descending=True).tolist()[rank])
        assert [draft.tokens[i] for i in draft.path(node)] == text[len(PROMPT) :]


def test_a_tree_is_given_as_a_list_or_a_file_and_sets_the_draft_length(tmp_path: Path) -> None:
    paths = [[0], [0, 0], [1]]
    file, plain = tmp_path / "tree.json", tmp_path / "plain.json"
    file.write_text(json.dumps({"draft_tree": paths, "speedup": 2}))
    plain.write_text(json.dumps(paths))
    for given in (paths, json.dumps(paths), str(file), str(plain)):
        settings = ModelSettings("x", draft_tree=given)  # type: ignore[arg-type]
        assert settings.paths == ((0,), (0, 0), (1,))
        config = spec_from_mapping({"method": "model", "model": "x", "draft_tree": given})
        assert config.num_speculative_tokens == 3
    assert ModelSettings("x").draft_length is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[[0],[0,0", "draft_tree is '\\[\\[0\\],\\[0,0'; allowed is a JSON list"),
        ("[[0],[2]]", "without \\[1\\], its better sibling"),
        ("[[0,0]]", "without \\[0\\], its parent"),
        ("[[64]]", "ranks from 0 to 63"),
        ("none.json", "draft_tree is 'none.json', no file with a tree"),
        ("3;1", "or a JSON list of paths"),
    ],
)
def test_a_tree_that_is_none_is_refused(given: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        ModelSettings("x", draft_tree=given)
