"""The target's distributions at the nodes of one draft, each computed when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.types import Verdict
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler


def pruned(draft: Draft, sampler: Sampler, history: History) -> Draft:
    """A chain of certain tokens cut where the request's grammar forbids it: what follows would only cost rows.

    Drawn tokens stay: to drop one for its value would change the law of what comes instead.
    """
    whole = len(draft)
    if sampler.grammar is None or not draft.is_chain or draft.n_verify < whole or any(q is not None for q in draft.q):
        return draft
    kept = history.matcher(sampler.grammar).count_allowed(draft.tokens)
    return draft.truncated(kept) if kept or not whole else Draft.nothing("the grammar forbids the draft")


class NodeRows(Sequence[Dist]):
    """Row 0 follows the last committed token, row 1+i follows draft node i with that node's own history.

    Verification looks at few of a tree's nodes, and a row costs a pass over the vocabulary: hence lazy. It may look at
    nodes that do not stay, so a rule that fails at one is no fault of the answer: any row will do (see ``settled``).
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: NDArray[np.floating],
        history: History,
        draft: Draft,
        best: NDArray[np.int64] | None = None,
    ) -> None:
        """``logits`` [1+T,V] and ``best`` [1+T] as of a pass; ``history`` ends with the last committed token."""
        self._sampler = sampler
        self._logits = logits
        self._history = history
        self._draft = draft
        self._best: list[int] | None = None if best is None else best.tolist()
        self._known: list[Dist | None] = [None] * (1 + len(draft))
        self._failed: list[int] = []  # nodes

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Dist: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Dist]: ...
    def __getitem__(self, index: int | slice) -> Dist | Sequence[Dist]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        known = self._known[index]
        if known is None:
            row = index % len(self._known)
            known = self._known[row] = self._row(row)
        return known

    def _row(self, row: int) -> Dist:
        top = -1 if self._best is None else self._best[row]
        try:
            return self._sampler.dist_at(self._logits[row], self._history, self._draft.tokens_to(row - 1), top)
        except Exception:
            if not row:
                raise
            self._failed.append(row - 1)
            return Dist.point(0)

    def settled(self, verdict: Verdict) -> Verdict:
        """The verdict up to a node at which a rule failed: what follows was not drawn from the target's law.

        Plain decoding would fail there as well, with the same tokens before: the next step does.
        """
        for i, node in enumerate(verdict.path if self._failed else ()):
            if node in self._failed:
                return Verdict(verdict.path[:i], self._draft.tokens[node])
        return verdict
