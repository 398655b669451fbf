"""Draft trees: what a drafter proposes, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from outrider.core.dist import Dist


@dataclass(frozen=True)
class Draft:
    """A tree of T proposed tokens; a chain is the tree whose every node has one child.

    ``tokens[i]`` hangs under ``parents[i]`` (-1 = the last committed token); a parent comes before its child, and
    siblings are visited in order of their index. ``q[i]`` is the distribution that ``tokens[i]`` was really drawn
    from, with the earlier siblings removed where it was drawn without replacement; None means the token was certain
    (a point mass). Rows from ``n_verify`` on are probes: the target scores them, verification never accepts them.
    ``confidence`` is the drafter's own guess of each node's chance to be accepted, as far as it can tell.
    ``reason`` says why a drafter that was given a budget proposed nothing. ``sources`` names, per node, who proposed
    it, where several drafters share a draft.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Dist | None, ...] = ()
    n_verify: int = -1
    confidence: tuple[float, ...] | None = None
    reason: str = ""
    sources: tuple[str, ...] | None = None
    depths: tuple[int, ...] = field(init=False)
    is_chain: bool = field(init=False)  # whether every node hangs under the node before it

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.n_verify < 0:
            object.__setattr__(self, "n_verify", n)
        if not n == len(self.parents) == len(self.q) >= self.n_verify:
            raise ValueError(f"draft of {n} tokens has {len(self.parents)} parents, {len(self.q)} q")
        is_chain = tuple(self.parents) == tuple(range(-1, n - 1))
        object.__setattr__(self, "is_chain", is_chain)
        object.__setattr__(self, "depths", tuple(range(1, n + 1)) if is_chain else _depths(self.parents))

    @staticmethod
    def chain(tokens: Sequence[int], q: Sequence[Dist | None] | None = None) -> Draft:
        """Tokens one after the other; without ``q`` each was certain."""
        n = len(tokens)
        return Draft(tuple(tokens), tuple(range(-1, n - 1)), tuple(q) if q is not None else (None,) * n)

    @staticmethod
    def tree(tokens: Sequence[int], parents: Sequence[int], q: Sequence[Dist | None] | None = None) -> Draft:
        """Tokens under their parents; without ``q`` each was certain."""
        return Draft(tuple(tokens), tuple(parents), tuple(q) if q is not None else (None,) * len(tokens))

    @staticmethod
    def branches(paths: Sequence[Sequence[int]], budget: int) -> Draft:
        """Merges certain continuations, best first, into one tree of at most ``budget`` nodes, sharing prefixes."""
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for path in paths:
            node = -1
            for token in path:
                known = children.get((node, token))
                if known is None:
                    if len(tokens) == budget:
                        break
                    known = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = known
        return Draft.tree(tokens, parents)

    def sure(self, confidence: Sequence[float]) -> Draft:
        """The same draft with the drafter's ``confidence`` in each node."""
        return Draft(self.tokens, self.parents, self.q, self.n_verify, tuple(confidence), self.reason, self.sources)

    @staticmethod
    @lru_cache(maxsize=64)
    def nothing(reason: str = "") -> Draft:
        """No proposal, and why."""
        return Draft(reason=reason)

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """The verifiable children of ``node`` (-1 = the last committed token), in order."""
        if self.is_chain:
            return [node + 1] if node + 1 < self.n_verify else []
        return [i for i in range(node + 1, self.n_verify) if self.parents[i] == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``, both included; empty for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def tokens_to(self, node: int) -> Sequence[int]:
        """The tokens on the way to ``node``, its own included: those of ``path``."""
        return self.tokens[: node + 1] if self.is_chain else [self.tokens[i] for i in self.path(node)]

    def truncated(self, budget: int) -> Draft:
        """The first ``budget`` nodes. Keeping a prefix of the rows never depends on the drawn tokens' values."""
        if len(self) <= budget:
            return self
        return Draft(
            self.tokens[:budget],
            self.parents[:budget],
            self.q[:budget],
            min(self.n_verify, budget),
            None if self.confidence is None else self.confidence[:budget],
            self.reason,
            None if self.sources is None else self.sources[:budget],
        )

    def by_source(self, path: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Per source, how many nodes it proposed for verification and how many of them are on ``path``."""
        counts: dict[str, tuple[int, int]] = {}
        if self.sources is None:
            return counts
        for node, source in enumerate(self.sources[: self.n_verify]):
            drafted, accepted = counts.get(source, (0, 0))
            counts[source] = (drafted + 1, accepted + (node in path))
        return counts

    def ancestor_words(self) -> list[list[int]]:
        """Per node, the bit mask of its ancestors and itself over the draft's nodes, in signed 64-bit words."""
        words = (len(self) + 63) // 64
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | (1 << node))
        signed = [[(m >> (64 * w)) & ((1 << 64) - 1) for w in range(words)] for m in masks]
        return [[w - (1 << 64) if w >> 63 else w for w in row] for row in signed]


def _depths(parents: Sequence[int]) -> tuple[int, ...]:
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"draft node {node} has parent {parent}; a parent must come before its child")
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(depths)
