"""Who decides how many tokens to draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.params import SamplingParams
from outrider.core.types import Span, StepRecord


@dataclass(frozen=True)
class SpecStatus:
    """What a controller is doing, for people and for metrics.

    ``draft_length`` is the mean budget of the running requests lately; ``survival[i]`` the chance that a draft row i is
    accepted where there is one; ``speedup`` the estimated speed over that of plain decoding. ``changed`` is when
    (``time.perf_counter`` seconds) ``on`` changed last, or None. ``spent`` are the seconds so far for the tokens that
    came out, ``earned`` those that plain decoding would have needed; both 0 where that is not estimated.
    """

    on: bool
    reason: str
    drafter: str
    draft_length: float
    survival: tuple[float, ...] = ()
    speedup: float = 1.0
    changed: float | None = None
    earned: float = 0.0
    spent: float = 0.0


class DraftController(ABC):
    """Decides the draft lengths of a step. It knows sequences by ``Span.seq``, whose ``spec`` names the drafter."""

    @abstractmethod
    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        """Draft rows for each span, at most ``span.budget`` each and ``rows`` together; 0 is a value like any other.

        Where it gives 0 it may say why, by an empty draft with a reason.
        """

    @abstractmethod
    def observe(self, record: StepRecord) -> None:
        """What the last step cost and earned."""

    def trim(self, spans: Sequence[Span]) -> list[int]:
        """How many rows of each proposed draft to submit, from the first on; asked once a step, with all its spans.

        It must not look at a drawn token (one with a ``q``) or at what depends on one: that would change the output.
        """
        return [len(span.draft) for span in spans]

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        """Which of these drafters a new request gets that names none."""
        return drafters[0]

    @property
    def status(self) -> SpecStatus:
        """What it is doing now."""
        return SpecStatus(True, "", "", 0.0)


class FixedLength(DraftController):
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

    @property
    def status(self) -> SpecStatus:
        return SpecStatus(self.gamma > 0, f"the draft length is fixed at {self.gamma}", "", self.gamma)
