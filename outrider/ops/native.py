"""The operations in C++ on the CPU: small batches of rows for little more than the price of one.

Every row's bits are the same whatever else is in the pass, however a prompt was cut, with any number of threads and on
any instruction set. Needs the extension ``outrider._native``; see ``available``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from outrider.core.errors import SettingError
from outrider.core.types import Batch, ForwardOut
from outrider.ops.contract import Int8Weight, LayerKV, LayerShape, LayerStack, LayerWeights, ModelEnds, StoredMatrix

GGUF_FORMATS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}
"""GGUF types that are taken as they are -> our names."""

FLOAT_FORMATS = ("f32", "bf16", "int8", "q8_0", "q4_1")
"""What a tensor can be packed to; q8_0 and q4_1 are rounded per group of 32 inputs, int8 per output."""

_QUANTIZED = {"int8": "int8", "int4": "q4_1"}
_KEPT_AS = {"int8": ("Q8_0",), "int4": ("Q4_0", "Q4_1")}
"""Types that have as many bits already: rounding them once more could only lose."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}

MAX_THREADS = 256

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""What a model may be loaded as; rows are computed in fp32."""

_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")


def _load() -> Any:
    try:
        return import_module("outrider._native")
    except ImportError:
        return None


_native: Any = _load()


def available() -> bool:
    """Whether the extension was built when the package was installed."""
    return _native is not None


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build and this machine have, best first; empty without the extension."""
    return tuple(_native.available_isas()) if _native else ()


@dataclass(frozen=True, eq=False)
class NativeWeight:
    """A packed linear weight (or embedding table) [out, in]; ``handle`` is the extension's."""

    handle: Any

    @property
    def shape(self) -> tuple[int, int]:
        out, width = self.handle.shape
        return out, width

    @property
    def nbytes(self) -> int:
        return int(self.handle.nbytes)

    @property
    def format(self) -> str:
        return str(self.handle.format)

    @property
    def data(self) -> memoryview:
        """The packed bytes themselves, not to be written to."""
        return memoryview(self.handle.bytes).toreadonly()

    def checksum(self) -> int:
        """64 bits that tell whether ``data`` was damaged on its way through a file."""
        return int(self.handle.checksum())


def pack(tensor: torch.Tensor, fmt: str) -> NativeWeight:
    """Packs a floating ``tensor`` [out, in] into one of ``FLOAT_FORMATS``. Raises ValueError where that cannot be."""
    kind = tensor.dtype if tensor.dtype in (torch.bfloat16, torch.float16) else torch.float32
    return NativeWeight(_native.pack(tensor.to("cpu", kind).contiguous(), fmt))


def pack_gguf(kind: str, raw: Any, out: int, width: int, fmt: str | None = None) -> NativeWeight:
    """Packs the stored blocks of a GGUF tensor, u8[out, bytes of a row].

    As they are, without rounding anything again; or with ``fmt`` into one of ``FLOAT_FORMATS``.
    """
    stored = GGUF_FORMATS.get(kind)
    if stored is None:
        raise ValueError(f"GGUF type {kind} cannot be packed as it is; {', '.join(GGUF_FORMATS)} can")
    return NativeWeight(_native.pack_gguf(raw, stored, out, width, fmt or stored))


def layout() -> str:
    """Names how packed bytes lie and how they were rounded; the same on every instruction set of a machine."""
    return f"{_native.layout}-{sys.byteorder}"


def unpack(fmt: str, shape: tuple[int, ...], n_bytes: int, fill: Callable[[memoryview], object]) -> NativeWeight:
    """A weight of ``shape`` [out, in] whose packed bytes ``fill`` writes into ``n_bytes`` of memory.

    Raises ValueError where a weight of this format and shape has another number of bytes.
    """
    weight = NativeWeight(_native.blank(fmt, *shape))
    if weight.nbytes != n_bytes:
        raise ValueError(f"a weight {list(shape)} of format {fmt} has {weight.nbytes} bytes, not {n_bytes}")
    fill(memoryview(weight.handle.bytes))
    return weight


def default_threads() -> int:
    """One thread for each core that this process may use, as far as the extension goes."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, usable)


class _Rope(tuple[torch.Tensor, ...]):
    """Cosines and sines; ``handle`` is the extension's view of them, checked once for all layers."""

    handle: Any

    @classmethod
    def of(cls, rope: Sequence[torch.Tensor]) -> _Rope:
        made = cls(rope)
        made.handle = _native.rope(*(part.numpy() for part in rope))
        return made


class NativeOps:
    """Implements ``Ops`` on fp32 rows. Linear weights are ``NativeWeight``; plain tensors are packed on first use."""

    batch_invariant = True

    def __init__(self, threads: int, isa: str | None = None) -> None:
        if _native is None:
            raise SettingError("the native operations are not installed; reinstall with a C++ compiler at hand")
        try:
            self._context = _native.context(threads, isa)
        except ValueError as error:
            raise SettingError(str(error)) from None
        self._plans: WeakKeyDictionary[Batch, Any] = WeakKeyDictionary()
        self._kv: WeakKeyDictionary[LayerKV, Any] = WeakKeyDictionary()
        self._layers: WeakKeyDictionary[LayerWeights, tuple[LayerShape, Any]] = WeakKeyDictionary()
        self._stacks: WeakKeyDictionary[LayerStack, Any] = WeakKeyDictionary()
        self._ends: WeakKeyDictionary[ModelEnds, Any] = WeakKeyDictionary()
        self._packed: Any = WeakIdKeyDictionary()  # by identity: tensors compare element by element

    @property
    def threads(self) -> int:
        return int(self._context.threads)

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return str(self._context.isa)

    def info(self) -> dict[str, Any]:
        """What ``outrider info`` shows."""
        formats = sorted({*FLOAT_FORMATS, *GGUF_FORMATS.values()})
        return {"isa": self.isa, "available": available_isas(), "threads": self.threads, "formats": formats}

    def describe(self) -> str:
        return f"native operations ({self.isa}, {self.threads} threads)"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def kv_dtype(self, computed: torch.dtype) -> torch.dtype:
        """16 bits: half the bytes, and a long context is read at every step. Of such types AMX multiplies bf16."""
        return torch.bfloat16 if self.isa == "avx512_amx" else torch.float16

    def matrix(
        self, stored: StoredMatrix, dtype: torch.dtype, device: torch.device, quantization: str | None
    ) -> NativeWeight:
        """A GGUF file's blocks as they are where we know them; else packed, in 8 or 4 bits if asked for."""
        wanted = None if quantization is None else _QUANTIZED[quantization]
        if stored.blocks is not None and stored.blocks[0] in GGUF_FORMATS:
            kind, raw = stored.blocks
            fmt = None if kind in _KEPT_AS.get(quantization or "", ()) else wanted
            return pack_gguf(kind, raw, raw.shape[0], raw.shape[1] // _BLOCK_BYTES[kind] * 32, fmt)
        dense = stored.dense()
        half = torch.bfloat16 in (dtype, dense.dtype)
        return pack(dense, wanted or ("bf16" if half else "f32"))

    def embed(self, table: Any, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(table, torch.Tensor):
            return table.index_select(0, ids).float()
        out = torch.empty(ids.shape[0], table.shape[1])
        _native.embed(self._context, self._native_weight(table).handle, ids.numpy(), out.numpy())
        return out

    def rope_table(self, inv_freq: torch.Tensor, scale: float, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        shape = positions.shape[0], inv_freq.shape[0]
        cos, sin = torch.empty(shape), torch.empty(shape)
        frequencies = inv_freq.float().numpy()
        _native.rope_table(self._context, frequencies, scale, positions.numpy(), cos.numpy(), sin.numpy())
        return _Rope.of((cos, sin))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        _native.rms_norm(self._context, x.numpy(), weight.float().numpy(), eps, out.numpy())
        return out

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = self._native_weight(weight)
        out = torch.empty(x.shape[0], packed.shape[0])
        added = None if bias is None else bias.float().numpy()
        _native.linear(self._context, packed.handle, x.contiguous().numpy(), added, out.numpy())
        return out

    def decoder_layer(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        shape: LayerShape,
        rope: Sequence[torch.Tensor],
        kv: LayerKV,
        batch: Batch,
    ) -> torch.Tensor:
        return self.decoder_layers(x, LayerStack((weights,), (shape,), (kv,)), rope, batch)

    def decoder_layers(
        self,
        x: torch.Tensor,
        stack: LayerStack,
        rope: Sequence[torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        ready = self._stack(stack)
        plan = self._plans.get(batch)
        if plan is None:
            plan = self._plans[batch] = _plan(batch)
        turn = rope if isinstance(rope, _Rope) else _Rope.of(rope)
        wanted = plan.rows, ready.hidden
        if x.shape != wanted or x.dtype != torch.float32 or not x.is_contiguous() or x.device.type != "cpu":
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; expected is contiguous fp32 {wanted} in main memory"
            )
        out = torch.empty_like(x)
        _native.decoder_layers(self._context, ready, plan, turn.handle, x.data_ptr(), out.data_ptr())
        return out

    def forward(
        self, ends: ModelEnds, stacks: Sequence[LayerStack], batch: Batch, features: Sequence[int] = ()
    ) -> ForwardOut:
        ready = self._ends.get(ends)
        if ready is None:
            ready = self._ends[ends] = self._new_ends(ends)
        # Numpy's arrays, not torch's: between two steps the caches are full of weights, and torch needs more of them.
        hidden = np.empty((len(stacks), batch.n_rows, ready.hidden), np.float32)
        logits = np.empty((len(batch.logit_rows), ready.vocab), np.float32)
        layers = [self._stack(stack) for stack in stacks]
        best = np.empty(len(batch.logit_rows), np.int64)
        _native.forward(self._context, ready, layers, _plan(batch), batch.ids, batch.logit_rows, hidden, logits, best)
        beside = torch.cat([torch.from_numpy(hidden[i]) for i in features], dim=-1) if features else None
        return ForwardOut(logits, beside, best)

    def _stack(self, stack: LayerStack) -> Any:
        ready = self._stacks.get(stack)
        if ready is None:
            layers = [self._layer(weights, shape) for weights, shape in zip(stack.layers, stack.shapes, strict=True)]
            ready = self._stacks[stack] = _native.stack(layers, [self._pool(kv) for kv in stack.kv])
        return ready

    def _new_ends(self, ends: ModelEnds) -> Any:
        embedding, head = self._native_weight(ends.embedding).handle, self._native_weight(ends.head).handle
        norm, inv_freq = ends.final_norm.float().numpy(), ends.inv_freq.float().numpy()
        return _native.ends(embedding, head, norm, ends.norm_eps, inv_freq, ends.rope_scale)

    def _layer(self, weights: LayerWeights, shape: LayerShape) -> Any:
        known = self._layers.get(weights)
        if known is None or (known[0] is not shape and known[0] != shape):
            known = self._layers[weights] = shape, self._new_layer(weights, shape)
        return known[1]

    def _pool(self, kv: LayerKV) -> Any:
        pool = self._kv.get(kv)
        if pool is None:
            pool = self._kv[kv] = _native.kv(kv.k, kv.v, kv.k_scale, kv.v_scale)
        return pool

    def _native_weight(self, weight: Any) -> NativeWeight:
        if isinstance(weight, NativeWeight):
            return weight
        packed: NativeWeight | None = self._packed.get(weight)
        if packed is None:
            dense = weight.q * weight.scale[:, None] if isinstance(weight, Int8Weight) else weight
            kind = "int8" if isinstance(weight, Int8Weight) else "bf16" if weight.dtype == torch.bfloat16 else "f32"
            packed = self._packed[weight] = pack(dense, kind)
        return packed

    def _new_layer(self, w: LayerWeights, shape: LayerShape) -> Any:
        def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.float().contiguous()

        return _native.layer(
            shape.n_heads,
            shape.n_kv_heads,
            shape.head_dim,
            shape.norm_eps,
            shape.window or 0,
            dense(w.input_norm),
            dense(w.post_norm),
            [self._native_weight(getattr(w, name)).handle for name in _LINEAR],
            [dense(getattr(w, f"{name}_bias")) for name in _LINEAR],
            dense(w.q_norm),
            dense(w.k_norm),
        )


def _plan(batch: Batch) -> Any:
    return _native.plan(
        batch.positions,
        batch.slots,
        batch.cu_rows,
        batch.kv_len,
        batch.block_tables,
        batch.tail_start,
        batch.ancestors,
        batch.block_size,
    )
