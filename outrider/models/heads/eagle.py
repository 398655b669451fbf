"""EAGLE's head: one or a few decoder layers that guess the target's next feature from its last one and a token.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024; "EAGLE-2", 2024 (the
same head, another tree); "EAGLE-3", 2025. Row p pairs the target's feature at position p - 1 with the token at p, and
guesses the token at p + 1. The first two versions read the hidden state after the final norm; the third reads several
layers, joined by ``fc``. What a row gives is fed back as the feature of the next one. Attention is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from outrider.models.config import ModelConfig
from outrider.models.rope import rope_frequencies
from outrider.ops.contract import Ops, Weight

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(layer, q, k, v)``: q [N, heads, dim], k and v [N, kv heads, dim] -> what each row sees, [N, heads * dim]."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight [out, in] with its bias [out], if it has one."""

    weight: Weight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class HeadLayer:
    """One decoder layer. With ``hidden_norm`` (EAGLE-3's first one) q, k and v read the token's embedding as well.

    ``linear`` has q, k, v, o, gate, up and down. ``input_norm`` is None in EAGLE's first layer.
    """

    linear: Mapping[str, Linear]
    post_norm: torch.Tensor
    input_norm: torch.Tensor | None = None
    hidden_norm: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class EagleHead:
    """The weights of one head. H is its width, T the target's.

    ``feature_layers``: the target's layers whose hidden states (before any final norm) it reads, side by side;
    ``final_norm`` is the target's, where the head reads what the target's output head reads. ``tokens`` i64[R] are the
    target's tokens of the rows of a trimmed output matrix.
    """

    ops: Ops
    config: ModelConfig
    feature_layers: tuple[int, ...]
    embedding: Weight
    fc: Linear
    layers: Sequence[HeadLayer]
    output: Weight
    vocab_size: int  # the target's
    weight_bytes: int
    final_norm: tuple[torch.Tensor, float] | None = None  # the target's weight [T] and epsilon: EAGLE-1 and 2
    fc_norm: torch.Tensor | None = None  # EAGLE-3 with norm_before_fc
    norm: torch.Tensor | None = None  # EAGLE-3, before the output matrix
    norm_before_residual: bool = False
    norm_output: bool = False
    tokens: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Of the features that ``forward`` takes and gives."""
        return self.config.hidden_size

    def feature(self, states: torch.Tensor) -> torch.Tensor:
        """From the target's hidden states [N, layers * T] to the features [N,H] that ``forward`` pairs with tokens."""
        if self.final_norm is not None:
            return self.ops.rms_norm(states, *self.final_norm)
        if self.fc_norm is not None:
            states = self.ops.rms_norm(states, self.fc_norm, self.config.norm_eps)
        return self._linear(states, self.fc)

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of features [N,H] with the tokens i64[N] that follow them, at ``positions`` i64[N].

        Returns the guessed features [N,H], to feed back, and the states [N,H] that ``logits`` takes.
        """
        embedded = self.ops.embed(self.embedding, tokens).to(features.dtype)
        joined = self.final_norm is not None  # feature and token are joined before the layers, or in the first one
        x = self._linear(torch.cat((embedded, features), dim=-1), self.fc) if joined else features
        turn = self._turn(positions, features.dtype)
        for index, layer in enumerate(self.layers):
            x = self._layer(index, layer, x, embedded, turn, attend)
        if self.norm is None:
            return x, x
        normed = self.ops.rms_norm(x, self.norm, self.config.norm_eps)
        return (normed if self.norm_output else x), normed

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [N,V] in the target's vocabulary; -inf for tokens that the head lacks."""
        own = self.ops.linear(states, self.output)
        if self.tokens is None and own.shape[1] >= self.vocab_size:
            return own[:, : self.vocab_size]
        full = own.new_full((own.shape[0], self.vocab_size), -math.inf)
        if self.tokens is None:
            full[:, : own.shape[1]] = own
            return full
        return full.index_copy_(1, self.tokens, own)

    def _layer(
        self,
        index: int,
        layer: HeadLayer,
        x: torch.Tensor,
        embedded: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        c, eps = self.config, self.config.norm_eps
        h = x if layer.input_norm is None else self.ops.rms_norm(x, layer.input_norm, eps)
        if layer.hidden_norm is not None:
            assert layer.input_norm is not None
            normed = self.ops.rms_norm(x, layer.hidden_norm, eps)
            h = torch.cat((self.ops.rms_norm(embedded, layer.input_norm, eps), normed), dim=-1)
            x = normed if self.norm_before_residual else x
        q = self._linear(h, layer.linear["q"]).view(-1, c.n_heads, c.head_dim)
        k = self._linear(h, layer.linear["k"]).view(-1, c.n_kv_heads, c.head_dim)
        v = self._linear(h, layer.linear["v"]).view(-1, c.n_kv_heads, c.head_dim)
        x = x + self._linear(attend(index, _rotated(q, turn), _rotated(k, turn), v), layer.linear["o"])
        h = self.ops.rms_norm(x, layer.post_norm, eps)
        h = F.silu(self._linear(h, layer.linear["gate"])) * self._linear(h, layer.linear["up"])
        return x + self._linear(h, layer.linear["down"])

    def _linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return self.ops.linear(x, linear.weight, linear.bias)

    @cached_property
    def _frequencies(self) -> tuple[torch.Tensor, float]:
        return rope_frequencies(self.config.rope, self.config.head_dim, self.config.max_position)

    def _turn(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [N, 1, dim / 2]."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies, scale = self._frequencies
        angles = positions.to(wide)[:, None, None] * frequencies.to(positions.device, wide)
        return angles.cos() * scale, angles.sin() * scale


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """One sequence: q [n, heads, dim] over k, v [kv heads, L, dim] where ``visible`` [n,L] is set: [n, heads * dim]."""
    n, heads, dim = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    shared = heads // k.shape[0]
    query = q.to(wide).view(n, k.shape[0], shared, dim).permute(1, 2, 0, 3)  # [kv heads, shared, n, dim]
    scores = query @ k.to(wide).unsqueeze(1).transpose(2, 3) / math.sqrt(dim)
    mixed = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v.to(wide).unsqueeze(1)
    return mixed.permute(2, 0, 1, 3).reshape(n, heads * dim).to(q.dtype)


def _rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates ``x`` [N, heads, dim], first half of dim against second half."""
    cos, sin = turn
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
