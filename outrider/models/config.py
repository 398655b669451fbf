"""What a decoder looks like: one description that covers the Llama, Mistral, Qwen2 and Qwen3 families."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, and how it is stretched beyond the trained context.

    ``kind`` is ``default``, ``linear``, ``llama3`` or ``yarn``; a field that the kind does not use keeps its default.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of one decoder. Sizes are in elements."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position: int  # context length, tokens
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: tuple[int | None, ...] = ()  # per layer; empty = no layer has a window
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """How many positions back layer ``layer`` sees (itself included), or None for all."""
        return self.sliding_window[layer] if self.sliding_window else None
