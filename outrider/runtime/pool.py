"""The KV pool: one pair of tensors a layer, cut in blocks that the block manager hands out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cache.blocks import Copy
from outrider.models.config import ModelConfig
from outrider.ops.contract import LayerKV


class KVPool:
    """KV of ``n_blocks`` blocks for every layer of one model.

    Left as it comes, since nothing is read before it is written: main memory is then taken page by page, as it is used.
    """

    def __init__(
        self, config: ModelConfig, n_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shape = (n_blocks * block_size, config.n_kv_heads, config.head_dim)
        self.layers = [
            LayerKV(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(config.n_layers)
        ]

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
        """KV bytes of one token over all layers."""
        return 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copies whole blocks, in order: a later copy may overwrite an earlier one's source."""
        size = self.block_size
        for layer in self.layers:
            for kv in (layer.k, layer.v):
                for c in copies:
                    kv[c.dst * size : (c.dst + 1) * size] = kv[c.src * size : (c.src + 1) * size]

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Moves the KV of physical slots ``src`` to ``dst``; all are read before any is written."""
        if not src:
            return
        device = self.layers[0].k.device
        source, target = torch.tensor(src, device=device), torch.tensor(dst, device=device)
        for layer in self.layers:
            for kv in (layer.k, layer.v):
                kv[target] = kv[source]
