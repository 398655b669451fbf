"""Which static tree a draft model should draft: how often its guess of each rank is right, and what a pass costs.

The target decodes alone while the draft model guesses at every token. A node whose ancestors are right is drafted after
the very text that the token has before it; so the ranks of the right tokens, one after the other, say at every place
how far any tree would have come. That is greedy decoding; a request that samples accepts somewhat less.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.engine.engine import Engine
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.ops.contract import LayerKV
from outrider.runtime.runner import Runner
from outrider.spec.proposer import Proposer
from outrider.spec.tree_shape import Choice, best_shape, step_cost

Ranks = list[int | None]
"""Of one answer's tokens: the place of each among the guesses, -1 for none of them, None where there was no guess."""

REPEATS = 5
"""Passes of each size; the fastest counts."""

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter that is a model of its own."""

    drafter: LoadedModel


class Watch(Proposer):
    """Lets ``inner``, which drafts ``width`` guesses at one token, guess at all of them; drafts nothing itself."""

    def __init__(self, inner: Proposer, width: int) -> None:
        self.inner, self.width, self.needs = inner, width, inner.needs
        self.ranks: Ranks = []
        self._guesses: tuple[int, ...] = ()

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        self.inner.start(blocks, max_rows)

    def share_kv(self, kv: Sequence[LayerKV]) -> None:
        self.inner.share_kv(kv)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.inner.copy_blocks(copies)

    def release(self, seq_id: int) -> None:
        self.inner.release(seq_id)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        (draft,), (span,) = self.inner.propose(spans), spans  # one answer at a time
        self._guesses = draft.tokens if span.budget == self.width else ()
        return [Draft.nothing("the drafter is only watched")]

    def observe(self, commits: Sequence[Commit]) -> None:
        self.inner.observe(commits)
        for token in (token for commit in commits for token in commit.new_tokens):
            rank = self._guesses.index(token) if token in self._guesses else -1
            self.ranks.append(rank if self._guesses else None)
        self._guesses = ()


def watch(engine: Engine, name: str, prompt: Sequence[int], width: int, max_tokens: int) -> Ranks:
    """The ranks of a greedy answer to ``prompt``, for the drafter ``name`` of ``engine``."""
    inner = engine.proposers[name]
    watched = Watch(inner, width)
    engine.proposers[name] = watched
    try:
        # Near its end an answer has no room for all guesses.
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens + width)
        engine.run(engine.add_request(prompt, params, SpecParams(drafter=name)))
    finally:
        engine.proposers[name] = inner
    return watched.ranks[:max_tokens]


def acceptance(answers: Sequence[Ranks], depth: int, width: int) -> list[list[float]]:
    """``[depth][rank]``: how often a child of this rank would be accepted where its parent was; see ``tree_shape``.

    Every token is the start of a draft once. Depths that were never reached are left out.
    """
    hits = [[0] * width for _ in range(depth)]
    tries = [0] * depth
    for ranks in answers:
        for start in range(len(ranks)):
            for level, rank in enumerate(ranks[start : start + depth]):
                if rank is None:
                    break
                tries[level] += 1
                if rank < 0:
                    break
                hits[level][rank] += 1
    return [[n / tried for n in row] for row, tried in zip(hits, tries, strict=True) if tried]


def pass_seconds(
    decoder: Decoder, most: int, context: int, kv_cache_dtype: str = "auto"
) -> Iterator[tuple[int, float]]:
    """Rows and the seconds of a pass of so many, up to ``most``: one token and a branching draft after ``context``."""
    size = 16
    n_blocks = -(-(context + most) // size)
    runner = Runner(decoder, n_blocks, size, kv_cache_dtype)
    seq = Seq(0, [0] * context, context, SamplingParams(), SpecParams(), 0, blocks=list(range(n_blocks)))
    runner.forward([Span(seq, 0, context)])
    for rows in sorted({*(n for n in ROWS if n < most), most}):
        draft = Draft.tree([0] * (rows - 1), [(i + 1) // 2 - 1 for i in range(rows - 1)])
        span = Span(seq, context - 1, 1, draft=draft)
        best = float("inf")
        for _ in range(REPEATS):
            begin = time.perf_counter()
            runner.forward([span])
            best = min(best, time.perf_counter() - begin)
        yield rows, best


@dataclass
class Measured:
    """What was measured so far, as the result file has it. Seconds are by rows of a pass."""

    ranks: list[Ranks] = field(default_factory=list)  # by prompt
    target_seconds: dict[int, float] = field(default_factory=dict)
    draft_seconds: dict[int, float] = field(default_factory=dict)

    def best(self, depth: int, width: int, max_nodes: int) -> Choice:
        """The tree that pays most. Raises SettingError when no guess was ever right."""
        cost = step_cost(self.target_seconds, self.draft_seconds)
        try:
            return best_shape(acceptance(self.ranks, depth, width), cost, max_nodes)
        except ValueError as error:
            raise SettingError(f"{error} on these prompts; allowed are prompts where the draft model helps") from None


def write(file: Path, asked: Mapping[str, Any], measured: Measured, best: Choice | None = None) -> None:
    """The result file: what was asked, the best tree once it is known (which the setting reads), and all figures."""
    found: dict[str, Any] = {}
    if best is not None:
        found = {
            "draft_tree": [list(path) for path in best.paths],
            "num_speculative_tokens": len(best.paths),
            "tokens_per_step": round(best.tokens_per_step, 4),
            "speedup": round(best.speedup, 4),
        }
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps({"asked": asked, **found, **asdict(measured)}) + "\n", encoding="utf-8")
    os.replace(part, file)


def read(file: Path, asked: Mapping[str, Any]) -> Measured:
    """What a result file of the same search holds. Raises SettingError for another one, or another file."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        before = dict(result["asked"])
        seconds = [{int(n): float(s) for n, s in result[key].items()} for key in ("target_seconds", "draft_seconds")]
        measured = Measured([list(ranks) for ranks in result["ranks"]], *seconds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(f"{file} is no result file of this search: {error}") from None
    changed = [key for key in asked if before.get(key) != asked[key]]
    if changed:
        key = changed[0]
        raise SettingError(f"{file} was made with {key} {before.get(key)!r}, not {asked[key]!r}: give another file")
    return measured
