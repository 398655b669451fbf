"""A minimal paged runner for tests: scattered blocks, KV that is NaN until written, logits of every row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.draft import Draft
from outrider.core.types import Batch
from outrider.models.decoder import Decoder
from outrider.ops.contract import LayerKV

NOTHING = Draft()


@dataclass(frozen=True)
class Out:
    """``ForwardOut`` with logits as a tensor."""

    logits: torch.Tensor
    features: torch.Tensor | None


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence: new committed tokens, then a draft of which ``done`` nodes are already in the KV."""

    seq: int
    tokens: Sequence[int] = ()
    draft: Draft = NOTHING
    done: int = 0

    def __len__(self) -> int:
        return len(self.tokens) + len(self.draft) - self.done


class Paged:
    def __init__(
        self,
        decoder: Decoder,
        n_seqs: int = 1,
        max_len: int = 160,
        block_size: int = 4,
        in_order: bool = False,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder, self.block_size = decoder, block_size
        per_seq, c = -(-max_len // block_size), decoder.config
        blocks = list(range(per_seq * n_seqs))
        if not in_order:
            random.Random(0).shuffle(blocks)
        self.tables = [blocks[i * per_seq : (i + 1) * per_seq] for i in range(n_seqs)]
        size, kv_dtype = (per_seq * n_seqs * block_size, c.n_kv_heads, c.head_dim), kv_dtype or decoder.dtype
        self.kv = [LayerKV.empty(*size, kv_dtype, "cpu") for _ in range(c.n_layers)]
        for part in (part for kv in self.kv for part in kv.parts):
            part.fill_(torch.nan if part.is_floating_point() else 99)
        self.lengths = [0] * n_seqs

    def batch(self, rows: Sequence[Rows], logit_rows: Sequence[int] | None = None) -> Batch:
        ids, positions, slots, cu_rows, kv_len, tails = [], [], [], [0], [], []
        for r in rows:
            start, end = self.lengths[r.seq], self.lengths[r.seq] + len(r.tokens)
            tail = [end - 1 + depth for depth in r.draft.depths]
            ids += [*r.tokens, *r.draft.tokens[r.done :]]
            positions += [*range(start, end), *tail[r.done :]]
            used = [*range(start, end), *range(end + r.done, end + len(r.draft))]
            table = self.tables[r.seq]
            slots += [table[s // self.block_size] * self.block_size + s % self.block_size for s in used]
            cu_rows.append(cu_rows[-1] + len(r))
            kv_len.append(end + len(r.draft))
            tails.append(tuple(tail))
        ancestors = None
        if not all(r.draft.is_chain for r in rows):
            width = max((len(r.draft) + 63) // 64 for r in rows)
            words = [word for r in rows for word in [[]] * len(r.tokens) + r.draft.ancestor_words()[r.done :]]
            ancestors = np.array([word + [0] * (width - len(word)) for word in words])
        return Batch(
            ids=np.array(ids, np.int64),
            positions=np.array(positions, np.int64),
            slots=np.array(slots, np.int64),
            cu_rows=tuple(cu_rows),
            kv_len=tuple(kv_len),
            block_tables=np.array([self.tables[r.seq] for r in rows]),
            tail_start=tuple(self.lengths[r.seq] + len(r.tokens) for r in rows),
            ancestors=ancestors,
            tail_positions=tuple(tails),
            logit_rows=np.array(range(len(ids)) if logit_rows is None else logit_rows, np.int64),
            block_size=self.block_size,
        )

    def forward(
        self, rows: Sequence[Rows], logit_rows: Sequence[int] | None = None, features: tuple[int, ...] = ()
    ) -> Out:
        out = self.decoder.forward(self.batch(rows, logit_rows), self.kv, features)
        for r in rows:
            self.lengths[r.seq] += len(r.tokens)
        return Out(torch.from_numpy(out.logits), out.features)

    def run(self, *rows: Rows) -> list[torch.Tensor]:
        """Logits of every row, split by sequence; committed tokens stay, drafts do not count."""
        return list(self.forward(rows).logits.split([len(r) for r in rows]))
