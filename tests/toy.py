"""Toy models with random weights, and a cache-free pass over them to compare with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder, expected_tensors
from outrider.models.load import LoadedModel
from outrider.models.source import TensorSource
from outrider.ops.reference import ReferenceOps


def toy_config(
    architecture: str = "llama",
    vocab: int = 32,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 64,
    max_position: int = 256,
    **options: Any,
) -> ModelConfig:
    """A small model of the family; ``options`` are further fields of ModelConfig."""
    family: dict[str, Any] = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}.get(architecture, {})
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=options.pop("head_dim", hidden // heads),
        max_position=max_position,
        **{**family, **options},
    )


class MemorySource(TensorSource):
    """Random weights by seed, in memory; large enough that the logits spread and greedy output varies."""

    where = "memory"

    def __init__(self, config: ModelConfig | None = None, seed: int = 0, std: float = 0.4) -> None:
        self._config = config or toy_config()
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, shape in expected_tensors(self._config).items():
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.tensors[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else std * noise

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> Iterable[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def toy_decoder(config: ModelConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """A toy model ready to run on the CPU."""
    return Decoder.from_source(MemorySource(config, seed), ReferenceOps(), dtype, "cpu")


def full_logits(
    model: Decoder | TensorSource, tokens: Sequence[int], skipped: Collection[int] = (), skip_from: int = 0
) -> torch.Tensor:
    """Logits [len, V] of every position in one dense pass: no cache, no blocks, no batch; one head at a time.

    The positions from ``skip_from`` on leave out the layers ``skipped``.
    """
    d = model if isinstance(model, Decoder) else Decoder.from_source(model, ReferenceOps(), torch.float64, "cpu")
    c, n = d.config, len(tokens)
    position = torch.arange(n)
    # each pair (channel i, channel i + dim/2) is a complex number that turns with position
    turn = torch.polar(torch.ones(n, c.head_dim // 2).double(), position[:, None] * d.inv_freq.double()) * d.rope_scale

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def heads(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
        y = (x @ weight.T + (0 if bias is None else bias)).view(n, -1, c.head_dim).transpose(0, 1)
        return y if scale is None else norm(y, scale)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        y = torch.complex(*x.double().chunk(2, -1)) * turn
        return torch.cat((y.real, y.imag), -1).to(x.dtype)

    x = d.embedding[torch.tensor(tokens)]
    for layer, w in enumerate(d.layers):
        before = x
        h = norm(x, w.input_norm)
        q, k = rotated(heads(h, w.q, w.q_bias, w.q_norm)), rotated(heads(h, w.k, w.k_bias, w.k_norm))
        v = heads(h, w.v, w.v_bias, None)
        back = position[:, None] - position[None, :]
        seen = (back >= 0) & (back < (c.window(layer) or n))
        mixed = []
        for head in range(c.n_heads):
            shared = head // (c.n_heads // c.n_kv_heads)
            scores = (q[head] @ k[shared].T / math.sqrt(c.head_dim)).masked_fill(~seen, -math.inf)
            mixed.append(scores.softmax(-1) @ v[shared])
        x = x + torch.cat(mixed, -1) @ w.o.T + (0 if w.o_bias is None else w.o_bias)
        h = norm(x, w.post_norm)
        gate, up = ((h @ m.T) + (0 if b is None else b) for m, b in ((w.gate, w.gate_bias), (w.up, w.up_bias)))
        x = x + (gate * torch.sigmoid(gate) * up) @ w.down.T + (0 if w.down_bias is None else w.down_bias)
        if layer in skipped:
            x = torch.cat((x[:skip_from], before[skip_from:]))
    return norm(x, d.final_norm) @ d.head.T


def toy_model(
    config: ModelConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> LoadedModel:
    """A toy model as the engine takes it, without a tokenizer: it speaks token ids."""
    decoder = Decoder.from_source(MemorySource(config, seed), ReferenceOps(), dtype, device)
    return LoadedModel(f"toy-{seed}", decoder.config, decoder, None, None, decoder.weight_bytes)
