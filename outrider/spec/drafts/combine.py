"""Several drafters in one: the first that has a draft, one that another carries on, or all in one tree.

Each node remembers who proposed it. What a part has really drawn stays as it is: a sampled token keeps its q, is never
united with another and never chosen by its value, so that the drafts stay as honest as the parts' are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.config import MAX_DRAFT
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.ops.contract import LayerKV
from outrider.spec.proposer import DraftContext, Needs, Proposer, select_features

MODES = ("first", "extend", "merge")


@dataclass(frozen=True)
class CombineSettings:
    """The drafters, in order, and what is made of their drafts."""

    combine_parts: tuple[str, ...] = setting(
        ("suffix", "ngram"), "a drafter: its name, or a JSON object with its own settings; the first comes first"
    )
    combine_mode: str = setting(
        "merge",
        "first: the first draft there is; extend: carried on by the parts that look up; merge: all in one tree",
        choices=MODES,
    )

    def __post_init__(self) -> None:
        given = self.combine_parts
        if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or not given:
            raise SettingError(f"combine_parts is {given!r}; allowed is a list of drafters, one at least")
        texts = tuple(part if isinstance(part, str) else _as_json(part) for part in given)
        object.__setattr__(self, "combine_parts", texts)
        check_settings(self)
        for part in self.parts:
            if "rejection_sample_method" in part:
                raise SettingError("rejection_sample_method is set in combine_parts; allowed is one for all of them")

    @property
    def parts(self) -> tuple[Mapping[str, Any], ...]:
        """The settings of each part; its ``num_speculative_tokens``, if given, caps its nodes."""
        return tuple(_part(text) for text in self.combine_parts)


def _as_json(part: object) -> str:
    try:
        return json.dumps(part)
    except (TypeError, ValueError):
        raise SettingError(f"combine_parts holds {part!r}; allowed are drafters' names and their settings") from None


def _part(text: str) -> Mapping[str, Any]:
    if not text.lstrip().startswith(("{", "[")):
        return {"method": text.strip()}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"combine_parts holds {text!r}, which is not valid JSON: {error}") from None
    if not isinstance(values, dict) or "method" not in values:
        raise SettingError(f"combine_parts holds {text}; allowed is a drafter's name, or an object with its 'method'")
    return values


@dataclass(frozen=True)
class Part:
    """One drafter, what its nodes are labelled with, and how many it may propose in a step."""

    name: str
    proposer: Proposer
    limit: int = MAX_DRAFT

    def draft(self, spans: Sequence[Span], budgets: Sequence[int]) -> list[Draft]:
        """Its drafts within ``budgets``, labelled."""
        own = [
            span if span.budget == budget <= self.limit else replace(span, budget=min(budget, self.limit))
            for span, budget in zip(spans, budgets, strict=True)
        ]
        if not own or not self.limit:
            return [Draft() for _ in own]
        drafts = self.proposer.propose(own)
        return [self._labelled(draft, span.budget) for draft, span in zip(drafts, own, strict=True)]

    def carry_on(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        """What it would draft behind ``tokens``."""
        budget = min(budget, self.limit)
        return self._labelled(self.proposer.continue_from(span, tokens, budget), budget)

    def _labelled(self, draft: Draft, budget: int) -> Draft:
        draft = draft.truncated(budget)
        return draft if draft.sources is not None or not draft else replace(draft, sources=(self.name,) * len(draft))


class Combine(Proposer):
    """Asks its parts in order; to the engine it is one drafter."""

    def __init__(self, parts: Sequence[Part], mode: str) -> None:
        self.parts, self.mode = tuple(parts), mode
        needs = [part.proposer.needs for part in parts]
        caps = [
            min(part.limit, MAX_DRAFT if need.max_nodes is None else need.max_nodes)
            for part, need in zip(parts, needs, strict=True)
        ]
        self.needs = Needs(
            max_nodes=min(MAX_DRAFT, max(caps) if mode == "first" else sum(caps)),
            feature_layers=tuple(sorted({layer for need in needs for layer in need.feature_layers})),
            kv_bytes_per_token=sum(need.kv_bytes_per_token for need in needs),
            weight_bytes=sum(need.weight_bytes for need in needs),
            prediction=any(need.prediction for need in needs),
        )

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        drafts = self._merged(spans) if self.mode == "merge" else self._first(spans)
        if self.mode == "extend":
            drafts = [self._extended(span, draft) for span, draft in zip(spans, drafts, strict=True)]
        return drafts

    def continue_from(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        drafts = (part.carry_on(span, tokens, budget) for part in self.parts)
        return next((draft for draft in drafts if draft), Draft.nothing("no part can go on"))

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        for part in self.parts:
            part.proposer.start(blocks, max_rows)

    def share_kv(self, kv: Sequence[LayerKV]) -> None:
        for part in self.parts:
            part.proposer.share_kv(kv)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        for part in self.parts:
            part.proposer.copy_blocks(copies)

    def observe(self, commits: Sequence[Commit]) -> None:
        for part in self.parts:
            wanted = part.proposer.needs.feature_layers
            part.proposer.observe(select_features(commits, self.needs.feature_layers, wanted))

    def release(self, seq_id: int) -> None:
        for part in self.parts:
            part.proposer.release(seq_id)

    def _first(self, spans: Sequence[Span]) -> list[Draft]:
        drafts = [Draft() for _ in spans]
        for part in self.parts:
            missing = [i for i, draft in enumerate(drafts) if not draft]
            own = [spans[i] for i in missing]
            for i, draft in zip(missing, part.draft(own, [span.budget for span in own]), strict=True):
                drafts[i] = draft if draft else Draft.nothing(_reasons(drafts[i], draft))
        return drafts

    def _extended(self, span: Span, draft: Draft) -> Draft:
        """The draft with further nodes, of another part, under the last one of its first path."""
        leaf = -1
        while children := draft.children(leaf):
            leaf = children[0]
        path = [draft.tokens[node] for node in draft.path(leaf)]
        left = span.budget - len(draft)
        for part in self.parts:
            if left and draft.sources and draft.sources[leaf] != part.name:
                more = part.carry_on(span, path, left)
                if more:
                    return unite([draft, more], _in_order, span.budget, [-1, leaf])
        return draft

    def _merged(self, spans: Sequence[Span]) -> list[Draft]:
        budgets = [span.budget for span in spans]
        each = zip(*(part.draft(spans, budgets) for part in self.parts), strict=True)
        return [_all_of(drafts, budget) for drafts, budget in zip(each, budgets, strict=True)]


_Rows = Iterator[tuple[int, int]]
"""Which draft, and which of its nodes, comes next."""


def _in_order(drafts: Sequence[Draft]) -> _Rows:
    return ((i, node) for i, draft in enumerate(drafts) for node in range(draft.n_verify))


def _in_turns(drafts: Sequence[Draft]) -> _Rows:
    longest = max(draft.n_verify for draft in drafts)
    return ((i, node) for node in range(longest) for i, draft in enumerate(drafts) if node < draft.n_verify)


def _likeliest_first(drafts: Sequence[Draft]) -> _Rows:
    """In order of the drafters' confidence; a node counts no more than those it hangs under."""
    rows: list[tuple[float, int, int]] = []
    for i, draft in enumerate(drafts):
        least: list[float] = []
        for node, confidence in enumerate((draft.confidence or ())[: draft.n_verify]):
            parent = draft.parents[node]
            least.append(min(confidence, least[parent]) if parent >= 0 else confidence)
            rows.append((-least[node], node, i))
    return ((i, node) for _, node, i in sorted(rows))


def _best_order(drafts: Sequence[Draft]) -> Callable[[Sequence[Draft]], _Rows]:
    """By confidence if that is known of all, and only of certain tokens: a drawn one is not chosen by its value."""
    known = all(draft.confidence is not None for draft in drafts if draft)
    return _likeliest_first if known and all(q is None for draft in drafts for q in draft.q) else _in_turns


def _all_of(drafts: Sequence[Draft], budget: int) -> Draft:
    """The drafts in one tree; a single one stays as it is."""
    proposed = [draft for draft in drafts if draft]
    return proposed[0] if len(proposed) == 1 else unite(drafts, _best_order(drafts), budget)


def unite(
    drafts: Sequence[Draft],
    order: Callable[[Sequence[Draft]], _Rows],
    budget: int,
    under: Sequence[int] | None = None,
) -> Draft:
    """One tree of at most ``budget`` nodes; draft i hangs under the node ``under[i]`` of the first one (-1 = the root).

    A certain node is united with an earlier one that proposes the same token at the same place, even if that was drawn:
    it is visited before, and what is visited later may depend on it. A drawn node is always kept apart, even behind a
    certain one of the same token: leaving it out for its value would make its q a lie. Where the nodes run out each
    draft keeps a beginning. Probe rows come last; those of the first draft that has any are kept. Where all drafts know
    their confidence, the tree has it too: of united nodes the greatest; under a node of the first draft, times its own.
    """
    prober = next((i for i, draft in enumerate(drafts) if draft.n_verify < len(draft)), None)
    probes = range(drafts[prober].n_verify, len(drafts[prober])) if prober is not None else range(0)
    room = budget - len(probes)
    tokens: list[int] = []
    parents: list[int] = []
    q: list[Dist | None] = []
    sources: list[str] = []
    confidence: list[float] = []
    sure = [_confidence(draft, drafts[0], at) for draft, at in zip(drafts, under or [-1] * len(drafts), strict=True)]
    children: dict[tuple[int, int], int] = {}
    placed: list[dict[int, int]] = [{-1: at} for at in under or [-1] * len(drafts)]

    def append(i: int, node: int, parent: int) -> None:
        draft = drafts[i]
        placed[i][node] = len(tokens)
        tokens.append(draft.tokens[node])
        parents.append(parent)
        q.append(draft.q[node])
        sources.append(draft.sources[node] if draft.sources else "")
        confidence.append(sure[i][node])

    for i, node in order(drafts):
        draft = drafts[i]
        parent = placed[i].get(draft.parents[node])
        if parent is None:  # there was no room for it
            continue
        place = parent, draft.tokens[node]
        same = children.get(place) if draft.q[node] is None else None
        if same is not None:
            placed[i][node] = same
            confidence[same] = max(confidence[same], sure[i][node])
            if draft.sources and draft.sources[node] not in sources[same].split("+"):
                sources[same] += "+" + draft.sources[node]
        elif len(tokens) < room:
            children.setdefault(place, len(tokens))
            append(i, node, parent)
    n_verify = len(tokens)
    if prober is not None:
        for node in probes:
            parent = placed[prober].get(drafts[prober].parents[node])
            if parent is not None:
                append(prober, node, parent)
    reason = "" if tokens else _reasons(*drafts)
    known = tuple(confidence) if all(draft.confidence is not None for draft in drafts if draft) else None
    return Draft(tuple(tokens), tuple(parents), tuple(q), n_verify, known, reason, tuple(sources))


def _confidence(draft: Draft, first: Draft, at: int) -> Sequence[float]:
    """The confidence in each node of a draft that hangs under the node ``at`` of the first one; 0 where unknown."""
    above = first.confidence[at] if at >= 0 and first.confidence is not None else 1.0
    return [above * own for own in draft.confidence or (0.0,) * len(draft)]


def _reasons(*drafts: Draft) -> str:
    """Why none of several drafters proposed anything."""
    return "; ".join(dict.fromkeys(draft.reason for draft in drafts if draft.reason))


def build(context: DraftContext, settings: CombineSettings) -> Proposer:
    limits = [part.get("num_speculative_tokens", MAX_DRAFT) for part in settings.parts]
    parts = [Part(name, proposer, limit) for (name, proposer), limit in zip(context.parts, limits, strict=True)]
    return Combine(parts, settings.combine_mode)
