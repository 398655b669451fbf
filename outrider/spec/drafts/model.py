"""Two models: a smaller one drafts, token by token or as a tree.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al., 2023. Trees of
sampled tokens: Miao et al., "SpecInfer", 2024. The draft model keeps its own KV; of which text, and under which block
ids, is said in ``spec.reading``: with another tokenizer than the target's it reads and drafts in common tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.config import DTYPES, KV_CACHE_DTYPES, MAX_DRAFT, QUANTIZATIONS
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.models.load import LoadedModel, load_model
from outrider.ops.reference import ReferenceOps
from outrider.runtime.pool import KVPool, pick_kv_dtype
from outrider.runtime.runner import Runner, rows_by_span
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Needs, Proposer
from outrider.spec.reading import reading_for
from outrider.spec.tree_shape import Ranks, by_widths, child_counts, in_order, read_paths


@dataclass(frozen=True)
class ModelSettings:
    """The draft model, and the shape of its drafts."""

    model: str = setting(help="the draft model: a folder, hub id, or .gguf file")
    dtype: str = setting("auto", "precision of the draft model", choices=DTYPES)
    quantization: str | None = setting(
        None, "pack the draft model's linear weights while loading", choices=QUANTIZATIONS
    )
    max_model_len: int | None = setting(None, "longest text the draft model reads; default: its context", low=2)
    kv_cache_dtype: str | None = setting(
        None, "how the draft model's keys and values are stored; default: as the target's", choices=KV_CACHE_DTYPES
    )
    draft_sample_method: str = setting(
        "probabilistic", "how draft tokens are chosen when the request samples", choices=("probabilistic", "greedy")
    )
    draft_tree: str = setting(
        "",
        "children of a node by depth, such as 3,2,1; or paths of ranks as JSON, best first; or a result file (.json) "
        "of 'outrider tune tree'; it sets the draft length too; default: a chain",
    )
    use_heterogeneous_vocab: bool = setting(
        False, "the draft model may have another tokenizer: it drafts the tokens that both have"
    )

    def __post_init__(self) -> None:
        given: object = self.draft_tree
        if isinstance(given, (list, tuple)):  # as settings in Python or JSON have it
            object.__setattr__(self, "draft_tree", json.dumps(given))
        check_settings(self)
        self.paths  # noqa: B018  # checks them

    @property
    def paths(self) -> tuple[Ranks, ...]:
        """The nodes of the tree in order of preference; a chain of any length by default."""
        text = self.draft_tree.strip()
        if not text:
            return by_widths([1] * MAX_DRAFT)
        if text.startswith("[") or text.endswith(".json"):
            return in_order(read_paths(text, "draft_tree"), "draft_tree")
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in parts):
            raise SettingError(
                f"draft_tree is {self.draft_tree!r}; allowed are whole numbers from 1 to 64 with commas, as in 3,2,1, "
                "or a JSON list of paths such as [[0],[1],[0,0]]"
            )
        return by_widths([int(part) for part in parts])

    @property
    def draft_length(self) -> int | None:
        """Nodes of the whole tree, which is then the draft length unless another is asked for; None for a chain."""
        return len(self.paths) if self.draft_tree.strip() else None


@dataclass
class _Follower:
    """How far the draft model's KV of one sequence can be trusted."""

    text: Seq  # what the draft model reads of it
    valid: int  # tokens whose KV is right
    sampler: Sampler
    history: History
    tail: list[int] = field(default_factory=list)  # draft tokens whose KV stands behind these

    def catch_up(self, same: int) -> None:
        """Counts the draft tokens that were accepted: their KV is right, being computed after the same tokens.

        ``same`` first tokens of the text are as they were when these were drafted.
        """
        tokens = self.text.tokens
        if same < self.valid:
            self.valid, self.tail = same, []
        for token in self.tail:
            if self.valid >= len(tokens) - 1 or tokens[self.valid] != token:
                break
            self.valid += 1
        self.valid = max(0, min(self.valid, len(tokens) - 1))  # the newest token's logits are wanted, maybe again
        self.tail = []


@dataclass
class _Growing:
    """A draft in the making. Nodes come level by level, so that keeping the first ones never cuts by value."""

    span: Span
    widths: Mapping[Ranks, int] = field(default_factory=dict)  # children of each node, as far as the budget goes
    reason: str = ""  # why it grows no further, if something is in the way
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[Dist | None] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)
    level: range = range(-1, 0)  # the nodes whose children come next
    done: int = 0  # nodes whose KV is written

    def draft(self) -> Draft:
        return Draft.tree(self.tokens, self.parents, self.q) if self.tokens else Draft.nothing(self.reason)

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child down to ``node``; none for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def width(self, node: int) -> int:
        """How many children ``node`` is to have."""
        return self.widths.get(self.ranks[node] if node >= 0 else (), 0)


class TwoModels(Proposer):
    """Drafts with ``drafter``; with several children a node they are drawn without replacement, q renormalised."""

    def __init__(self, drafter: LoadedModel, target: LoadedModel, method: str, settings: ModelSettings) -> None:
        self.reading = reading_for(drafter, target, settings.use_heterogeneous_vocab)
        self.drafter, self.target, self.settings = drafter, target, settings
        self.max_len = min(settings.max_model_len or drafter.config.max_position, drafter.config.max_position)
        decoder = drafter.decoder
        self._kv_cache_dtype = settings.kv_cache_dtype or "auto"
        kv_bytes = KVPool.bytes_per_token(drafter.config, pick_kv_dtype(self._kv_cache_dtype, decoder.kv_dtype))
        self.needs = Needs(kv_bytes_per_token=kv_bytes, weight_bytes=decoder.weight_bytes)
        self._method = method
        self._paths = settings.paths
        self._widest = max(child_counts(self._paths).values())
        self._trees: dict[int, Mapping[Ranks, int]] = {}  # by budget
        self._followers: dict[int, _Follower] = {}
        self._filled: dict[int, int] = {}  # block -> version of its content when this model's KV of it was complete

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        self._blocks, self._max_rows = self.reading.start(blocks), max_rows
        self.runner = Runner(self.drafter.decoder, blocks.n_blocks, blocks.block_size, self._kv_cache_dtype)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        if self.reading.same_blocks:
            self.runner.copy_blocks(copies)

    def release(self, seq_id: int) -> None:
        self._followers.pop(seq_id, None)
        self.reading.release(seq_id)

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        growing = [self._begin(span) for span in spans]
        active, logits = self._read([g for g in growing if not g.reason])
        while active:
            for g, rows in zip(active, logits, strict=True):
                self._add_level(g, rows)
            active = [g for g in active if self._wants_more(g)]
            logits = self._score(active)
        for g in growing:
            self._remember_tail(g)
        return [g.draft() for g in growing]

    def _begin(self, span: Span) -> _Growing:
        seq = span.seq
        text, same = self.reading.read(seq)
        if seq.id not in self._followers:
            self._followers[seq.id] = _Follower(
                text, self._known_prefix(text), self._sampler(seq), History(seq.tokens, seq.n_prompt)
            )
        follower = self._followers[seq.id]
        before = min(same, follower.valid)
        follower.catch_up(same)
        self._note_filled(text, before, follower.valid)
        if len(text) > self.max_len:
            return _Growing(span, reason=f"the draft model's context of {self.max_len} tokens is full")
        if not text.tokens:
            return _Growing(span, reason="the text holds no token that the draft model can read")
        size = self.drafter.config.vocab_size
        if any(token >= size for token in text.tokens[follower.valid :]):  # a control token of the target's, say
            return _Growing(span, reason="the text holds a token that the draft model lacks")
        copies = self.reading.make_room(text, follower.valid, span.budget)
        if copies is None:
            return _Growing(span, reason="no free KV blocks for the draft model")
        if copies:
            self.runner.copy_blocks(copies)
        if span.budget not in self._trees:
            self._trees[span.budget] = child_counts(self._paths[: span.budget])
        return _Growing(span, self._trees[span.budget])

    def _known_prefix(self, seq: Seq) -> int:
        """Tokens at the start of ``seq`` whose blocks this model has already filled, for another sequence perhaps."""
        known = 0
        for block in seq.blocks[: (len(seq) - 1) // self._blocks.block_size]:
            if self._filled.get(block) != self._blocks.version[block]:
                break
            known += self._blocks.block_size
        return known

    def _sampler(self, seq: Seq) -> Sampler:
        """The request's own rules: the nearer q is to p, the more is accepted. A certain pick needs a ranking only."""
        params = seq.params
        if self._certain(seq):
            params = replace(params, temperature=1.0, top_k=self._widest, top_p=1.0, min_p=0.0)
        return Sampler.of(params, self.target)

    def _certain(self, seq: Seq) -> bool:
        return seq.params.greedy or self.settings.draft_sample_method == "greedy"

    def _read(self, growing: Sequence[_Growing]) -> tuple[list[_Growing], list[NDArray[np.floating]]]:
        """Reads what the draft model does not know yet, in one pass of at most ``max_rows`` rows, short gaps first.

        Returns the drafts whose sequences are read to the newest token, and that token's logits [1,V] for each.
        """
        rows = self._max_rows
        chunks = []

        def unread(g: _Growing) -> int:
            follower = self._followers[g.span.seq.id]
            return len(follower.text) - follower.valid

        for g in sorted(growing, key=unread):
            follower = self._followers[g.span.seq.id]
            n = min(unread(g), rows)
            rows -= n
            if n:
                chunks.append(Span(follower.text, follower.valid, n))
            if n < unread(g):
                g.reason = "the draft model is still reading the prompt"
        read: dict[int, NDArray[np.floating]] = {}
        for chunk, logits in zip(chunks, self._forward(chunks) if chunks else [], strict=True):
            self._followers[chunk.seq.id].valid = chunk.end
            self._note_filled(chunk.seq, chunk.start, chunk.end)
            read[chunk.seq.id] = logits
        ready = [g for g in growing if not g.reason]
        return ready, [read[g.span.seq.id] for g in ready]

    def _note_filled(self, seq: Seq, start: int, end: int) -> None:
        size = self._blocks.block_size
        for block in seq.blocks[start // size : end // size]:
            self._filled[block] = self._blocks.version[block]

    def _add_level(self, g: _Growing, logits: NDArray[np.floating]) -> None:
        """Gives each node of the newest level its children; ``logits`` has a row for each of these nodes."""
        seq, follower = g.span.seq, self._followers[g.span.seq.id]
        first = len(g.tokens)
        for node, row in zip(g.level, logits, strict=True):
            path = g.path(node)
            width = g.width(node)
            if not width:
                continue
            try:
                dist = follower.sampler.dist_at(row, follower.history, path)
            except Exception:  # the target will meet the same rule, and say so
                g.reason = "a rule of the request cannot be applied to the draft model"
                break
            own = g.ranks[node] if node >= 0 else ()
            for rank, (token, q) in enumerate(self._children(seq, dist, width, len(path) + 1, len(g.tokens))):
                g.tokens.append(token)
                g.parents.append(node)
                g.q.append(q)
                g.ranks.append((*own, rank))
        g.level = range(first, len(g.tokens))

    def _children(self, seq: Seq, dist: Dist, width: int, depth: int, index: int) -> list[tuple[int, Dist | None]]:
        """Up to ``width`` tokens to follow a node: the likeliest ones, certain, or draws without replacement."""
        if self._certain(seq):
            order = np.argsort(-dist.probs, kind="stable")[:width]
            return [(int(token), None) for token in dist.ids[order]]
        children: list[tuple[int, Dist | None]] = []
        left: Dist | None = dist
        pick = draft_pick_for(seq.spec.verification(self._method))
        while left is not None and len(children) < width:
            token = pick(left, seq.seed, len(seq), depth, index + len(children))
            children.append((token, left))
            left = left.without(token)
        return children

    def _wants_more(self, g: _Growing) -> bool:
        """Whether the newest level gets children: there is budget, and the draft model can read that far."""
        if g.reason or not any(g.width(node) for node in g.level):
            return False
        depth = len(g.path(g.level[0]))
        return len(self._followers[g.span.seq.id].text) + depth <= self.max_len

    def _score(self, active: Sequence[_Growing]) -> list[NDArray[np.floating]]:
        """One pass over the newest level of each draft: logits [nodes,V] for each."""
        if not active:
            return []
        spans = []
        for g in active:
            text = self._followers[g.span.seq.id].text
            draft = Draft.tree(self.reading.ids(g.tokens), g.parents)
            spans.append(Span(text, len(text), 0, draft=draft, done=g.level.start))
        rows = self._forward(spans)
        for g in active:
            g.done = len(g.tokens)
        return rows

    def _forward(self, spans: Sequence[Span]) -> list[NDArray[np.floating]]:
        """Logits of the draft model in the target's vocabulary: columns that it lacks can never be drawn."""
        return rows_by_span(spans, self.reading.columns(self.runner.forward(spans).logits))

    def _remember_tail(self, g: _Growing) -> None:
        """Notes the draft tokens whose KV stands where it will stay if they are accepted: the leading chain."""
        follower = self._followers.get(g.span.seq.id)
        if follower is not None:
            chain = next((i for i in range(g.done) if g.parents[i] != i - 1), g.done)
            follower.tail = self.reading.ids(g.tokens[:chain])


def build(context: DraftContext, settings: ModelSettings) -> Proposer:
    try:
        drafter = load_model(
            settings.model,
            dtype=settings.dtype,
            device=str(context.target.decoder.device),
            quantization=settings.quantization,
            ops="reference" if isinstance(context.target.decoder.ops, ReferenceOps) else context.target.decoder.ops,
            progress=context.progress,
        )
    except (SettingError, ModelFileError) as error:
        raise type(error)(f"the draft model: {error}") from error
    settings = replace(settings, kv_cache_dtype=settings.kv_cache_dtype or context.kv_cache_dtype)
    return TwoModels(drafter, context.target, context.spec.rejection_sample_method, settings)
