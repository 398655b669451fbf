"""Who decides how many tokens to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.core.types import Span, StepRecord


class DraftController(Protocol):
    """Decides the draft lengths of a step."""

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        """Draft rows for each span, at most ``span.budget`` each and ``rows`` together; 0 is a value like any other."""

    def observe(self, record: StepRecord) -> None:
        """What the last step cost and earned."""


class FixedLength:
    """The same draft length for every sequence, as far as there is room."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        lengths = []
        for span in spans:
            lengths.append(min(self.gamma, span.budget, rows))
            rows -= lengths[-1]
        return lengths

    def observe(self, record: StepRecord) -> None:
        """A fixed length learns nothing."""
