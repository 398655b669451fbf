"""Compares the KV that a runner holds for a sequence with one fresh pass over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.models.decoder import Decoder
from outrider.runtime.runner import Runner


def fresh_kv(decoder: Decoder, tokens: Sequence[int], kv_cache_dtype: str = "auto") -> list[list[torch.Tensor]]:
    """What is stored of every slot after one pass over ``tokens`` in a pool of its own."""
    runner = Runner(decoder, 1, len(tokens), kv_cache_dtype)
    seq = Seq(0, list(tokens), len(tokens), SamplingParams(), SpecParams(), 0, blocks=[0])
    span = Span(seq, 0, len(tokens))
    runner.forward([span])
    return [runner.slot_kv(span, slot) for slot in range(len(tokens))]


def assert_kv(runner: Runner, seq: Seq, n: int) -> None:
    """The first ``n`` slots of a sequence hold what a fresh pass over its tokens would write."""
    for slot, want in enumerate(fresh_kv(runner.decoder, seq.tokens[:n], runner.kv_cache_dtype) if n else []):
        for mine, theirs in zip(runner.slot_kv(Span(seq, 0, 0), slot), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=f"sequence {seq.id}, slot {slot}")
