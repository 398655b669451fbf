"""Medusa: heads on the target's last hidden state guess several positions at once; their best form a static tree.

Source: Cai et al., "Medusa", 2024. The tree's tokens are certain ones: each is accepted with the target's own
probability of it (never by a threshold, which would change the output). It costs the heads, and no pass of a model.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from outrider.core.config import MAX_DRAFT, QUANTIZATIONS
from outrider.core.draft import Draft
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.models.heads.medusa import MedusaHeads, load_medusa
from outrider.models.load import LoadedModel
from outrider.spec.proposer import DraftContext, Needs, Proposer
from outrider.spec.tree_shape import WIDEST, read_paths
from outrider.spec.tree_shape import Ranks as Path


@dataclass(frozen=True)
class MedusaSettings:
    """The heads, and the tree that is made of their guesses."""

    model: str = setting(help="the heads: a folder, a .pt or .safetensors file, or a hub id")
    quantization: str | None = setting(None, "pack the heads' linear weights while loading", choices=QUANTIZATIONS)
    medusa_choices: str = setting(
        "", "the tree as JSON list of paths of ranks, such as [[0],[1],[0,0]]; default: the likeliest paths"
    )

    def __post_init__(self) -> None:
        given: object = self.medusa_choices
        if isinstance(given, (list, tuple)):  # as settings in Python or JSON have it
            object.__setattr__(self, "medusa_choices", json.dumps(given))
        check_settings(self)
        self.paths  # noqa: B018  # checks them

    @property
    def paths(self) -> tuple[Path, ...]:
        """The user's tree level by level; empty for the default one."""
        if not self.medusa_choices:
            return ()
        return tuple(sorted(read_paths(self.medusa_choices, "medusa_choices"), key=lambda path: (len(path), path)))

    @property
    def draft_length(self) -> int | None:
        """Nodes of the user's tree, which is then the draft length; the default tree grows to any length."""
        return len(self.paths) or None


def likely_paths(n_heads: int) -> Iterator[Path]:
    """All paths, the likeliest first, as far as ranks alone tell: a rank lower costs as much as a level deeper.

    Any first paths of it are a tree, parents first.
    """
    queue: list[tuple[int, int, Path]] = [(1, 1, (0,))]
    while queue:
        cost, depth, path = heapq.heappop(queue)
        yield path
        if path[-1] + 1 < WIDEST:
            heapq.heappush(queue, (cost + 1, depth, (*path[:-1], path[-1] + 1)))
        if depth < n_heads:
            heapq.heappush(queue, (cost + 1, depth + 1, (*path, 0)))


class Medusa(Proposer):
    """Keeps the last hidden state of each sequence, and reads the heads off it."""

    def __init__(self, heads: MedusaHeads, target: LoadedModel, paths: Sequence[Path] = ()) -> None:
        deepest = max((len(path) for path in paths), default=0)
        if deepest > heads.n_heads:
            raise SettingError(
                f"medusa_choices has a path of {deepest} ranks; allowed are at most {heads.n_heads}, one for each head"
            )
        self.heads, self.target = heads, target
        self.paths = tuple(paths) or tuple(islice(likely_paths(heads.n_heads), MAX_DRAFT))
        self.needs = Needs(feature_layers=(target.config.n_layers - 1,), weight_bytes=heads.weight_bytes)
        self._last: dict[int, tuple[int, torch.Tensor]] = {}  # by sequence: a position and the hidden state there

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.seq.max_draft and commit.finish is None and commit.rows:
                assert commit.features is not None
                self._last[commit.seq.id] = commit.seq.n_computed - 1, commit.features[-1].clone()

    def release(self, seq_id: int) -> None:
        self._last.pop(seq_id, None)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        ready = [span for span in spans if self._last.get(span.seq.id, (-1,))[0] == len(span.seq) - 2 >= 0]
        trees = {span.seq.id: self.paths[: span.budget] for span in ready}
        guesses = self._guesses(ready, max((len(p) for tree in trees.values() for p in tree), default=0))
        reason = "the target has not read the text before the newest token yet"
        return [
            _tree(trees[span.seq.id], guesses[span.seq.id]) if span.seq.id in trees else Draft.nothing(reason)
            for span in spans
        ]

    def _guesses(self, spans: Sequence[Span], depth: int) -> dict[int, list[list[int]]]:
        """By sequence, the best tokens of each of the first ``depth`` heads."""
        if not spans:
            return {}
        decoder = self.target.decoder
        states = torch.stack([self._last[span.seq.id][1] for span in spans])
        x = decoder.ops.rms_norm(states, decoder.final_norm, decoder.config.norm_eps)
        widths = [1 + max((p[d] for p in self.paths if len(p) > d), default=0) for d in range(depth)]
        best = [self.heads.best(x, head, width, self.target.n_tokens) for head, width in enumerate(widths)]
        return {span.seq.id: [rows[i] for rows in best] for i, span in enumerate(spans)}


def _tree(paths: Sequence[Path], guesses: Sequence[Sequence[int]]) -> Draft:
    """The tree of ``paths``, whose tokens are the ``guesses`` of each depth; ranks that a head lacks are left out."""
    nodes: dict[Path, int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        if path[:-1] in nodes and path[-1] < len(guesses[len(path) - 1]):
            nodes[path] = len(tokens)
            tokens.append(guesses[len(path) - 1][path[-1]])
            parents.append(nodes[path[:-1]])
    return Draft.tree(tokens, parents)


def build(context: DraftContext, settings: MedusaSettings) -> Proposer:
    try:
        heads = load_medusa(settings.model, context.target, settings.quantization)
    except (SettingError, ModelFileError) as error:
        raise type(error)(f"the Medusa heads: {error}") from error
    return Medusa(heads, context.target, settings.paths)
