"""The drafter that never drafts: plain decoding as an ordinary case of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.draft import Draft
from outrider.core.types import Span
from outrider.spec.proposer import DraftContext, Needs, Proposer


@dataclass(frozen=True)
class NoneSettings:
    """It has none."""


class NoDraft(Proposer):
    """Answers every call with empty drafts."""

    needs = Needs(max_nodes=0)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [Draft.nothing() for _ in spans]


def build(context: DraftContext, settings: NoneSettings) -> Proposer:
    return NoDraft()
