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
        self._best = best
        self._known: dict[int, Dist] = {}
        self._failed: set[int] = set()  # nodes

    def __len__(self) -> int:
        return 1 + len(self._draft)

    @overload
    def __getitem__(self, index: int) -> Dist: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Dist]: ...
    def __getitem__(self, index: int | slice) -> Dist | Sequence[Dist]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._row(index % len(self))

    def _row(self, row: int) -> Dist:
        if row not in self._known:
            drafted = [self._draft.tokens[i] for i in self._draft.path(row - 1)]
            top = -1 if self._best is None else int(self._best[row])
            try:
                self._known[row] = self._sampler.dist_at(self._logits[row], self._history, drafted, top)
            except Exception:
                if not row:
                    raise
                self._known[row] = Dist.point(0)
                self._failed.add(row - 1)
        return self._known[row]

    def settled(self, verdict: Verdict) -> Verdict:
        """The verdict up to a node at which a rule failed: what follows was not drawn from the target's law.

        Plain decoding would fail there as well, with the same tokens before: the next step does.
        """
        for i, node in enumerate(verdict.path):
            if node in self._failed:
                return Verdict(verdict.path[:i], self._draft.tokens[node])
        return verdict
