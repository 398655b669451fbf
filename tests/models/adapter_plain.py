"""Kangaroo's exit adapter written the short and obvious way, straight from a checkpoint's tensors, without a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tests.models.eagle_plain import Tensors, norm


def adapter_rows(
    config: Mapping[str, Any], tensors: Tensors, states: torch.Tensor, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """What the target's output head is given, [n,H], for its hidden states [n,H] after the exit layer.

    ``visible`` bool[n] says which rows others may look at; every row sees itself.
    """
    n, heads, kv_heads = len(states), config["num_attention_heads"], config["num_key_value_heads"]
    h = norm(states, tensors["layers.0.input_layernorm.weight"], config["rms_norm_eps"])
    q, k, v = (h @ tensors[f"layers.0.self_attn.{p}_proj.weight"].T for p in "qkv")
    dim = q.shape[1] // heads
    frequencies = 1.0 / config.get("rope_theta", 10000.0) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    turn = torch.polar(torch.ones(()).double(), torch.arange(n)[:, None] * frequencies.double())[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.view(n, -1, dim).chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    q, k, v = rotated(q), rotated(k), v.view(n, kv_heads, dim)
    seen = torch.ones(n, n).tril().bool()
    if visible is not None:
        seen &= visible | torch.eye(n).bool()
    mixed = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = (q[:, head] @ k[:, shared].T / math.sqrt(dim)).masked_fill(~seen, -math.inf)
        mixed.append(scores.softmax(-1) @ v[:, shared])
    x = states + torch.cat(mixed, -1) @ tensors["layers.0.self_attn.o_proj.weight"].T
    return norm(x, tensors["norm.weight"], config["rms_norm_eps"])
