"""The contract of the numeric operations: one call per decoder layer, so that an implementation can fuse what it likes.

Two implementations: ``reference`` (torch: any device, any dtype) and ``native`` (C++, CPU). Both work on the same flat
rows, the same paged KV and the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.types import Batch


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A linear layer's weight in 8 bits: ``q`` i8[out,in] times ``scale`` [out]."""

    q: torch.Tensor
    scale: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes


class PackedWeight(Protocol):
    """A weight [out, in] in a layout of an implementation's own."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...


Weight = torch.Tensor | Int8Weight | PackedWeight


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A weight [out, in] in a model file: ``dense`` reads it in the file's own floating type (fp32 if quantized).

    ``blocks`` is the name of its quantization and its blocks u8[out, bytes of a row] as they are, where it has one.
    """

    dense: Callable[[], torch.Tensor]
    blocks: tuple[str, NDArray[np.uint8]] | None = None


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's paged KV: ``k`` and ``v`` are [slots, kv heads, head dim], indexed by physical slot."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer. Linear weights are [out, in]; biases and q/k norms are None where the model has none."""

    input_norm: torch.Tensor
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    post_norm: torch.Tensor
    gate: Weight
    up: Weight
    down: Weight
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerShape:
    """What a layer call needs to know besides its weights; ``window`` None sees everything."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    window: int | None


class Ops(Protocol):
    """Operations on flat rows; N rows, H hidden width."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are the same whatever other rows share its pass."""

    def describe(self) -> str:
        """Implementation, instruction set and threads, for people."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of hidden states, norms and KV in a model that is loaded as ``dtype``."""

    def matrix(
        self, stored: StoredMatrix, dtype: torch.dtype, device: torch.device, quantization: str | None
    ) -> Weight:
        """A weight ready for ``linear`` and ``embed``. Raises ValueError where it cannot be packed so."""

    def embed(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        """Rows [N,H] of ``table`` [V,H], in any floating type."""

    def rope_table(self, inv_freq: torch.Tensor, scale: float, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cosines and sines, each [N, head dim / 2], shared by all layers of a pass."""

    def decoder_layer(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        shape: LayerShape,
        rope: Sequence[torch.Tensor],
        kv: LayerKV,
        batch: Batch,
    ) -> torch.Tensor:
        """One whole layer on ``x`` [N,H]: writes this pass's KV at ``batch.slots``, attends, returns [N,H]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight, row by row."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [N,in] times weight [out,in] transposed, plus bias."""
