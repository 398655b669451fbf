"""Decoder weights from a GGUF file, under Hugging Face's names and in Hugging Face's row order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.errors import ModelFileError, nearest
from outrider.models.config import ModelConfig, RopeConfig
from outrider.models.gguf_file import GGUFFile, end_ids, named_id
from outrider.models.rope import MAX_FACTOR, MIN_FACTOR
from outrider.models.values import MAX_LAYERS, MAX_SIZE, real, shown, whole

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Known values of ``general.architecture``; ``llama`` is also Mistral's, Llama 3's and SmolLM2's."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3_ORIGINAL_CONTEXT = 8192
_LLAMA3_TOLERANCE = 1e-4  # relative


class GGUFSource:
    """A TensorSource over one GGUF file (architectures: see ``ARCHITECTURES``).

    ``metadata`` is the file's own, as plain Python values (the tokenizer is in it). Raises ModelFileError for a file
    that is damaged, truncated, or of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.metadata: Mapping[str, Any] = self._file.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelFileError(f"{path} has architecture {shown(architecture)}, which is unknown; known are {known}")
        self._names = MappingProxyType(_rename(self._file))
        self._config = _Reading(self._file, self._names).config()

    @property
    def where(self) -> str:
        return str(self._file.path)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> Iterable[str]:
        """Every tensor, under its Hugging Face name."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, [out, in] for a linear weight."""
        return self._file.tensors[self._stored(name)].shape

    def raw(self, name: str) -> tuple[str, NDArray[np.uint8]]:
        """The type's name (``Q4_1``, ...) and the stored blocks u8[out, bytes of a row], rows in Hugging Face's order.

        A view of the file where the order is the file's own, else a copy.
        """
        info = self._file.tensors[self._stored(name)]
        data = self._file.data(info)
        heads = self._interleaved_heads(name)
        if heads:
            rows = info.shape[0]
            if rows != heads * self.config.head_dim or (len(info.shape) == 1 and info.type.block > 1):
                raise ModelFileError(
                    f"{self.where}: tensor {shown(info.name)} has {rows} rows of type {info.type.name}, "
                    f"{heads} heads of {self.config.head_dim} are expected"
                )
            # A row is a whole number of blocks, so that rows can change places without decoding them.
            split = data.reshape(heads, self.config.head_dim // 2, 2, -1)
            data = split.swapaxes(1, 2).reshape(data.shape)
        return info.type.name, data

    def blocks(self, name: str) -> tuple[str, NDArray[np.uint8]] | None:
        """The stored blocks of a quantized tensor, see ``raw``."""
        return self.raw(name) if self._file.tensors[self._stored(name)].type.block > 1 else None

    def get(self, name: str) -> torch.Tensor:
        """The tensor: fp32 for quantized types, else the stored floating type."""
        kind, data = self.raw(name)
        if kind == "BF16":
            return torch.from_numpy(np.array(data.view("<i2"))).view(torch.bfloat16)
        if kind in ("F32", "F16"):
            return torch.from_numpy(np.array(data.view("<f4" if kind == "F32" else "<f2")))
        with np.errstate(over="ignore", invalid="ignore"):  # odd scales are the file's matter
            dense = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float32))

    def drop(self) -> None:
        """See ``TensorSource``."""
        self._file.drop()

    def _stored(self, name: str) -> str:
        """The file's own name of a tensor."""
        stored = self._names.get(name)
        if stored is None:
            raise ModelFileError(f"{self.where} has no tensor '{name}'{nearest(name, self._names)}")
        return stored

    def _interleaved_heads(self, name: str) -> int:
        """Heads in a tensor whose rows are stored for interleaved rotary pairs (2i, 2i+1); 0 for any other tensor.

        Only the ``llama`` architecture is stored so, and only its Q and K; ours are the halves (i, i + head dim / 2).
        """
        if self.config.architecture != "llama":
            return 0
        if ".q_proj." in name:
            return self.config.n_heads
        return self.config.n_kv_heads if ".k_proj." in name else 0


def _rename(file: GGUFFile) -> dict[str, str]:
    """Hugging Face name -> the file's name, for every tensor; one that no decoder of ours has is an error."""
    names: dict[str, str] = {}
    for stored in file.tensors:
        if stored == _ROPE_FREQS:
            continue  # goes into the RopeConfig
        name = _GLOBAL_NAMES.get(stored)
        match = _LAYER_PATTERN.fullmatch(stored)
        if match and match[2] in _LAYER_NAMES:
            part = _LAYER_NAMES[match[2]]
            if match[3] == "weight" or part.endswith("_proj"):
                name = f"model.layers.{match[1]}.{part}.{match[3]}"
        if name is None:
            raise ModelFileError(
                f"{file.path} has tensor {shown(stored)}, which a {file.metadata['general.architecture']} decoder "
                "without experts does not have"
            )
        names[name] = stored
    return names


class _Reading:
    """Reads a ModelConfig off the metadata and the tensors that are there."""

    def __init__(self, file: GGUFFile, names: Mapping[str, str]) -> None:
        self.file = file
        self.names = names
        self.architecture: str = file.metadata["general.architecture"]

    def config(self) -> ModelConfig:
        if self.file.metadata.get("split.count", 1) not in (0, 1):
            raise self.bad("split.count", "one file: merge the parts first")
        embedding = self.file.tensors.get("token_embd.weight")
        hidden = self.whole("embedding_length")
        if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
            shape = list(embedding.shape) if embedding else None
            raise ModelFileError(f"{self.file.path}: token_embd.weight is {shape}; expected is [vocabulary, {hidden}]")
        vocab = embedding.shape[0]
        heads = self.whole("attention.head_count")
        kv_heads = self.whole("attention.head_count_kv", heads)
        head_dim = self.whole("attention.key_length", hidden // heads or 1)
        if heads % kv_heads or head_dim % 2:
            raise ModelFileError(
                f"{self.file.path} has {heads} heads of {head_dim} over {kv_heads} KV heads; the heads must be a "
                "multiple of the KV heads and their size even"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.whole(key, head_dim) != head_dim:
                raise self.bad(f"{self.architecture}.{key}", f"the head dimension, {head_dim}")
        layers = self.layers()
        context = self.whole("context_length")
        window = self.whole("attention.sliding_window", 0, low=0)
        first = "model.layers.0."
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self.whole("feed_forward_length"),
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=context,
            norm_eps=self.real("attention.layer_norm_rms_epsilon", high=1.0),
            rope=self.rope(head_dim, context),
            qkv_bias=first + "self_attn.q_proj.bias" in self.names,
            o_bias=first + "self_attn.o_proj.bias" in self.names,
            mlp_bias=first + "mlp.gate_proj.bias" in self.names,
            qk_norm=first + "self_attn.q_norm.weight" in self.names,
            tie_embeddings="lm_head.weight" not in self.names,
            sliding_window=(window,) * layers if window else (),
            bos_id=named_id(self.file.metadata, "bos", vocab, f"{self.file.path}: "),
            eos_ids=end_ids(self.file.metadata, vocab, f"{self.file.path}: "),
        )

    def layers(self) -> int:
        """The number of layers, which the tensors must bear out."""
        count = self.whole("block_count", high=MAX_LAYERS)
        found = {int(match[1]) for match in map(_LAYER_PATTERN.fullmatch, self.file.tensors) if match}
        if len(found) != count or max(found) != count - 1:
            raise self.bad(f"{self.architecture}.block_count", f"the number of layers that have tensors, {len(found)}")
        return count

    def rope(self, head_dim: int, context: int) -> RopeConfig:
        """The rotary embedding; a factor without a scaling type means linear."""
        theta = self.real("rope.freq_base", 10000.0)
        old_factor = self.real("rope.scale_linear", 1.0, MIN_FACTOR, MAX_FACTOR)
        factor = self.real("rope.scaling.factor", old_factor, MIN_FACTOR, MAX_FACTOR)
        key = f"{self.architecture}.rope.scaling.type"
        kind = self.file.metadata.get(key, "linear")
        if kind not in ("none", "linear", "yarn"):
            raise self.bad(key, "none, linear or yarn")
        plain = kind == "none" or factor == 1.0
        if _ROPE_FREQS in self.file.tensors:
            if not plain:
                raise self.bad(key, f"none beside the tensor {_ROPE_FREQS}")
            return self.llama3_rope(theta, head_dim)
        if plain:
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor)
        if theta <= 1.0:  # the formula divides by its logarithm
            raise self.bad(f"{self.architecture}.rope.freq_base", "a number above 1 with yarn")
        # The stored attention factor multiplies the usual one, 0.1 ln(factor) + 1; RopeConfig wants the product.
        attention = self.real("rope.scaling.yarn_attn_factor", 1.0)
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=self.whole("rope.scaling.original_context_length", context),
            beta_fast=self.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.real("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0),
        )

    def llama3_rope(self, theta: float, head_dim: int) -> RopeConfig:
        """The Llama 3 scaling whose divisors the file stores as a tensor f32[head_dim / 2].

        Its greatest divisor is the factor; the other numbers are those of all Llama 3 models, and are verified.
        """
        info = self.file.tensors[_ROPE_FREQS]
        if info.shape != (head_dim // 2,) or info.type.name != "F32":
            raise ModelFileError(
                f"{self.file.path}: {_ROPE_FREQS} is {info.type.name} {list(info.shape)}; expected is F32 "
                f"[{head_dim // 2}]"
            )
        stored = self.file.data(info).view("<f4").astype(np.float64)
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(stored.max()),
            original_max_position=self.whole("rope.scaling.original_context_length", _LLAMA3_ORIGINAL_CONTEXT),
        )
        with np.errstate(all="ignore"):  # nonsense in the file gives nan, which equals nothing
            follows = np.allclose(stored, _llama3_divisors(rope, head_dim), rtol=_LLAMA3_TOLERANCE, atol=0.0)
        if not follows or not 1.0 <= rope.factor <= MAX_FACTOR:
            raise ModelFileError(
                f"{self.file.path}: {_ROPE_FREQS} does not follow the Llama 3 formula, the only one known"
            )
        return rope if rope.factor > 1.0 else RopeConfig(theta=theta)

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number of the architecture's; without a default it must be there."""
        full = f"{self.architecture}.{key}"
        return whole(self.given(full, default), f"{self.file.path}: {full}", low, high)

    def real(self, key: str, default: float | None = None, low: float = 1e-12, high: float = 1e12) -> float:
        """A positive number of the architecture's; a 32-bit one as its shortest decimal (1e-05, not 9.99e-06)."""
        full = f"{self.architecture}.{key}"
        value = real(self.given(full, default), f"{self.file.path}: {full}", low, high)
        short = np.float32(value)
        return float(str(short)) if float(short) == value else value

    def given(self, full: str, default: object) -> object:
        """The value of a key, or its default. Raises ModelFileError for a missing key without one."""
        if full not in self.file.metadata and default is None:
            raise self.bad(full, "a number")
        return self.file.metadata.get(full, default)

    def bad(self, key: str, allowed: str) -> ModelFileError:
        given = shown(self.file.metadata[key]) if key in self.file.metadata else "missing"
        return ModelFileError(f"{self.file.path}: {key} is {given}; expected is {allowed}")


def _llama3_divisors(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """What Llama 3 divides each rotary frequency by, f64[head_dim / 2]: 1 for short wavelengths, the factor for long
    ones, and a blend between (the published Llama 3.1 reference scaling)."""
    original = rope.original_max_position or _LLAMA3_ORIGINAL_CONTEXT
    frequency = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = original * frequency / (2.0 * np.pi)
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1.0 / ((1.0 - blend) / rope.factor + blend)
    return divisors
