"""What a drafter that follows the target's features keeps of each token, under the target's block ids."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.types import Sequence
from outrider.models.config import ModelConfig
from outrider.runtime.pool import KVPool

Slots = NDArray[np.int64]


class FeaturePool:
    """Per slot the target's feature [H] of its token, and the draft layers' KV; with a note of which are there.

    Both live and die with the block's content: a shared prefix keeps them, a copied block takes them along, and a block
    that was handed out anew has neither. A slot that nobody filled (another drafter's prompt, say) is simply not there.

    A drafter that computes its KV at once, and needs no feature later, asks for features of no ``width``.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: BlockManager,
        dtype: torch.dtype,
        device: torch.device,
        width: int | None = None,
    ) -> None:
        self.size = blocks.block_size
        self.kv = KVPool(config, blocks.n_blocks, self.size, dtype, device)
        width = config.hidden_size if width is None else width
        self.features = torch.empty(blocks.n_blocks * self.size, width, dtype=dtype, device=device)
        self.known = np.zeros(blocks.n_blocks * self.size, dtype=bool)  # slots that have a feature
        self.read = np.zeros(blocks.n_blocks * self.size, dtype=bool)  # slots that have KV
        self._blocks = blocks
        self._seen = list(blocks.version)  # of each block's content, when the notes were last true

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, width: int | None = None) -> int:
        width = config.hidden_size if width is None else width
        return KVPool.bytes_per_token(config, dtype) + width * dtype.itemsize

    def slots(self, seq: Sequence, stop: int) -> Slots:
        """Physical slots of the first ``stop`` tokens; notes of what their blocks held before are dropped."""
        held = seq.blocks[: self._blocks.blocks_for(stop)]
        for block in held:
            if self._seen[block] != self._blocks.version[block]:
                self._forget(block)
        physical = np.array(held, dtype=np.int64)[:, None] * self.size + np.arange(self.size)
        return physical.reshape(-1)[:stop]

    def put_features(self, slots: Slots, features: torch.Tensor) -> None:
        """Features [N,H] of tokens that the target has just computed: what was known of these slots is past."""
        self.features[torch.from_numpy(slots).to(self.features.device)] = features.to(self.features.dtype)
        self.known[slots], self.read[slots] = True, False

    def copy_blocks(self, copies: Seq[Copy]) -> None:
        """Whole blocks, in order, as the target's pool does."""
        self.kv.copy_blocks(copies)
        for c in copies:
            src, dst = (slice(b * self.size, (b + 1) * self.size) for b in (c.src, c.dst))
            self.features[dst] = self.features[src]
            self.known[dst], self.read[dst] = self.known[src], self.read[src]
            self._seen[c.dst] = self._blocks.version[c.dst]

    def _forget(self, block: int) -> None:
        slots = slice(block * self.size, (block + 1) * self.size)
        self.known[slots] = self.read[slots] = False
        self._seen[block] = self._blocks.version[block]
