"""The contract of the numeric operations: whole passes and layers, so that an implementation can fuse what it likes.

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

from outrider.core.types import Batch, ForwardOut


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


KV_GROUP = 32
"""Dims of a head that share a scale where KV is stored in 8 bits; the last ones of a head may be fewer."""


@dataclass(frozen=True, eq=False)
class LayerKV:
    """One layer's paged KV: ``k`` and ``v`` are [kv heads, slots, head dim]; slots are physical ones.

    Or that of several layers, one's heads after the other's (``split``). Heads come first so that what one head reads
    of a block lies side by side.

    In 8 bits they are codes i8, and ``k_scale`` and ``v_scale`` f32[kv heads, slots, groups] say what a code of each
    group is worth: the greatest magnitude in the group / 127. Other types have no scales.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def empty(cls, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> LayerKV:
        """Room for ``slots`` slots, holding anything; with dtype int8 also for their scales."""
        shapes = [(heads, slots, dim)] * 2
        kinds = [dtype] * 2
        if dtype == torch.int8:
            shapes += [(heads, slots, -(-dim // KV_GROUP))] * 2
            kinds += [torch.float32] * 2
        return cls(*(torch.empty(s, dtype=kind, device=device) for s, kind in zip(shapes, kinds, strict=True)))

    def split(self, layers: int) -> list[LayerKV]:
        """Views of it, each with an equal share of the heads."""
        return [LayerKV(*views) for views in zip(*(part.chunk(layers) for part in self.parts), strict=True)]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All tensors, each [kv heads, slots, ...]: whoever copies or moves a slot does it in all of them."""
        return tuple(part for part in (self.k, self.v, self.k_scale, self.v_scale) if part is not None)


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


@dataclass(frozen=True, eq=False)
class LayerStack:
    """One or more layers in order, each with its KV: made once, so that an implementation gets them ready once."""

    layers: Sequence[LayerWeights]
    shapes: Sequence[LayerShape]
    kv: Sequence[LayerKV]


@dataclass(frozen=True, eq=False)
class ModelEnds:
    """What stands before and behind a model's layers: ``embedding`` and ``head`` [V,H], ``final_norm`` [H].

    ``inv_freq`` [head dim / 2] and ``rope_scale`` are those of the rotary embedding, ``norm_eps`` the final norm's.
    """

    embedding: Weight
    inv_freq: torch.Tensor
    rope_scale: float
    final_norm: torch.Tensor
    norm_eps: float
    head: Weight


class Ops(Protocol):
    """Operations on flat rows; N rows, H hidden width."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are the same whatever other rows share its pass."""

    def describe(self) -> str:
        """Implementation, instruction set and threads, for people."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of hidden states and norms in a model loaded as ``dtype``."""

    def kv_dtype(self, computed: torch.dtype) -> torch.dtype:
        """How the KV of a model that computes in ``computed`` is stored, unless told otherwise."""

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

    def decoder_layers(
        self,
        x: torch.Tensor,
        stack: LayerStack,
        rope: Sequence[torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        """The same for all layers of ``stack``, one after the other: a chance to save what a call costs."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight, row by row."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [N,in] times weight [out,in] transposed, plus bias."""

    def forward(
        self, ends: ModelEnds, stacks: Sequence[LayerStack], batch: Batch, features: Sequence[int] = ()
    ) -> ForwardOut:
        """A whole pass over ``batch`` through ``stacks`` in order: KV of every row is written, and logits returned.

        ``features`` are stacks by number: the hidden states after each of them come back side by side, in this order.
        """
