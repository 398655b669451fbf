"""Checkpoints of drafting heads for toy targets: random ones, and ones fitted so that they are often right."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.runtime.runner import Runner
from tests.models.eagle_plain import plain_rows

Tensors = dict[str, torch.Tensor]


def noise(seed: int, *shape: int, std: float = 0.4) -> torch.Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def write_head(folder: Path, config: Mapping[str, Any], tensors: Tensors, pickled: str = "") -> Path:
    """A folder with ``config.json`` and the tensors, as safetensors or as the pickle file called ``pickled``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / pickled)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


_KEPT: dict[str, tempfile.TemporaryDirectory[str]] = {}


def kept(kind: str, decoder: Decoder, write: Callable[[Path], object]) -> Path:
    """The folder that ``write`` fills for this target: once for all targets of the same weights."""
    features, _ = run_through(decoder, [1, 2, 3], (decoder.config.n_layers - 1,))
    key = f"{kind}-{hashlib.blake2b(features.numpy().tobytes(), digest_size=8).hexdigest()}"
    if key not in _KEPT:
        _KEPT[key] = tempfile.TemporaryDirectory(prefix=f"outrider-{key}-")
        write(Path(_KEPT[key].name))
    return Path(_KEPT[key].name)


def run_through(
    decoder: Decoder, tokens: list[int], layers: tuple[int, ...], kv_cache_dtype: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [len, F] after ``layers`` and the next greedy token i64[len] of one pass over ``tokens``."""
    size = len(tokens)
    seq = Sequence(0, tokens, size, SamplingParams(), SpecParams(), 0, blocks=[0])
    out = Runner(decoder, 1, size, kv_cache_dtype).forward([Span(seq, 0, size)], layers)
    assert out.features is not None
    hidden = out.features[:, -decoder.config.hidden_size :]
    return out.features.double(), decoder.logits(hidden).argmax(-1)


@functools.cache
def greedy_texts(decoder: Decoder, count: int = 24, length: int = 32) -> tuple[tuple[int, ...], ...]:
    """Random beginnings of 4 tokens, each followed by what the target says."""
    rng, vocab = random.Random(5), decoder.config.vocab_size
    starts = [[rng.randrange(vocab) for _ in range(4)] for _ in range(count)]
    seqs = [Sequence(i, t, 4, SamplingParams(), SpecParams(), 0, blocks=[i]) for i, t in enumerate(starts)]
    runner = Runner(decoder, count, length)
    while len(seqs[0]) < length:
        rows = runner.forward([Span(seq, seq.n_computed, len(seq) - seq.n_computed) for seq in seqs]).logits
        for seq, token in zip(seqs, rows.argmax(-1).tolist(), strict=True):
            seq.n_computed = len(seq)
            seq.tokens.append(token)
    return tuple(tuple(seq.tokens) for seq in seqs)


def final_norm(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    wide = hidden.double()
    scaled = wide / (wide.square().mean(-1, keepdim=True) + decoder.config.norm_eps).sqrt()
    return scaled * decoder.final_norm.double()


def ridge(x: torch.Tensor, y: torch.Tensor, weight: float = 1e-2) -> torch.Tensor:
    """The matrix [out, in] that best maps rows of ``x`` [N,in] to rows of ``y`` [N,out]."""
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + weight * eye, x.T @ y).T


def medusa_config(heads: int, layers: int = 1, **more: Any) -> dict[str, Any]:
    return {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "toy", **more}


def fitted_medusa(decoder: Decoder, heads: int = 3) -> Path:
    """Heads for this target whose output matrices are fitted to its greedy texts; random residual blocks."""
    return kept("medusa", decoder, lambda folder: _write_medusa(folder, decoder, heads))


def _write_medusa(folder: Path, decoder: Decoder, heads: int) -> None:
    last, size, vocab = decoder.config.n_layers - 1, decoder.config.hidden_size, decoder.config.vocab_size
    tensors: Tensors = {}
    features = [final_norm(decoder, run_through(decoder, list(t), (last,))[0]) for t in greedy_texts(decoder)]
    for head in range(heads):
        weight, bias = noise(head, size, size, std=0.1), noise(head + 50, size, std=0.1)
        ahead = head + 2
        x = torch.cat([f[:-ahead] for f in features])
        x = x + torch.nn.functional.silu(x @ weight.T + bias)
        wanted = torch.cat([torch.tensor(t[ahead:]) for t in greedy_texts(decoder)])
        fit = ridge(x, torch.nn.functional.one_hot(wanted, vocab).double())
        tensors |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias, f"{head}.1.weight": fit}
    write_head(folder, medusa_config(heads), tensors)


def llama_values(config: ModelConfig, layers: int = 1, **more: Any) -> dict[str, Any]:
    """The keys of a Llama config for a head beside a target of this config."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        **more,
    }


def layer_tensors(values: Mapping[str, Any], seed: int, std: float = 0.3, third: bool = False) -> Tensors:
    """Random ``layers.*`` of an EAGLE head; with ``third`` the first reads twice the width."""
    hidden, ffn = values["hidden_size"], values["intermediate_size"]
    kv = hidden // values["num_attention_heads"] * values["num_key_value_heads"]
    tensors: Tensors = {}
    for i in range(values["num_hidden_layers"]):
        into = 2 * hidden if third and i == 0 else hidden
        shapes = {"q": (hidden, into), "k": (kv, into), "v": (kv, into), "o": (hidden, hidden)}
        named = {f"self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
        named |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
        named |= {"mlp.down_proj.weight": (hidden, ffn)}
        for at, (name, shape) in enumerate(named.items()):
            tensors[f"layers.{i}.{name}"] = noise(1000 * seed + 20 * i + at, *shape, std=std)
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if third or i else []
        norms += ["hidden_norm"] if third and i == 0 else []
        for at, name in enumerate(norms):
            tensors[f"layers.{i}.{name}.weight"] = 1 + noise(1000 * seed + 20 * i + 15 + at, hidden, std=0.2)
    return tensors


def embedding_of(decoder: Decoder) -> torch.Tensor:
    """The target's embedding table [V,H]."""
    return decoder.ops.embed(decoder.embedding, torch.arange(decoder.config.vocab_size)).double()


def fitted_eagle(decoder: Decoder) -> Path:
    """An EAGLE head whose ``fc`` is fitted to the target's next feature; its layer adds a little noise."""
    return kept("eagle", decoder, lambda folder: _write_eagle(folder, decoder))


def _write_eagle(folder: Path, decoder: Decoder) -> None:
    c, table = decoder.config, embedding_of(decoder)
    pairs, wanted = [], []
    for text in greedy_texts(decoder):
        feature = final_norm(decoder, run_through(decoder, list(text), (c.n_layers - 1,))[0])
        pairs.append(torch.cat((table[torch.tensor(text[1:])], feature[:-1]), -1))
        wanted.append(feature[1:])
    values = llama_values(c, bias=False)
    tensors = {"fc.weight": ridge(torch.cat(pairs), torch.cat(wanted)), **layer_tensors(values, 3, std=0.05)}
    write_head(folder, values, tensors)


def eagle3_values(config: ModelConfig, rows: int, layers: int = 1, **more: Any) -> dict[str, Any]:
    """A config of EAGLE-3 whose output has ``rows`` tokens; it reads what layers 2, 1 + n/2 and n (from 1) put out."""
    read = sorted({2, 1 + config.n_layers // 2, config.n_layers})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_values(config, layers),
        "draft_vocab_size": rows,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": read},
        **more,
    }


def eagle3_tensors(values: Mapping[str, Any], target: ModelConfig, seed: int, std: float = 0.3) -> Tensors:
    """Random tensors of EAGLE-3, a trimmed vocabulary's map among them."""
    hidden, rows, vocab = values["hidden_size"], values["draft_vocab_size"], values["vocab_size"]
    read = len(values["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    tensors = {
        "fc.weight": noise(seed, hidden, read * target.hidden_size, std=0.2),
        "norm.weight": 1 + noise(seed + 1, hidden, std=0.2),
        "lm_head.weight": noise(seed + 2, rows, hidden),
    }
    for name, tensor in layer_tensors(values, seed, std, third=True).items():
        tensors[name.replace("layers.0.", "midlayer.")] = tensor
    if rows < vocab:
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:rows].sort().values
        tensors["d2t"] = ids - torch.arange(rows)
        tensors["t2d"] = torch.isin(torch.arange(vocab), ids)
    return tensors


def fitted_eagle3(decoder: Decoder) -> Path:
    """A random EAGLE-3 head with three quarters of the tokens, fitted to the target's greedy texts."""
    return kept("eagle3", decoder, lambda folder: _write_eagle3(folder, decoder))


def _write_eagle3(folder: Path, decoder: Decoder) -> None:
    c, table = decoder.config, embedding_of(decoder)
    values = eagle3_values(c, rows=c.vocab_size * 3 // 4)
    tensors = eagle3_tensors(values, c, seed=4)
    read = tuple(i - 1 for i in values["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    states, wanted = [], []
    for text in greedy_texts(decoder):
        features = run_through(decoder, list(text), read)[0][:-2] @ tensors["fc.weight"].T
        states.append(plain_rows(values, tensors, features, table[torch.tensor(text[1:-1])])[1])
        wanted.append((torch.tensor(text[2:])[:, None] == ids).double())
    tensors["lm_head.weight"] = 8 * ridge(torch.cat(states), torch.cat(wanted))
    write_head(folder, values, tensors)


def adapter_values(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """A config of an exit adapter."""
    return llama_values(config, pad_token_id=0, architectures=["LlamaForCausalLM"], **more)


def adapter_tensors(values: Mapping[str, Any], seed: int, std: float = 0.3) -> Tensors:
    """Random tensors of an exit adapter: those of a layer without MLP, and a final norm."""
    hidden = values["hidden_size"]
    tensors = {
        name: tensor
        for name, tensor in layer_tensors({**values, "num_hidden_layers": 1}, seed, std).items()
        if "self_attn" in name
    }
    for at, name in enumerate(("layers.0.input_layernorm.weight", "norm.weight")):
        tensors[name] = 1 + noise(1000 * seed + 30 + at, hidden, std=0.2)
    return tensors


def random_adapter(decoder: Decoder) -> Path:
    """An exit adapter that changes the target's states somewhat."""
    values = adapter_values(decoder.config)
    return kept("adapter", decoder, lambda folder: write_head(folder, values, adapter_tensors(values, 6, std=0.1)))
