"""What a drafter is. To write one: subclass ``Proposer`` in one file and add one line to ``spec/registry.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.config import SpecConfig
from outrider.core.draft import Draft
from outrider.core.types import Commit, Span
from outrider.models.load import LoadedModel, Progress
from outrider.ops.contract import LayerKV


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the engine.

    ``max_nodes`` caps its draft rows a step (None = no cap); ``feature_layers`` are the target layers whose hidden
    states it wants in ``Commit.features``; ``kv_bytes_per_token`` and ``weight_bytes`` enter the memory plan;
    ``prediction`` says that it makes use of ``SpecParams.prediction``.
    """

    max_nodes: int | None = None
    feature_layers: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    weight_bytes: int = 0
    prediction: bool = False


class Proposer(ABC):
    """A drafter. One instance serves all sequences of an engine; state is kept by sequence id."""

    needs: Needs = Needs()

    @abstractmethod
    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        """One draft a span, in order, of at most ``span.budget`` nodes each.

        Called after scheduling: the KV slots ``span.end .. span.end + span.budget - 1`` are the sequence's to write,
        in the drafter's own pool. A token reported with a ``q`` must have been drawn from that ``q``.
        """

    def continue_from(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        """At most ``budget`` certain nodes that go on where the sequence would be after ``tokens`` more.

        For drafters that look up: it must not change what ``propose`` answers. The others have nothing to say.
        """
        return Draft.nothing("it cannot go on from a draft")

    def start(self, blocks: BlockManager, max_rows: int) -> None:  # noqa: B027
        """Called once, when the number of KV blocks is known; a drafter with own KV uses the same block ids.

        ``max_rows`` is the row budget of a forward pass, for a drafter's own passes too.
        """

    def share_kv(self, kv: Sequence[LayerKV]) -> None:  # noqa: B027
        """Called once, after ``start``: the target's own KV, layer by layer, for a drafter that runs its layers.

        Such a drafter may write here as well: the slots of its spans' committed rows, and those of draft rows that it
        then proposes. Verification overwrites them all before anybody else reads them.
        """

    def copy_blocks(self, copies: Sequence[Copy]) -> None:  # noqa: B027
        """Blocks were copied in the target's pool: do likewise in an own one."""

    def observe(self, commits: Sequence[Commit]) -> None:  # noqa: B027
        """What the step settled, prompt chunks included."""

    def release(self, seq_id: int) -> None:  # noqa: B027
        """The sequence ended or lost its KV: forget what was kept for it."""


def select_features(commits: Sequence[Commit], given: Sequence[int], wanted: Sequence[int]) -> list[Commit]:
    """The commits with the features of the layers ``wanted``, in that order, of those ``given`` in theirs.

    Several drafters share one pass of the target; each is handed what it asked for, and None if that is nothing.
    """

    def of(features: torch.Tensor | None) -> torch.Tensor | None:
        if features is None or not wanted:
            return None
        parts = features.chunk(len(given), dim=1)
        return torch.cat([parts[given.index(layer)] for layer in wanted], dim=1)

    if tuple(given) == tuple(wanted):
        return list(commits)
    return [commit._replace(features=of(commit.features)) for commit in commits]


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from; ``progress`` is for loading a model of its own."""

    target: LoadedModel
    spec: SpecConfig
    kv_cache_dtype: str = "auto"  # how the target's KV is stored
    progress: Progress | None = None
    parts: tuple[tuple[str, Proposer], ...] = ()  # by name, the drafters that its settings' ``parts`` ask for
