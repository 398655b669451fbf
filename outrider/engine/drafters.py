"""The drafters of an engine: which of them serves a request, and calls of theirs that never hurt an answer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.config import MAX_DRAFT
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError, SettingError, nearest
from outrider.core.params import SpecParams
from outrider.core.types import Commit, Sequence, Span
from outrider.engine.metrics import EngineMetrics
from outrider.engine.request import Request
from outrider.ops.contract import LayerKV
from outrider.spec.controller import DraftController
from outrider.spec.proposer import Proposer, select_features

logger = logging.getLogger("outrider")


class Drafters:
    """Proposers by name. One that raises, in whatever it is called for, is off for the requests it was at work on.

    These go on without drafts, and ``EngineMetrics.drafter_failures`` counts the call. ``requests`` is the engine's own
    table, by the id of each sequence that has not ended.
    """

    def __init__(self, vocab_size: int, requests: Mapping[int, Request], metrics: EngineMetrics) -> None:
        self.proposers: dict[str, Proposer] = {}
        self._vocab_size = vocab_size
        self._requests = requests
        self._metrics = metrics
        self._broken: set[str] = set()  # those that could not start

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target layers whose hidden states any of them wants, ascending."""
        return tuple(sorted({layer for each in self.proposers.values() for layer in each.needs.feature_layers}))

    def put(self, name: str, proposer: Proposer, blocks: BlockManager, max_rows: int, kv: Seq[LayerKV]) -> None:
        """Adds a drafter, or puts it in another's place. Raises OutriderError if it says that it cannot start; if it
        fails in any other way no request gets drafts of it."""
        try:
            proposer.start(blocks, max_rows)
            proposer.share_kv(kv)
        except OutriderError:
            raise
        except Exception as error:
            self._broken.add(name)
            self._failed(name, (), error)
        else:
            self._broken.discard(name)
        self.proposers[name] = proposer

    def candidates(self, spec: SpecParams) -> list[str]:
        """Who may serve a request: the one that it names; else, if it predicts its answer, those that make use of that.

        For another request these are not asked: they may live on predictions alone. But the first drafter always is.
        Raises SettingError for a drafter that is not loaded, and a prediction that nobody follows.
        """
        names = list(self.proposers)
        if spec.drafter and spec.drafter not in names:
            raise SettingError(
                f"drafter is {spec.drafter!r}; loaded in this engine are {', '.join(names)}"
                f"{nearest(spec.drafter, names)}; enabled=False switches speculation off"
            )
        users = [name for name in names if self.proposers[name].needs.prediction]
        if spec.drafter:
            found = [spec.drafter]
        elif not spec.enabled:
            found = names[:1]
        elif spec.prediction and users:
            found = users
        else:
            found = [name for name in names if name == names[0] or name not in users]
        if spec.prediction and spec.enabled and not any(name in users for name in found):
            raise SettingError(f"prediction is given; drafter {found[0]} makes no use of it")
        return found

    def assign(self, request: Request, controller: DraftController) -> None:
        """Gives a request its drafter, the controller's choice among the candidates, unless it has one already."""
        if request.drafter:
            return
        seq = request.answers[0].seq
        names = self.candidates(seq.spec)
        names = [name for name in names if name not in self._broken] or names
        name = names[0] if seq.spec.drafter or not seq.spec.enabled else controller.choose(seq.params, names)
        request.drafter, request.drafter_failed = name, name in self._broken
        cap = 0 if request.drafter_failed else _max_draft(seq.spec, self.proposers[name])
        for answer in request.answers:
            answer.seq.spec = replace(answer.seq.spec, drafter=name)
            answer.seq.max_draft = cap

    def copy_blocks(self, copies: Seq[Copy]) -> None:
        for name, proposer in self.proposers.items():
            try:
                proposer.copy_blocks(copies)
            except Exception as error:
                self._failed(name, {each for each in self._requests.values() if self._serves(name, each)}, error)

    def propose(self, spans: Seq[Span], cut: Callable[[Span, Draft], Draft]) -> dict[str, float]:
        """Fills in the drafts as ``cut`` leaves them, in one batched call a drafter; returns the seconds of each."""
        seconds: dict[str, float] = {}
        for name in self.proposers:
            own = [span for span in spans if span.budget and self._requests[span.seq.id].drafter == name]
            if not own:
                continue
            begin = time.perf_counter()
            for span, draft in zip(own, self._drafts(name, own, cut), strict=True):
                span.draft = draft
            seconds[name] = time.perf_counter() - begin
        return seconds

    def observe(self, commits: Seq[Commit], given: Seq[int]) -> None:
        """Hands each drafter what its own requests got; ``given`` are the layers that the features are of."""
        for name, proposer in self.proposers.items():
            own = [commit for commit in commits if self._serves(name, self._requests[commit.span.seq.id])]
            if own:
                try:
                    proposer.observe(select_features(own, given, proposer.needs.feature_layers))
                except Exception as error:
                    self._failed(name, {self._requests[commit.seq.id] for commit in own}, error)

    def release(self, seq: Sequence) -> None:
        """The sequence ended or lost its KV."""
        self._release(self._requests[seq.id], seq)

    def _release(self, request: Request, seq: Sequence) -> None:
        if request.drafter:
            try:
                self.proposers[request.drafter].release(seq.id)
            except Exception as error:
                self._failed(request.drafter, [request], error)

    def _drafts(self, name: str, spans: Seq[Span], cut: Callable[[Span, Draft], Draft]) -> list[Draft]:
        """What a drafter proposes, within the budgets and as ``cut`` leaves it."""
        try:
            drafts = self.proposers[name].propose(spans)
            if len(drafts) != len(spans):
                raise ValueError(f"{len(drafts)} drafts for {len(spans)} sequences")
            for draft in drafts:
                self._check(draft)
            return [cut(span, draft.truncated(span.budget)) for span, draft in zip(spans, drafts, strict=True)]
        except Exception as error:
            self._failed(name, {self._requests[span.seq.id] for span in spans}, error)
            return [Draft.nothing("the drafter failed") for _ in spans]

    def _check(self, draft: Draft) -> None:
        """Raises ValueError for what would break the step of all, or the answer, later on."""
        size = self._vocab_size
        for token, q in zip(draft.tokens, draft.q, strict=True):
            if not 0 <= token < size:
                raise ValueError(f"token id {token}, where 0 to {size - 1} are allowed")
            if q is not None and not q.prob(token) > 0.0:
                raise ValueError(f"token id {token}, which its own q gives no probability")
        if draft.confidence is not None and len(draft.confidence) != len(draft):
            raise ValueError(f"confidence in {len(draft.confidence)} tokens of {len(draft)}")
        if not all(map(math.isfinite, draft.confidence or ())):
            raise ValueError(f"confidence {draft.confidence}, where numbers are allowed")

    def _serves(self, name: str, request: Request) -> bool:
        return request.drafter == name and not request.drafter_failed

    def _failed(self, name: str, requests: Iterable[Request], error: Exception) -> None:
        """A call of a drafter on behalf of ``requests`` raised ``error``."""
        level = logging.DEBUG if name in self._metrics.drafter_failures else logging.WARNING  # once is enough
        logger.log(level, "drafter %s failed: %s", name, error, exc_info=error)
        self._metrics.drafter_failures[name] += 1
        hit = [request for request in requests if not request.drafter_failed]
        for request in hit:
            request.drafter_failed = True
        for request in hit:
            for answer in request.answers:
                answer.seq.max_draft = 0
                self._release(request, answer.seq)


def _max_draft(spec: SpecParams, proposer: Proposer) -> int:
    """The cap on draft rows a step that request and drafter set together."""
    if not spec.enabled:
        return 0
    return min(cap for cap in (spec.max_draft, proposer.needs.max_nodes, MAX_DRAFT) if cap is not None)
