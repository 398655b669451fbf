"""The operations in plain torch: any device, any floating type. The one that every other implementation must equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from outrider.core.errors import SettingError
from outrider.core.types import Batch, ForwardOut
from outrider.ops.contract import (
    KV_GROUP,
    Int8Weight,
    LayerKV,
    LayerShape,
    LayerStack,
    LayerWeights,
    ModelEnds,
    StoredMatrix,
    Weight,
)

_AT_ONCE = 1 << 14  # outputs of an 8-bit weight that are widened at a time

Index = slice | torch.Tensor

HALF_MAX = torch.finfo(torch.float16).max


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """Rounds ``weight`` [out,in] to 8 bits with one symmetric scale for each output."""
    wide = weight.to(_wide(weight.dtype))
    scale = wide.abs().amax(dim=1) / 127.0
    q = torch.round(wide / scale.clamp(min=torch.finfo(wide.dtype).tiny)[:, None])
    return Int8Weight(q.to(torch.int8), scale)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds ``x`` [N, heads, dim] to codes i8 and scales f32[N, heads, groups], in fp32; see ``LayerKV``.

    A vector's codes depend on nothing but itself: whichever pass writes a slot, and with whom, it holds the same bits.
    """
    dim = x.shape[-1]
    padded = F.pad(x.float(), (0, -dim % KV_GROUP))
    groups = padded.view(*x.shape[:-1], -1, KV_GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    nothing = most < 1e-30  # 127 / most would overflow
    per_code, codes_per = most / 127.0, torch.full_like(most, 127.0) / most
    codes = torch.round(groups * codes_per.masked_fill(nothing, 0.0)).to(torch.int8)
    return codes.flatten(-2)[..., :dim], per_code.masked_fill(nothing, 0.0).squeeze(-1)


class ReferenceOps:
    """Implements ``Ops``. Half types are widened to fp32 in norms and attention, as transformers does."""

    batch_invariant = False  # matrix products of the platform: they pick a kernel by the number of rows

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[Batch, _Plan] = WeakKeyDictionary()

    def describe(self) -> str:
        return f"reference operations (torch, {torch.get_num_threads()} threads)"

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def kv_dtype(self, computed: torch.dtype) -> torch.dtype:
        return computed

    def matrix(
        self, stored: StoredMatrix, dtype: torch.dtype, device: torch.device, quantization: str | None
    ) -> Weight:
        if quantization not in (None, "int8"):
            raise SettingError(f"quantization is {quantization!r}; allowed on the reference operations is int8")
        dense = stored.dense().to(device, dtype).contiguous()
        return dense if quantization is None else quantize_int8(dense)

    def embed(self, table: Weight, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(table, Int8Weight):
            return table.q.index_select(0, ids) * table.scale.index_select(0, ids)[:, None]
        return _dense(table).index_select(0, ids)

    def rope_table(self, inv_freq: torch.Tensor, scale: float, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        angles = positions.to(inv_freq.dtype)[:, None] * inv_freq
        return angles.cos() * scale, angles.sin() * scale

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(_wide(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, Int8Weight):
            return F.linear(x, _dense(weight), bias)
        work = torch.float32 if x.dtype == torch.float16 else x.dtype  # sums before scaling overflow fp16
        blocks = (weight.q[i : i + _AT_ONCE] for i in range(0, len(weight.q), _AT_ONCE))
        parts = [F.linear(x.to(work), block.to(work)) for block in blocks]  # never the whole head in floats
        y = (torch.cat(parts, dim=-1) * weight.scale).to(x.dtype)
        return y if bias is None else y + bias

    def decoder_layer(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        shape: LayerShape,
        rope: Sequence[torch.Tensor],
        kv: LayerKV,
        batch: Batch,
    ) -> torch.Tensor:
        w, eps, dim = weights, shape.norm_eps, shape.head_dim
        h = self.rms_norm(x, w.input_norm, eps)
        q = self.linear(h, w.q, w.q_bias).view(-1, shape.n_heads, dim)
        k = self.linear(h, w.k, w.k_bias).view(-1, shape.n_kv_heads, dim)
        v = self.linear(h, w.v, w.v_bias).view(-1, shape.n_kv_heads, dim)
        if w.q_norm is not None:
            q = self.rms_norm(q, w.q_norm, eps)
        if w.k_norm is not None:
            k = self.rms_norm(k, w.k_norm, eps)
        q, k = _rotate(q, rope), _rotate(k, rope)
        plan = self._plans.get(batch)
        if plan is None:
            plan = self._plans[batch] = _Plan(batch, x.device)
        _write(kv.k, kv.k_scale, plan.slots, k)
        _write(kv.v, kv.v_scale, plan.slots, v)
        x = x + self.linear(plan.attend(q, shape, kv), w.o, w.o_bias)
        h = self.rms_norm(x, w.post_norm, eps)
        h = F.silu(self.linear(h, w.gate, w.gate_bias)) * self.linear(h, w.up, w.up_bias)
        return x + self.linear(h, w.down, w.down_bias)

    def decoder_layers(
        self,
        x: torch.Tensor,
        stack: LayerStack,
        rope: Sequence[torch.Tensor],
        batch: Batch,
    ) -> torch.Tensor:
        for weights, shape, kv in zip(stack.layers, stack.shapes, stack.kv, strict=True):
            x = self.decoder_layer(x, weights, shape, rope, kv, batch)
        return x

    @torch.inference_mode()
    def forward(
        self, ends: ModelEnds, stacks: Sequence[LayerStack], batch: Batch, features: Sequence[int] = ()
    ) -> ForwardOut:
        device = ends.final_norm.device
        x = self.embed(ends.embedding, torch.from_numpy(batch.ids).to(device)).to(ends.final_norm.dtype)
        rope = self.rope_table(ends.inv_freq, ends.rope_scale, torch.from_numpy(batch.positions).to(device))
        hidden: list[torch.Tensor] = []
        for stack in stacks:
            x = self.decoder_layers(x, stack, rope, batch)
            hidden.append(x)
        x = x.index_select(0, torch.from_numpy(batch.logit_rows).to(device))
        logits = self.linear(self.rms_norm(x, ends.final_norm, ends.norm_eps), ends.head)
        beside = torch.cat([hidden[i] for i in features], dim=-1) if features else None
        return ForwardOut(logits.to("cpu", _wide(logits.dtype)).numpy(), beside)


class _Plan:
    """What a batch's layers need, worked out once for all of them: where KV goes, and who attends with whom."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.slots = torch.from_numpy(batch.slots).to(device)
        # Sequences with as many rows and a similar length (same power of two) share one padded attention call.
        members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for b, length in enumerate(batch.kv_len):
            members[batch.cu_rows[b + 1] - batch.cu_rows[b], length.bit_length()].append(b)
        self._groups = [_Group(batch, own, device) for (rows, _), own in members.items() if rows]

    def attend(self, q: torch.Tensor, shape: LayerShape, kv: LayerKV) -> torch.Tensor:
        """Attention of ``q`` [N, heads, dim] over the paged KV: [N, heads * dim]."""
        if len(self._groups) == 1:
            return self._groups[0].attend(q, shape, kv)
        out = q.new_empty(q.shape[0], shape.n_heads * shape.head_dim)
        for group in self._groups:
            out[group.rows] = group.attend(q[group.rows], shape, kv)
        return out


class _Group:
    """S sequences with n rows each, padded to L slots: what attention needs, worked out once for all layers."""

    def __init__(self, batch: Batch, members: list[int], device: torch.device) -> None:
        size, first = batch.block_size, members[0]
        tables, positions = (torch.from_numpy(part).to(device) for part in (batch.block_tables, batch.positions))
        self.n = batch.cu_rows[first + 1] - batch.cu_rows[first]
        self.n_seqs = len(members)
        self.length = max(batch.kv_len[b] for b in members)
        self.rows = _index([r for b in members for r in range(batch.cu_rows[b], batch.cu_rows[b + 1])], device)

        def column(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor([[values[b]] for b in members], device=device)

        logical = torch.arange(self.length, device=device).expand(self.n_seqs, -1)  # [S,L]
        in_use = column(batch.kv_len)
        blocks = batch.block_tables[first, : -(-self.length // size)].tolist() if self.n_seqs == 1 else []
        if blocks and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            self.slots: Index = slice(blocks[0] * size, blocks[0] * size + self.length)  # read in place, no copy
        else:
            held = torch.minimum(logical, in_use - 1)  # padding repeats a written slot: unwritten ones may hold NaN
            self.slots = (tables[members].gather(1, held // size) * size + held % size).flatten()

        own = in_use - self.n + torch.arange(self.n, device=device)  # [S,n]
        self._positions = positions[self.rows].view(self.n_seqs, self.n)
        self._key_positions = logical
        self._visible = logical[:, None] <= own[..., None]  # [S,n,L]
        if batch.ancestors is not None:
            words = torch.from_numpy(batch.ancestors).to(device)[self.rows].view(self.n_seqs, self.n, -1)
            bit = logical - column(batch.tail_start)
            near = bit.clamp(0, 64 * words.shape[-1] - 1)
            word = words.gather(2, (near // 64)[:, None].expand(-1, self.n, -1))
            self._visible &= (bit < 0)[:, None] | ((word >> (near % 64)[:, None]) & 1).bool()
            self._key_positions = logical.clone()  # in a tree, slot and position differ
            for row, b in enumerate(members):
                tail = slice(batch.tail_start[b], batch.kv_len[b])
                self._key_positions[row, tail] = torch.tensor(batch.tail_positions[b], device=device)
        self._hidden: dict[int | None, torch.Tensor | None] = {}

    def hidden(self, window: int | None) -> torch.Tensor | None:
        """Where a row must not look, [S,n,1,L]; None when every row sees every slot."""
        if window not in self._hidden:
            visible = self._visible
            if window is not None:
                visible = visible & (self._key_positions[:, None] > self._positions[..., None] - window)
            self._hidden[window] = None if bool(visible.all()) else ~visible[:, :, None]
        return self._hidden[window]

    def attend(self, q: torch.Tensor, shape: LayerShape, kv: LayerKV) -> torch.Tensor:
        """Attention of this group's rows ``q`` [S*n, heads, dim]: [S*n, heads * dim]."""
        heads, dim, shared = shape.n_kv_heads, shape.head_dim, shape.n_heads // shape.n_kv_heads
        wide, batched = _wide(q.dtype), heads * self.n_seqs
        query = (q.to(wide) * dim**-0.5).view(self.n_seqs, self.n, heads, shared, dim)
        query = query.permute(2, 0, 1, 3, 4).reshape(batched, self.n * shared, dim)
        key = _read(kv.k, kv.k_scale, self.slots, wide).reshape(batched, self.length, dim)
        value = _read(kv.v, kv.v_scale, self.slots, wide).reshape(batched, self.length, dim)
        scores = torch.bmm(query, key.transpose(1, 2)).view(heads, self.n_seqs, self.n, shared, self.length)
        hidden = self.hidden(shape.window)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        mixed = torch.bmm(scores.softmax(-1).view(batched, self.n * shared, self.length), value)
        mixed = mixed.view(heads, self.n_seqs, self.n, shared, dim).permute(1, 2, 0, 3, 4)
        return mixed.reshape(self.n_seqs * self.n, shape.n_heads * dim).to(q.dtype)


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "a weight packed for other operations"
    return weight


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to take sums in."""
    return dtype if dtype == torch.float64 else torch.float32


def _index(rows: list[int], device: torch.device) -> Index:
    """``rows`` as a slice where they are consecutive: indexing then makes no copy."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)


def _write(pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Stores ``x`` [N, kv heads, dim] at ``slots``, in the pool's type."""
    if scales is None:
        if pool.dtype == torch.float16:  # which is narrow: infinity would end in NaN
            x = x.clamp(-HALF_MAX, HALF_MAX)
        pool.index_copy_(1, slots, x.to(pool.dtype).transpose(0, 1))
        return
    codes, scale = quantize_kv(x)
    pool.index_copy_(1, slots, codes.transpose(0, 1))
    scales.index_copy_(1, slots, scale.transpose(0, 1))


def _read(pool: torch.Tensor, scales: torch.Tensor | None, slots: Index, wide: torch.dtype) -> torch.Tensor:
    """KV of ``slots``, [kv heads, slots, dim], in the type ``wide``."""
    taken = _take(pool, slots).to(wide)
    if scales is None:
        return taken
    return taken * _take(scales, slots).to(wide).repeat_interleave(KV_GROUP, -1)[..., : taken.shape[-1]]


def _take(pool: torch.Tensor, slots: Index) -> torch.Tensor:
    """What the pool holds of ``slots``, [kv heads, slots, ...]."""
    return pool[:, slots] if isinstance(slots, slice) else pool.index_select(1, slots)


def _rotate(x: torch.Tensor, rope: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rotates ``x`` [N, heads, dim], first half of dim against second half (the layout of Hugging Face and NeoX)."""
    cos, sin = rope[0][:, None], rope[1][:, None]
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
