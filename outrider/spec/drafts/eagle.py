"""EAGLE: a small head guesses the target's next features, and so its next tokens; as a chain or a dynamic tree.

Sources: Li et al., "EAGLE", 2024; "EAGLE-2", 2024 (the tree: expand the most confident nodes, then keep the best of
all); "EAGLE-3", 2025. The head's layers keep their own KV under the target's block ids, row p for the token at p and
the target's feature before it; that depends on no later token, so a shared prefix keeps all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.config import QUANTIZATIONS
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import ModelFileError, SettingError
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.models.heads.eagle import EagleHead, attention
from outrider.models.heads.eagle_files import load_eagle
from outrider.models.load import LoadedModel
from outrider.runtime.feature_pool import FeaturePool, Slots
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Needs, Proposer


@dataclass(frozen=True)
class EagleSettings:
    """The head, and the shape of its drafts: ``num_speculative_tokens`` in a chain or in the best part of a tree."""

    model: str = setting(help="the head: a folder, a .safetensors or .bin file, or a hub id")
    quantization: str | None = setting(None, "pack the head's linear weights while loading", choices=QUANTIZATIONS)
    max_model_len: int | None = setting(None, "longest text to draft for; default: the head's context", low=2)
    draft_sample_method: str = setting(
        "probabilistic",
        "how a chain's tokens are chosen when the request samples",
        choices=("probabilistic", "greedy"),
    )
    eagle_topk: int = setting(1, "nodes of each level that get children, as many each; 1 is a chain", low=1, high=64)
    eagle_depth: int = setting(6, "levels of the tree (a chain is as long as the draft length)", low=1, high=64)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Rows of one sequence for the head to read: the positions of their tokens; ``slots`` of all tokens so far."""

    seq: Seq
    slots: Slots
    rows: NDArray[np.int64]


@dataclass(eq=False)
class _Tree:
    """A draft in the making: all nodes that were thought of, those to expand next, and the head's KV on the way."""

    span: Span
    keys: list[tuple[torch.Tensor, torch.Tensor]]  # per layer K and V [kv heads, text + nodes, dim]
    n_text: int  # of these, how many belong to the text
    features: torch.Tensor  # [n,H]: what the newest level's rows gave, to be fed to their children
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[Dist | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log of the head's probability of the whole path
    expanded: list[int] = field(default_factory=lambda: [-1])  # nodes of the newest level, in row order
    ancestors: list[list[int]] = field(default_factory=list)  # per expanded node, its rows behind the text
    row_of: dict[int, int] = field(default_factory=dict)  # expanded node -> its row behind the text
    depth: int = 0

    def path(self, node: int) -> list[int]:
        """The tokens from the root's child down to ``node``."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def add(self, token: int, parent: int, q: Dist | None, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.q.append(q)
        self.scores.append(score)
        return len(self.tokens) - 1

    def best(self, budget: int) -> Draft:
        """The ``budget`` most confident nodes. A child is never more so than its parent, which comes first."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))[:budget]
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        return Draft.tree(
            [self.tokens[node] for node in order],
            [place[self.parents[node]] for node in order],
            [self.q[node] for node in order],
        )


class Eagle(Proposer):
    """Drafts with ``head``. A chain's tokens are draws with an honest q; a tree's are certain."""

    def __init__(self, head: EagleHead, target: LoadedModel, method: str, settings: EagleSettings) -> None:
        self.head, self.target, self.settings = head, target, settings
        self.max_len = min(settings.max_model_len or head.config.max_position, head.config.max_position)
        dtype = target.decoder.dtype
        self.needs = Needs(
            feature_layers=head.feature_layers,
            kv_bytes_per_token=FeaturePool.bytes_per_token(head.config, dtype),
            weight_bytes=head.weight_bytes,
        )
        self._method = method
        self._samplers: dict[int, tuple[Sampler, History]] = {}

    def start(self, blocks: BlockManager, max_rows: int) -> None:
        decoder = self.target.decoder
        self._max_rows = max_rows
        self.pool = FeaturePool(self.head.config, blocks, decoder.dtype, decoder.device)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.pool.copy_blocks(copies)

    def release(self, seq_id: int) -> None:
        self._samplers.pop(seq_id, None)

    @torch.inference_mode()
    def observe(self, commits: Sequence[Commit]) -> None:
        """Keeps the features of what was computed, and reads prompt chunks at once.

        Those of an answer's last step too: the next request may find its blocks.
        """
        chunks = []
        for commit in commits:
            start, stop = commit.span.start, commit.seq.n_computed
            if stop <= start or not commit.seq.max_draft:
                continue
            assert commit.features is not None
            slots = self.pool.slots(commit.seq, stop)
            self.pool.put_features(slots[start:], self.head.feature(commit.features[: stop - start]))
            if commit.span.n_new > 1 and commit.finish is None:
                chunks.append(_Chunk(commit.seq, slots, self._unread(slots, start)))
        self._read([chunk for chunk in chunks if len(chunk.rows)])

    @torch.inference_mode()
    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        chunks: dict[int, _Chunk] = {}
        rows = self._max_rows
        for i, span in enumerate(spans):
            n = len(span.seq)
            slots = self.pool.slots(span.seq, n)
            unread = self._unread(slots, 0)
            if n > self.max_len:
                drafts[i] = Draft.nothing(f"the head's context of {self.max_len} tokens is full")
            elif n < 2 or not self.pool.known[slots[n - 2]]:
                drafts[i] = Draft.nothing("the target has not read the text before the newest token yet")
            elif rows == 0:
                drafts[i] = Draft.nothing("the head has no rows left in this step")
            else:  # the newest token's row is computed anew if it is there: what it gives is wanted
                unread = np.union1d(unread, [n - 1])
                if len(unread) > rows:
                    drafts[i] = Draft.nothing("the head is still reading the text")
                chunks[i] = _Chunk(span.seq, slots, unread[:rows])
                rows -= len(chunks[i].rows)
        outputs = self._read(list(chunks.values()))
        trees: dict[int, _Tree] = {}
        states: dict[int, torch.Tensor] = {}
        for (i, chunk), (features, state) in zip(chunks.items(), outputs, strict=True):
            if i not in drafts:
                trees[i] = self._begin(spans[i], chunk, features[-1:])
                states[i] = state[-1:]
        self._grow(list(trees.values()), list(states.values()))
        drafts |= {i: tree.best(tree.span.budget) for i, tree in trees.items()}
        return [drafts[i] for i in range(len(spans))]

    def _unread(self, slots: Slots, start: int) -> NDArray[np.int64]:
        """Positions from ``start`` on that have no KV although the feature before them is known."""
        waiting = ~self.pool.read[slots]
        waiting[1:] &= self.pool.known[slots[:-1]]
        waiting[: max(start, 1)] = False  # nothing comes before the first token
        return np.flatnonzero(waiting)

    def _read(self, chunks: Sequence[_Chunk]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs the head over rows of text and keeps their KV; per chunk the features and states of its rows."""
        if not chunks:
            return []
        device = self.pool.features.device
        at = _tensor(np.concatenate([chunk.slots[chunk.rows] for chunk in chunks]), device)
        before = _tensor(np.concatenate([chunk.slots[chunk.rows - 1] for chunk in chunks]), device)
        tokens = torch.tensor([chunk.seq.tokens[p] for chunk in chunks for p in chunk.rows], device=device)
        positions = _tensor(np.concatenate([chunk.rows - 1 for chunk in chunks]), device)
        sizes = [len(chunk.rows) for chunk in chunks]
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # per chunk: slots to look at, and which row sees which
        for chunk in chunks:
            self.pool.read[chunk.slots[chunk.rows]] = True
            places = self._visible(chunk.slots[: chunk.rows[-1] + 1])
            visible = places[None] <= chunk.rows[:, None]
            seen.append((_tensor(chunk.slots[places], device), torch.from_numpy(visible).to(device)))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kv = self.pool.kv.layers[layer]
            kv.k[:, at], kv.v[:, at] = k.transpose(0, 1).to(kv.k.dtype), v.transpose(0, 1).to(kv.v.dtype)
            parts = zip(q.split_with_sizes(sizes), seen, strict=True)
            return torch.cat([attention(own, kv.k[:, s], kv.v[:, s], mask) for own, (s, mask) in parts])

        features, states = self.head.forward(self.pool.features[before], tokens, positions, attend)
        return list(zip(features.split_with_sizes(sizes), states.split_with_sizes(sizes), strict=True))

    def _visible(self, slots: Slots) -> NDArray[np.int64]:
        """Positions of a text whose KV is there."""
        there = self.pool.read[slots]
        there[0] = False
        return np.flatnonzero(there)

    def _begin(self, span: Span, chunk: _Chunk, features: torch.Tensor) -> _Tree:
        """A tree without nodes: the text's KV side by side, with room for the nodes'."""
        places = _tensor(chunk.slots[self._visible(chunk.slots)], self.pool.features.device)
        topk = self.settings.eagle_topk
        room = span.budget if topk == 1 else topk * self.settings.eagle_depth
        keys = []
        for kv in self.pool.kv.layers:
            k, v = (part.new_empty(part.shape[0], len(places) + room, part.shape[2]) for part in (kv.k, kv.v))
            k[:, : len(places)], v[:, : len(places)] = kv.k[:, places], kv.v[:, places]
            keys.append((k, v))
        return _Tree(span, keys, len(places), features)

    def _grow(self, trees: list[_Tree], states: list[torch.Tensor]) -> None:
        """Level by level: children of the newest nodes, and a pass over those that are to have children themselves."""
        while trees:
            rows = self.head.logits(torch.cat(states))[:, : self.target.n_tokens].split_with_sizes(
                [len(s) for s in states]
            )
            for tree, logits in zip(trees, rows, strict=True):
                self._add_level(tree, logits)
            trees = [tree for tree in trees if tree.expanded]
            states = self._expand(trees) if trees else []

    def _add_level(self, tree: _Tree, logits: torch.Tensor) -> None:
        """Gives the newest nodes children, and chooses which of these get some in turn."""
        parents, chain = tree.expanded, self.settings.eagle_topk == 1
        tree.depth += 1
        made = [self._next_of_chain(tree, logits)] if chain else self._children(tree, logits)
        made = [node for node in made if node >= 0]
        deepest = tree.span.budget if chain else min(self.settings.eagle_depth, tree.span.budget)
        if tree.depth >= deepest or len(tree.span.seq) + tree.depth > self.max_len:
            made = []
        made.sort(key=lambda node: (-tree.scores[node], node))
        tree.expanded = made[: self.settings.eagle_topk]
        places = [parents.index(tree.parents[node]) for node in tree.expanded]
        tree.features = tree.features[places]

    def _next_of_chain(self, tree: _Tree, logits: torch.Tensor) -> int:
        """The next token, by the request's own rules: the nearer q is to p, the more is accepted. -1: no token."""
        seq, node = tree.span.seq, tree.expanded[0]
        sampler, history = self._sampler(seq)
        wide = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        row = torch.nn.functional.pad(wide, (0, sampler.vocab_size - len(wide)), value=float("-inf")).cpu().numpy()
        try:
            dist = sampler.dist_at(row, history, tree.path(node))
        except Exception:  # the target will meet the same rule, and say so
            return -1
        pick = draft_pick_for(seq.spec.verification(self._method))
        token = pick(dist, seq.seed, len(seq), tree.depth, len(tree.tokens))
        return tree.add(token, node, None if dist.certain else dist, -float(tree.depth))

    def _children(self, tree: _Tree, logits: torch.Tensor) -> list[int]:
        """The likeliest tokens after each of the newest nodes, certain ones."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        values, ids = wide.log_softmax(-1).topk(min(self.settings.eagle_topk, wide.shape[1]), dim=-1)
        made = []
        for node, chances, tokens in zip(tree.expanded, values.tolist(), ids.tolist(), strict=True):
            score = tree.scores[node] if node >= 0 else 0.0
            made += [
                tree.add(token, node, None, score + chance)
                for token, chance in zip(tokens, chances, strict=True)
                if chance > float("-inf")
            ]
        return made

    def _expand(self, trees: Sequence[_Tree]) -> list[torch.Tensor]:
        """One pass of the head over the nodes to expand: per tree the states that its children come from."""
        device = self.pool.features.device
        sizes = [len(tree.expanded) for tree in trees]
        masks, places = [], []
        for tree in trees:
            first = len(tree.row_of)
            places.append(slice(tree.n_text + first, tree.n_text + first + len(tree.expanded)))
            mask = torch.zeros(len(tree.expanded), places[-1].stop, dtype=torch.bool)
            mask[:, : tree.n_text] = True
            for row, node in enumerate(tree.expanded):
                tree.row_of[node] = first + row
                above = node
                while above >= 0:
                    mask[row, tree.n_text + tree.row_of[above]] = True
                    above = tree.parents[above]
            masks.append(mask.to(device))

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            mixed = []
            parts = zip(
                trees,
                places,
                masks,
                q.split_with_sizes(sizes),
                k.split_with_sizes(sizes),
                v.split_with_sizes(sizes),
                strict=True,
            )
            for tree, place, mask, own, key, value in parts:
                keys, values = tree.keys[layer]
                keys[:, place], values[:, place] = key.transpose(0, 1), value.transpose(0, 1)
                mixed.append(attention(own, keys[:, : place.stop], values[:, : place.stop], mask))
            return torch.cat(mixed)

        tokens = torch.tensor([tree.tokens[node] for tree in trees for node in tree.expanded], device=device)
        depths = [len(tree.span.seq) - 2 + tree.depth for tree in trees for _ in tree.expanded]
        positions = torch.tensor(depths, device=device)
        given = torch.cat([tree.features for tree in trees])
        features, states = self.head.forward(given, tokens, positions, attend)
        for tree, own in zip(trees, features.split_with_sizes(sizes), strict=True):
            tree.features = own
        return list(states.split_with_sizes(sizes))

    def _sampler(self, seq: Seq) -> tuple[Sampler, History]:
        if seq.id not in self._samplers:
            params = seq.params
            if params.greedy or self.settings.draft_sample_method == "greedy":
                params = replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
            self._samplers[seq.id] = Sampler.of(params, self.target), History(seq.tokens, seq.n_prompt)
        return self._samplers[seq.id]


def _tensor(values: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


def build(context: DraftContext, settings: EagleSettings) -> Proposer:
    try:
        head = load_eagle(settings.model, context.target, settings.quantization)
    except (SettingError, ModelFileError) as error:
        raise type(error)(f"the EAGLE head: {error}") from error
    return Eagle(head, context.target, context.spec.rejection_sample_method, settings)
