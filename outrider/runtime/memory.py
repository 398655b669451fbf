"""The memory plan: how many KV blocks fit, the draft model's KV included."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from outrider.core.config import EngineConfig
from outrider.core.errors import SettingError

MIB = 1024 * 1024


def device_memory(device: torch.device) -> float:
    """Bytes that can still be had on a GPU; the whole memory of a CPU machine (where it can be told)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by item. A block holds the KV of ``block_size`` tokens of the target and of the drafters."""

    n_blocks: int
    block_size: int
    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.n_blocks * self.block_size

    def lines(self) -> list[str]:
        """The plan, item by item, for people."""
        items = {
            "target weights": self.target_weights,
            "draft weights": self.draft_weights,
            "target KV": self.target_kv,
            "draft KV": self.draft_kv,
        }
        lines = [f"{name}: {size / MIB:.1f} MiB" for name, size in items.items()]
        return [*lines, f"KV cache: {self.n_blocks} blocks of {self.block_size} = {self.tokens} tokens"]


def plan_memory(
    config: EngineConfig,
    target_weights: int,
    target_kv: int,
    draft_weights: int,
    draft_kv: int,
    max_model_len: int,
    memory: float = math.inf,
) -> MemoryPlan:
    """Plans the KV cache; ``*_kv`` are bytes per token, ``memory`` what the device can give.

    Raises SettingError when not even one block fits, or when what is asked for is more than the device has.

    Without ``num_kv_blocks`` the cache takes ``kv_cache_mib``, but no more than ``max_num_seqs`` full contexts need.
    """
    size = config.block_size
    per_block = (target_kv + draft_kv) * size
    useful = config.max_num_seqs * (-(-max_model_len // size) + 1)
    n_blocks = config.num_kv_blocks or min(config.kv_cache_mib * MIB // per_block, useful)
    if n_blocks < 1:
        raise SettingError(
            f"kv_cache_mib is {config.kv_cache_mib}; allowed is at least {-(-per_block // MIB)}, the size of one block "
            f"of {size} tokens (target and drafter)"
        )
    needed = n_blocks * per_block
    if needed > memory:
        raise SettingError(
            f"the KV cache of {n_blocks} blocks of {size} tokens needs {needed / MIB:.0f} MiB; this device has "
            f"{memory / MIB:.0f} MiB (num_kv_blocks, kv_cache_mib)"
        )
    kv_tokens = n_blocks * size
    return MemoryPlan(n_blocks, size, target_weights, draft_weights, target_kv * kv_tokens, draft_kv * kv_tokens)
