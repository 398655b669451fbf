"""Self-speculation: the target drafts with a part of its own layers, and no weight of its own.

Sources: leaving after the first layers, through the model's own norm and head, is LayerSkip (Elhoushi et al., 2024);
skipping a set of layers in the middle is Draft & Verify (Zhang et al., 2024). Both are a decoder with fewer layers.

The draft reads and writes the target's own KV of the layers it runs. That is safe: it writes only slots that are the
sequence's to write in this step, and verification, which runs all layers over the same rows, overwrites each of them
before anybody reads it. So a draft never has to read the prompt, and a step's first pass is always one row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.models.load import LoadedModel
from outrider.ops.contract import LayerKV
from outrider.runtime.batch import build_batch
from outrider.runtime.runner import logits_by_span
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Proposer


@dataclass(frozen=True)
class SelfSettings:
    """Which layers draft: one of the first two says so."""

    exit_layer: int | None = setting(None, "draft with this many first layers, then norm and head", low=1)
    skip_layers: str = setting(
        "", "draft without these layers, such as 12-15,20; or a result file (.json) of 'outrider tune skip-layers'"
    )
    draft_sample_method: str = setting(
        "probabilistic", "how draft tokens are chosen when the request samples", choices=("probabilistic", "greedy")
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.exit_layer is None) == (not self.skip_layers):
            given = "both" if self.skip_layers else "neither"
            raise SettingError(f"drafter self needs either exit_layer or skip_layers; {given} is given")
        if not self.skip_layers.endswith(".json"):
            _numbers(self.skip_layers)

    def layers(self, n: int) -> tuple[int, ...]:
        """The layers that draft, of the ``n`` that the target has. Raises SettingError unless that is a true part."""
        if self.exit_layer is not None:
            if self.exit_layer >= n:
                raise SettingError(
                    f"exit_layer is {self.exit_layer}; allowed is 1 to {n - 1}: the model has {n} layers"
                )
            return tuple(range(self.exit_layer))
        skipped = _read(self.skip_layers) if self.skip_layers.endswith(".json") else _numbers(self.skip_layers)
        if not skipped or max(skipped) >= n or len(skipped) >= n:
            raise SettingError(
                f"skip_layers is {self.skip_layers!r}; allowed are some of the layers 0 to {n - 1}, and not all"
            )
        return tuple(layer for layer in range(n) if layer not in skipped)


def _numbers(text: str) -> frozenset[int]:
    """The layers of a text such as ``12-15,20``."""
    layers: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not all(number.isdecimal() and len(number) < 5 for number in (first, last)):
            raise SettingError(f"skip_layers is {text!r}; allowed are layers and ranges of them, such as 12-15,20")
        layers.update(range(int(first), int(last) + 1))
    return frozenset(layers)


def _read(file: str) -> frozenset[int]:
    """The layers that a result file names as the best to skip."""
    try:
        layers = json.loads(Path(file).read_text(encoding="utf-8"))["skip_layers"]
        return _numbers(layers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SettingError(f"skip_layers is {file!r}, no result file of the layer search: {error}") from None


@dataclass
class _Growing:
    """A draft in the making."""

    span: Span
    tokens: list[int] = field(default_factory=list)
    q: list[Dist | None] = field(default_factory=list)
    reason: str = ""

    @property
    def wants_more(self) -> bool:
        return not self.reason and len(self.tokens) < self.span.budget

    def next_pass(self) -> Span:
        """The one row that comes next: the newest token's, or the newest draft token's."""
        seq, n = self.span.seq, len(self.tokens)
        if not n:
            return Span(seq, self.span.start, 1)
        return Span(seq, len(seq), 0, draft=Draft.chain(self.tokens), done=n - 1)


class SelfDraft(Proposer):
    """Drafts chains with the layers ``layers`` of ``target``."""

    def __init__(self, target: LoadedModel, layers: Sequence[int], method: str, sample_method: str) -> None:
        self.target, self.layers = target, tuple(layers)
        self.decoder = target.decoder.with_layers(self.layers)
        self._method = method
        self._always_certain = sample_method == "greedy"
        self._rules: dict[int, tuple[Sampler, History]] = {}

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        self._block_size = blocks.block_size

    def share_kv(self, kv: Sequence[LayerKV]) -> None:
        self._stacks = self.decoder.stacks([kv[layer] for layer in self.layers])

    def release(self, seq_id: int) -> None:
        self._rules.pop(seq_id, None)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        growing = [_Growing(span) for span in spans]
        for g in growing:
            if g.span.n_new > 1:  # their KV is not there yet, and a second reading would cost more than one draft
                g.reason = "the prompt is read in this very step"
        while active := [g for g in growing if g.wants_more]:
            for g, logits in zip(active, self._forward([g.next_pass() for g in active]), strict=True):
                self._extend(g, logits[0])
        return [Draft.chain(g.tokens, g.q) if g.tokens else Draft.nothing(g.reason) for g in growing]

    def _forward(self, spans: Sequence[Span]) -> list[NDArray[np.floating]]:
        """One row each: logits [1,V]."""
        out = self.decoder.run(build_batch(spans, self._block_size), self._stacks)
        return logits_by_span(spans, out.logits)

    def _extend(self, g: _Growing, logits: NDArray[np.floating]) -> None:
        """Adds the next token of a draft, by the request's own rules: the nearer q is to p, the more is accepted."""
        seq = g.span.seq
        sampler, history = self._rules_of(seq)
        try:
            dist = sampler.dist_at(logits, history, g.tokens)
        except Exception:  # the target will meet the same rule, and say so
            g.reason = "a rule of the request cannot be applied to the draft"
            return
        if self._certain(seq):
            g.tokens.append(int(dist.ids[dist.probs.argmax()]))
            g.q.append(None)
        else:
            depth = len(g.tokens) + 1
            pick = draft_pick_for(seq.spec.verification(self._method))
            g.tokens.append(pick(dist, seq.seed, len(seq), depth, depth - 1))
            g.q.append(dist)

    def _rules_of(self, seq: Seq) -> tuple[Sampler, History]:
        if seq.id not in self._rules:
            params = seq.params
            if self._certain(seq):
                params = replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
            self._rules[seq.id] = Sampler.of(params, self.target), History(seq.tokens, seq.n_prompt)
        return self._rules[seq.id]

    def _certain(self, seq: Seq) -> bool:
        return seq.params.greedy or self._always_certain


def build(context: DraftContext, settings: SelfSettings) -> Proposer:
    target = context.target
    layers = settings.layers(target.config.n_layers)
    return SelfDraft(target, layers, context.spec.rejection_sample_method, settings.draft_sample_method)
