"""Verification: which draft tokens stay, and which token follows them. Pure functions; the law is exactly the target's.

p is the target's distribution at a node after every rule of the request, q what the draft token was drawn from.
Every random decision is asked of ``Draws``, so a test can walk through all outcomes with their exact weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.types import Draws, Verdict
from outrider.spec.draws import for_method


def verify(draft: Draft, rows: Sequence[Dist], draws: Draws, method: str) -> Verdict:
    """Decides about one draft. ``rows[0]`` is p after the last committed token, ``rows[1+i]`` p after node i.

    ``method``: ``standard`` (token by token, chains and trees), ``block`` (keeps as much or more of a chain; a tree
    is verified token by token) or ``coupled`` (the target's own token at each node, kept if it was drafted).
    Probe nodes never stay. Raises SettingError for an unknown method, ValueError for a token its own q cannot give.
    """
    return for_method(_RULES, method)(draft, rows, draws)


def verify_greedy(draft: Draft, best: Sequence[int]) -> Verdict:
    """What every method decides where the target always takes one token: ``best[0]`` after the last committed token,
    ``best[1+i]`` after node i."""
    return _follow(draft, lambda node, _: best[node + 1])


def _token_rule(draft: Draft, rows: Sequence[Dist], draws: Draws) -> Verdict:
    """Rejection sampling (Leviathan et al. 2023, Chen et al. 2023), over siblings in order (SpecInfer, 2024).

    A rejected child is taken out of p: max(p - q, 0) if it was drawn, p without it if it was certain.
    """
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        p, depth = rows[node + 1], len(path) + 1
        for index, child in enumerate(draft.children(node)):
            token, q = draft.tokens[child], draft.q[child]
            ratio = p.prob(token) if q is None else p.prob(token) / _drawn_with(draft, child)
            if draws.accept(ratio, depth, index):
                path.append(child)
                break
            p = p.residual(q) if q is not None else p.without(token) or p
        else:
            return Verdict(tuple(path), draws.pick(p, depth))


def _block_rule(draft: Draft, rows: Sequence[Dist], draws: Draws) -> Verdict:
    """Block verification (Sun et al. 2024), whose expected number of kept tokens is at least the token rule's."""
    n = draft.n_verify
    if any(draft.parents[node] != node - 1 for node in range(n)):
        return _token_rule(draft, rows, draws)
    ratios = [1.0]  # r_i after i draft tokens
    for node in range(n):
        r = ratios[-1] * rows[node].prob(draft.tokens[node]) / _drawn_with(draft, node)
        if r == 0.0:  # it cannot stay, nor what follows it: the request's rules need not know such a history
            break
        ratios.append(min(r, 1.0))
    # The longest prefix whose own test passes stays, so test from the longest down.
    for kept in range(len(ratios) - 1, 0, -1):
        r = ratios[kept]
        if kept < n:
            left = float(rows[kept].excess(_q(draft, kept), r).sum())
            h = left / (left + 1.0 - r) if r < 1.0 else 1.0
        else:
            h = r
        if draws.accept(h, kept, 0):
            break
    else:
        kept = 0
    p = rows[kept].residual(_q(draft, kept), ratios[kept]) if kept < n else rows[kept]
    return Verdict(tuple(range(kept)), draws.pick(p, kept + 1))


def _coupled_rule(draft: Draft, rows: Sequence[Dist], draws: Draws) -> Verdict:
    """The target's own token at each node; a child that equals it stays. What comes out never depends on the draft."""
    return _follow(draft, lambda node, depth: draws.pick(rows[node + 1], depth))


def _follow(draft: Draft, own: Callable[[int, int], int]) -> Verdict:
    """Down the tree for as long as the target's ``own`` token after a node (-1 = none), at this depth, is a child."""
    path: list[int] = []
    node = -1
    while True:
        token = own(node, len(path) + 1)
        for child in draft.children(node):
            if draft.tokens[child] == token:
                break
        else:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child


def _q(draft: Draft, node: int) -> Dist:
    return draft.q[node] or Dist.point(draft.tokens[node])


def _drawn_with(draft: Draft, node: int) -> float:
    """The probability with which ``node``'s token was drawn: 1 for a certain one."""
    q, token = draft.q[node], draft.tokens[node]
    prob = 1.0 if q is None else q.prob(token)
    if prob <= 0.0:
        raise ValueError(f"draft node {node} has token {token}, which its own q gives no probability")
    return prob


_Rule = Callable[[Draft, Sequence[Dist], Draws], Verdict]
_RULES: dict[str, _Rule] = {"standard": _token_rule, "block": _block_rule, "coupled": _coupled_rule}
