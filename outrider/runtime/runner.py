"""The runner: one model with its KV pool, executing spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.blocks import Copy
from outrider.core.types import ForwardOut, Span
from outrider.models.decoder import Decoder
from outrider.ops.contract import LayerStack
from outrider.runtime.batch import build_batch
from outrider.runtime.pool import KVPool, pick_kv_dtype

Number = TypeVar("Number", bound=np.generic)


class Runner:
    """Executes forward passes of ``decoder`` over a pool of ``n_blocks`` blocks, its KV as ``kv_cache_dtype`` says.

    Target and draft model each have a runner. Both use the sequence's block ids, every one in its own pool.
    """

    def __init__(self, decoder: Decoder, n_blocks: int, block_size: int, kv_cache_dtype: str = "auto") -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        dtype = pick_kv_dtype(kv_cache_dtype, decoder.kv_dtype)
        self.pool = KVPool(decoder.config, n_blocks, block_size, dtype, decoder.device)
        self._stacks: dict[tuple[int, ...], tuple[LayerStack, ...]] = {}  # by feature layers

    def forward(self, spans: Sequence[Span], feature_layers: tuple[int, ...] = ()) -> ForwardOut:
        """One pass over all spans; KV of every row is written. Logits as ``build_batch`` says, span by span."""
        batch = build_batch(spans, self.block_size)
        if feature_layers not in self._stacks:
            self._stacks[feature_layers] = self.decoder.stacks(self.pool.layers, feature_layers)
        return self.decoder.run(batch, self._stacks[feature_layers], feature_layers)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.pool.copy_blocks(copies)

    def keep_path(self, spans: Sequence[Span], paths: Sequence[Sequence[int]]) -> None:
        """Moves the KV of each span's accepted draft nodes together, behind its committed rows."""
        src: list[int] = []
        dst: list[int] = []
        for span, path in zip(spans, paths, strict=True):
            for i, node in enumerate(path):
                if i != node:
                    src.append(self._slot(span, span.end + node))
                    dst.append(self._slot(span, span.end + i))
        self.pool.move(src, dst)

    def slot_kv(self, span: Span, slot: int) -> list[torch.Tensor]:
        """All that is stored of one logical slot, layer by layer (``LayerKV.parts``): for tests and diagnosis."""
        at = self._slot(span, slot)
        return [kv[:, at] for layer in self.pool.layers for kv in layer.parts]

    def _slot(self, span: Span, slot: int) -> int:
        return span.seq.blocks[slot // self.block_size] * self.block_size + slot % self.block_size


def logit_parts(spans: Sequence[Span]) -> list[slice]:
    """Which of the logit rows [M] of a pass belong to each span. Asked before its tokens are appended."""
    parts = []
    first = 0
    for span in spans:
        last = first + span.n_logit_rows
        parts.append(slice(first, last))
        first = last
    return parts


def rows_by_span(spans: Sequence[Span], all_rows: NDArray[Number]) -> list[NDArray[Number]]:
    """The logits, or what else a pass gives for each of its logit rows [M,...], that belong to each span."""
    return [all_rows[part] for part in logit_parts(spans)]
