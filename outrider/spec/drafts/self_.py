"""Self-speculation: the target drafts with a part of its own layers, and few weights or none besides.

Sources: leaving after the first layers, through the model's own norm and head, is LayerSkip (Elhoushi et al., 2024);
skipping a set of layers in the middle is Draft & Verify (Zhang et al., 2024). Both are a decoder with fewer layers.
Leaving through a small trained adapter, and stopping where it is unsure, is Kangaroo (Liu et al., 2024).

The draft reads and writes the target's own KV of the layers it runs. That is safe: it writes only slots that are the
sequence's to write in this step, and verification, which runs all layers over the same rows, overwrites each of them
before anybody reads it. So a draft never has to read the prompt, and a step's first pass is always one row.
The adapter's own KV stands under the same block ids, filled from the features of whatever the target computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Batch, Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.models.heads.exit_adapter import ExitAdapter, load_exit_adapter
from outrider.models.load import LoadedModel
from outrider.ops.contract import LayerKV
from outrider.runtime.batch import build_batch
from outrider.runtime.feature_pool import FeaturePool
from outrider.runtime.runner import rows_by_span
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Needs, Proposer


@dataclass(frozen=True)
class SelfSettings:
    """Which layers draft: one of the first two says so. The rest is how they do."""

    exit_layer: int | None = setting(None, "draft with this many first layers, then norm and head", low=1)
    skip_layers: str = setting(
        "", "draft without these layers, such as 12-15,20; or a result file (.json) of 'outrider tune skip-layers'"
    )
    exit_adapter: str = setting(
        "", "a trained adapter between exit_layer and head: a folder, a .safetensors or .bin file, or a hub id"
    )
    draft_sample_method: str = setting(
        "probabilistic", "how draft tokens are chosen when the request samples", choices=("probabilistic", "greedy")
    )
    draft_min_token_prob: float = setting(
        0.0, "how likely the likeliest token must have been for a draft to go on behind it", low=0, high=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.exit_layer is None) == (not self.skip_layers):
            given = "both" if self.skip_layers else "neither"
            raise SettingError(f"drafter self needs either exit_layer or skip_layers; {given} is given")
        if self.exit_adapter and self.exit_layer is None:
            raise SettingError(
                f"exit_adapter is {self.exit_adapter!r}; it is allowed with exit_layer, the layer it was trained for"
            )
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
    """Drafts chains with the layers ``layers`` of ``target``, as long as they are as sure as ``least``."""

    def __init__(
        self, target: LoadedModel, layers: Sequence[int], method: str, sample_method: str, least: float = 0.0
    ) -> None:
        self.target, self.layers, self.least = target, tuple(layers), least
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
        growing = [self._begin(span) for span in spans]
        while active := [g for g in growing if g.wants_more]:
            for g, logits in zip(active, self._forward([g.next_pass() for g in active]), strict=True):
                self._extend(g, logits[0])
        return [Draft.chain(g.tokens, g.q) if g.tokens else Draft.nothing(g.reason) for g in growing]

    def _begin(self, span: Span) -> _Growing:
        if span.n_new > 1:  # their KV is not there yet, and a second reading would cost more than one draft
            return _Growing(span, reason="the prompt is read in this very step")
        return _Growing(span)

    def _forward(self, spans: Sequence[Span]) -> list[NDArray[np.floating]]:
        """One row each: logits [1,V]."""
        out = self.decoder.run(build_batch(spans, self._block_size), self._stacks)
        return rows_by_span(spans, out.logits)

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
        # As published, the unsure token itself stays. Dropping drawn tokens for what they are would change the law.
        if self.least and _confidence(logits[: self.target.n_tokens]) < self.least:
            g.reason = "the draft is not sure enough"

    def _rules_of(self, seq: Seq) -> tuple[Sampler, History]:
        if seq.id not in self._rules:
            params = seq.params
            if self._certain(seq):
                params = replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
            self._rules[seq.id] = Sampler.of(params, self.target), History(seq.tokens, seq.n_prompt)
        return self._rules[seq.id]

    def _certain(self, seq: Seq) -> bool:
        return seq.params.greedy or self._always_certain


class AdaptedExit(SelfDraft):
    """Early exit through ``adapter``, whose KV follows the target's features of the exit layer."""

    def __init__(
        self,
        adapter: ExitAdapter,
        target: LoadedModel,
        layers: Sequence[int],
        method: str,
        sample_method: str,
        least: float = 0.0,
    ) -> None:
        super().__init__(target, layers, method, sample_method, least)
        self.adapter = adapter
        dtype = target.decoder.dtype
        self.needs = Needs(
            feature_layers=(len(self.layers) - 1,),
            kv_bytes_per_token=FeaturePool.bytes_per_token(adapter.config, dtype, width=0),
            weight_bytes=adapter.weight_bytes,
        )
        self._seen: dict[int, NDArray[np.bool_]] = {}  # by sequence: which slots before the newest token have KV

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        super().start(blocks, max_rows)
        decoder = self.target.decoder
        self.pool = FeaturePool(self.adapter.config, blocks, decoder.dtype, decoder.device, width=0)
        kv = self.pool.kv.layers[0]
        for part in kv.parts:
            part.zero_()  # slots that nobody fills are masked, and what is masked must be a number
        self._stack = self.adapter.stack(kv)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.pool.copy_blocks(copies)

    def release(self, seq_id: int) -> None:
        super().release(seq_id)
        self._seen.pop(seq_id, None)

    @torch.inference_mode()
    def observe(self, commits: Sequence[Commit]) -> None:
        """Reads what was computed, of an answer's last step too: its blocks may be found by the next request."""
        spans, states = [], []
        for commit in commits:
            seq, start = commit.seq, commit.span.start
            n = seq.n_computed - start
            if n > 0 and seq.max_draft:
                assert commit.features is not None
                spans.append(Span(seq, start, n))
                states.append(commit.features[:n])
        if not spans:
            return
        batch = build_batch(spans, self._block_size)
        self.adapter.forward(torch.cat(states), batch, self._stack)
        for span in spans:
            self.pool.slots(span.seq, span.end)  # drops notes of what the blocks held before
        self.pool.read[batch.slots] = True

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return super().propose(spans)

    def _begin(self, span: Span) -> _Growing:
        context = self.adapter.config.max_position
        room = context + 1 - len(span.seq)
        if room < 1:
            return _Growing(span, reason=f"the adapter's context of {context} tokens is full")
        return super()._begin(replace(span, budget=min(span.budget, room)))

    def _forward(self, spans: Sequence[Span]) -> list[NDArray[np.floating]]:
        batch = build_batch(spans, self._block_size)
        early = replace(batch, logit_rows=batch.logit_rows[:0])
        states = self.decoder.run(early, self._stacks, self.needs.feature_layers).features
        assert states is not None
        logits = self.adapter.logits(self.adapter.forward(states, self._masked(batch, spans), self._stack))
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return rows_by_span(spans, logits.to("cpu", wide).numpy())

    def _masked(self, batch: Batch, spans: Sequence[Span]) -> Batch:
        """The same rows, one a span, that do not see slots without KV (another drafter's prompt, say)."""
        for span in spans:
            if span.n_new:  # a draft begins
                self._seen[span.seq.id] = self.pool.read[self.pool.slots(span.seq, span.start)]
        seen = [self._seen[span.seq.id] for span in spans]
        if all(s.all() for s in seen):
            return batch
        visible = np.ones((len(spans), -(-max(batch.kv_len) // 64) * 64), dtype=bool)
        for row, s in zip(visible, seen, strict=True):
            row[: len(s)] = s
        return replace(
            batch,
            tail_start=(0,) * len(spans),
            ancestors=np.packbits(visible, axis=1, bitorder="little").view("<i8"),
            tail_positions=tuple(tuple(range(n)) for n in batch.kv_len),
        )


def _confidence(logits: NDArray[np.floating]) -> float:
    """The probability of the likeliest token by ``logits`` [V], before any rule of the request."""
    return float(1.0 / np.exp(logits - logits.max()).sum())


def build(context: DraftContext, settings: SelfSettings) -> Proposer:
    target = context.target
    layers = settings.layers(target.config.n_layers)
    rest = context.spec.rejection_sample_method, settings.draft_sample_method, settings.draft_min_token_prob
    if not settings.exit_adapter:
        return SelfDraft(target, layers, *rest)
    try:
        adapter = load_exit_adapter(settings.exit_adapter, target, len(layers))
    except (SettingError, ModelFileError) as error:
        raise type(error)(f"the exit adapter: {error}") from error
    return AdaptedExit(adapter, target, layers, *rest)
