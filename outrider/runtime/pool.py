"""The KV pool: the tensors of all layers, cut in blocks that the block manager hands out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cache.blocks import Copy
from outrider.models.config import ModelConfig
from outrider.ops.contract import LayerKV


def pick_kv_dtype(kv_cache_dtype: str, auto: torch.dtype) -> torch.dtype:
    """The type that a ``kv_cache_dtype`` means for a model whose KV is stored as ``auto`` unless told otherwise."""
    kind: torch.dtype = auto if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
    return kind


class KVPool:
    """KV of ``n_blocks`` blocks for every layer of one model; ``dtype`` int8 stands for codes with their scales.

    Left as it comes, since nothing is read before it is written: main memory is then taken page by page, as it is used.
    All layers lie in the same few tensors, so that a slot moves in all of them at once.
    """

    def __init__(
        self, config: ModelConfig, n_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        heads = config.n_layers * config.n_kv_heads
        self._whole = LayerKV.empty(n_blocks * block_size, heads, config.head_dim, dtype, device)
        self.layers = self._whole.split(config.n_layers)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """KV bytes of one token over all layers, scales included."""
        slot = LayerKV.empty(1, config.n_kv_heads, config.head_dim, dtype, "meta")
        return config.n_layers * sum(part.nbytes for part in slot.parts)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copies whole blocks, in order: a later copy may overwrite an earlier one's source."""
        size = self.block_size
        for part in self._whole.parts:
            for c in copies:
                part[:, c.dst * size : (c.dst + 1) * size] = part[:, c.src * size : (c.src + 1) * size]

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Moves the KV of physical slots ``src`` to ``dst``; all are read before any is written."""
        if not src:
            return
        device = self._whole.k.device
        source, target = torch.tensor(src, device=device), torch.tensor(dst, device=device)
        for part in self._whole.parts:
            part.index_copy_(1, target, part.index_select(1, source))
