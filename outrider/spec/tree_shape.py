"""Static draft trees: their description in settings, and the shape that pays most for what was measured.

A node is its path of ranks: for each depth, the place of its token among its siblings, the likeliest first (or the
first one drawn). A shape is a list of paths in order of preference, parents and better siblings first, so that any
first ones of it are a shape again.

Sources: Chen et al., "Sequoia", 2024 (arXiv 2402.12374), for trees of most expected accepted tokens and their size by
the hardware; Wang et al., "OPT-Tree", 2024 (arXiv 2406.17276): the nodes of the greatest path products are that tree.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from outrider.core.config import MAX_DRAFT
from outrider.core.errors import SettingError

Ranks = tuple[int, ...]
"""A node of a tree, as the ranks on the way to it."""

Acceptance = Sequence[Sequence[float]]
"""``[depth][rank]``: how often the child of this rank is accepted, given that its parent was (depth 0: the root)."""

WIDEST = 64
"""Ranks that are looked at."""


def read_paths(given: str, name: str) -> tuple[Ranks, ...]:
    """The paths of a JSON list such as ``[[0],[1],[0,0]]``, or of a ``.json`` file that holds it (as it is, or as
    ``draft_tree``), as they are ordered there. Raises SettingError naming the setting ``name``.
    """
    try:
        data = json.loads(Path(given).read_text(encoding="utf-8") if given.endswith(".json") else given)
        data = data["draft_tree"] if isinstance(data, dict) and "draft_tree" in data else data
        paths = tuple(tuple(path) for path in data) if isinstance(data, list) else ()
        good = all(path and all(type(rank) is int and 0 <= rank < WIDEST for rank in path) for path in paths)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        good, paths = False, ()
        if given.endswith(".json"):
            raise SettingError(f"{name} is {given!r}, no file with a tree: {error}") from None
    if not good or not paths or len(set(paths)) < len(paths) or len(paths) > MAX_DRAFT:
        raise SettingError(
            f"{name} is {given!r}; allowed is a JSON list of at most {MAX_DRAFT} different paths of ranks from 0 to "
            f"{WIDEST - 1}, such as [[0],[1],[0,0]]"
        )
    for path in paths:
        if path[:-1] and path[:-1] not in paths:
            raise SettingError(f"{name} has the path {list(path)} without {list(path[:-1])}, its parent")
    return paths


def in_order(paths: Sequence[Ranks], name: str) -> tuple[Ranks, ...]:
    """The same, where parents and better siblings that come too late are put before those that need them.

    Raises SettingError naming the setting ``name`` when a better sibling is missing.
    """
    order: dict[Ranks, None] = {}
    known = frozenset(paths)

    def place(path: Ranks) -> None:
        if path and path not in order:
            place(path[:-1])
            for better in ((*path[:-1], rank) for rank in range(path[-1])):
                if better not in known:
                    raise SettingError(f"{name} has the path {list(path)} without {list(better)}, its better sibling")
                order.setdefault(better)
            order[path] = None

    for path in paths:
        place(path)
    return tuple(order)


def by_widths(widths: Sequence[int]) -> tuple[Ranks, ...]:
    """The tree whose every node has ``widths[depth]`` children, level by level; at most ``MAX_DRAFT`` nodes."""

    def grow() -> Iterator[Ranks]:
        level: list[Ranks] = [()]
        for width in widths:
            level = [(*path, rank) for path in islice(level, MAX_DRAFT) for rank in range(width)]
            yield from level

    return tuple(islice(grow(), MAX_DRAFT))


def child_counts(paths: Sequence[Ranks]) -> Mapping[Ranks, int]:
    """How many children each node has that has any; the root is ()."""
    counts: dict[Ranks, int] = {}
    for path in paths:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    return counts


def levels(paths: Sequence[Ranks]) -> list[int]:
    """Nodes by depth."""
    counts = [0] * max(map(len, paths), default=0)
    for path in paths:
        counts[len(path) - 1] += 1
    return counts


def monotone(acceptance: Acceptance) -> list[list[float]]:
    """The same, where no rank is better than the one before it: what is measured so is noise."""
    rows = []
    for measured in acceptance:
        row: list[float] = []
        for value in measured:
            row.append(min(value, row[-1]) if row else value)
        rows.append(row)
    return rows


def best_paths(acceptance: Acceptance, n: int) -> list[tuple[Ranks, float]]:
    """The tree of at most ``n`` nodes with the most expected accepted tokens, best node first, and each node's share.

    A node is accepted with the product of the acceptances on its path, which no descendant and no later sibling
    exceeds; so the ``n`` greatest products are a tree, and no other one has a greater sum. Nodes that are never
    accepted are left out.
    """
    table = monotone(acceptance)
    chosen: list[tuple[Ranks, float]] = []
    queue: list[tuple[float, int, Ranks, float]] = []  # by share, then the shallower ones

    def offer(parent: Ranks, share: float, rank: int) -> None:
        depth = len(parent)
        if depth < len(table) and rank < len(table[depth]) and share * table[depth][rank] > 0.0:
            heapq.heappush(queue, (-share * table[depth][rank], depth, (*parent, rank), share))

    offer((), 1.0, 0)
    while queue and len(chosen) < n:
        share, _, path, of_parent = heapq.heappop(queue)
        chosen.append((path, -share))
        offer(path[:-1], of_parent, path[-1] + 1)
        offer(path, -share, 0)
    return chosen


Cost = Callable[[Sequence[int]], float]
"""Seconds of a step with a tree that has so many nodes at each depth; none at all for plain decoding."""


@dataclass(frozen=True)
class Choice:
    """A shape and what it is expected to bring: ``speedup`` is over plain decoding."""

    paths: tuple[Ranks, ...]
    tokens_per_step: float
    speedup: float


def best_shape(acceptance: Acceptance, cost: Cost, max_nodes: int) -> Choice:
    """The tree of 1 to ``max_nodes`` nodes that yields the most tokens a second, over all sizes and depths.

    Raises ValueError when nothing was ever accepted.
    """
    plain = cost([])
    best: Choice | None = None
    for depth in range(1, len(acceptance) + 1):
        nodes = best_paths(acceptance[:depth], max_nodes)
        tokens = 1.0
        for n, (_, share) in enumerate(nodes, 1):
            tokens += share
            paths = tuple(path for path, _ in nodes[:n])
            speedup = tokens * plain / cost(levels(paths))
            if best is None or speedup > best.speedup:
                best = Choice(paths, tokens, speedup)
    if best is None:
        raise ValueError("no draft token was ever accepted")
    return best


def interpolated(table: Mapping[int, float]) -> Callable[[int], float]:
    """Seconds of a pass by its rows, on straight lines between those that were measured, and on the last one beyond."""
    known = sorted(table)

    def seconds(rows: int) -> float:
        if rows in table or len(known) == 1:
            return table.get(rows, table[known[0]])
        above = next((i for i, n in enumerate(known) if n > rows), len(known) - 1)
        low, high = known[max(above, 1) - 1], known[max(above, 1)]
        return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)

    return seconds


def step_cost(target: Mapping[int, float], draft: Mapping[int, float]) -> Cost:
    """The cost of a step from the seconds of a pass by its rows: the draft model makes one pass a level.

    Its first pass reads the tokens that are new since the last draft (taken as two rows), each later one the level
    before; the target's has the newest token and all nodes.
    """
    verify, read = interpolated(target), interpolated(draft)

    def cost(nodes: Sequence[int]) -> float:
        passes = [2, *nodes[:-1]] if nodes else []
        return verify(1 + sum(nodes)) + sum(map(read, passes))

    return cost
