"""Writes small GGUF files for the tests, with the format's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 256, 4, 2, 16, 40
Quant = gguf.GGMLQuantizationType
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def tensors(layers: int = 1) -> dict[str, np.ndarray]:
    """A tiny decoder under the file's own names."""
    named = {"token_embd.weight": normal(VOCAB, HIDDEN), "output_norm.weight": normal(HIDDEN)}
    for n in range(layers):
        for part, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            named[f"blk.{n}.{part}.weight"] = normal(*shape)
    return named


def write(
    path: Path,
    named: Mapping[str, np.ndarray],
    arch: str = "llama",
    types: Mapping[str, Any] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    head_dim: int = HEAD_DIM,
    layers: int = 1,
    **options: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "ü", "<end>"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    edit(writer)
    for name, data in named.items():
        writer.add_tensor(name, data, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
