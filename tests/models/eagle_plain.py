"""EAGLE's heads written the short and obvious way, straight from a checkpoint's tensors, without a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rows(
    config: Mapping[str, Any], tensors: Tensors, features: torch.Tensor, embedded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows in one dense causal pass; features and embeddings are [n,H]. Gives what is fed back and what is read.

    ``config``: EAGLE-3 when it has ``draft_vocab_size``, else EAGLE-1.
    """
    third = "draft_vocab_size" in config
    llama = config.get("transformer_layer_config", config)
    heads, kv_heads, eps = llama["num_attention_heads"], llama["num_key_value_heads"], llama["rms_norm_eps"]
    flags = {**config, **config.get("eagle_config", {})}
    t = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(()))

    n = len(features)
    x = features if third else linear(torch.cat((embedded, features), -1), "fc")
    for i in range(llama["num_hidden_layers"]):
        at = f"layers.{i}."
        h = x
        if third and i == 0:
            normed = norm(x, t[at + "hidden_norm.weight"], eps)
            h = torch.cat((norm(embedded, t[at + "input_layernorm.weight"], eps), normed), -1)
            x = normed if flags.get("norm_before_residual") else x
        elif at + "input_layernorm.weight" in t:
            h = norm(x, t[at + "input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"{at}self_attn.{p}_proj") for p in "qkv")
        dim = q.shape[-1] // heads
        theta = llama.get("rope_theta", 10000.0)
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # fp32, as transformers does
        turn = torch.arange(n)[:, None] * frequencies.double()

        def rotated(y: torch.Tensor, count: int, turn: torch.Tensor = turn, dim: int = dim) -> torch.Tensor:
            pairs = (
                torch.complex(*y.view(n, count, dim).chunk(2, -1)) * torch.polar(torch.ones(()).double(), turn)[:, None]
            )
            return torch.cat((pairs.real, pairs.imag), -1)

        q, k, v = rotated(q, heads), rotated(k, kv_heads), v.view(n, kv_heads, dim)
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = (q[:, head] @ k[:, shared].T / math.sqrt(dim)).masked_fill(
                ~torch.ones(n, n).tril().bool(), -math.inf
            )
            mixed.append(scores.softmax(-1) @ v[:, shared])
        x = x + linear(torch.cat(mixed, -1), at + "self_attn.o_proj")
        h = norm(x, t[at + "post_attention_layernorm.weight"], eps)
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    if not third:
        return x, x
    out = norm(x, t["norm.weight"], eps)
    return (out if flags.get("norm_output") else x), out


def plain_chain(
    config: Mapping[str, Any],
    tensors: Tensors,
    features: torch.Tensor,
    text: Sequence[int],
    drafted: Sequence[int],
    embedding: torch.Tensor,
) -> list[torch.Tensor]:
    """States that the logits of each draft token are read from: after ``text``, then after each of ``drafted``.

    ``features`` [len(text) - 1, H] are the target's, as the head takes them.
    """
    states = []
    tokens = list(text[1:])
    for token in (*drafted, None):
        fed, read_out = plain_rows(config, tensors, features, embedding[torch.tensor(tokens)])
        states.append(read_out[-1])
        if token is not None:
            features = torch.cat((features, fed[-1:]))
            tokens.append(token)
    return states
