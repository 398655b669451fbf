"""The decoder: one class for the Llama, Mistral, Qwen2 and Qwen3 families, driven by its config."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch

from outrider.core.errors import ModelFileError, SettingError
from outrider.core.types import Batch, ForwardOut
from outrider.models.config import ModelConfig
from outrider.models.rope import rope_frequencies
from outrider.models.source import Keep, TensorSource
from outrider.ops.contract import LayerKV, LayerShape, LayerStack, LayerWeights, ModelEnds, Ops, StoredMatrix, Weight

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_LINEAR = frozenset(("q", "k", "v", "o", "gate", "up", "down"))
_BYTES = {"int8": 1.0, "int4": 0.625}  # of a weight; int4 with its groups' scales and minimums


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each field of ``LayerWeights`` that a layer of this model has."""
    c = config
    q, kv, hidden, ffn = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "post_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if c.qkv_bias:
        shapes.update(q_bias=(q,), k_bias=(kv,), v_bias=(kv,))
    if c.o_bias:
        shapes.update(o_bias=(hidden,))
    if c.mlp_bias:
        shapes.update(gate_bias=(ffn,), up_bias=(ffn,), down_bias=(hidden,))
    if c.qk_norm:
        shapes.update(q_norm=(c.head_dim,), k_norm=(c.head_dim,))
    return shapes


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold, by its Hugging Face name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = shapes[EMBEDDING]
    one_layer = layer_shapes(config)
    for layer in range(config.n_layers):
        shapes.update({_name(layer, field): shape for field, shape in one_layer.items()})
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype, quantization: str | None = None) -> int:
    """Memory that the weights of such a model need, bytes (those in 8 bits without their scales)."""
    wide, linear_bytes = dtype.itemsize, _BYTES.get(quantization or "", dtype.itemsize)
    layer = {field: math.prod(shape) for field, shape in layer_shapes(config).items()}
    linear = config.n_layers * sum(n for field, n in layer.items() if field in _LINEAR)
    others = config.n_layers * sum(layer.values()) - linear + config.hidden_size
    head = config.vocab_size * config.hidden_size
    embedding = 0 if config.tie_embeddings else head
    return int(linear * linear_bytes + head * (1 if quantization else wide) + (others + embedding) * wide)


def _name(layer: int, field: str) -> str:
    return f"model.layers.{layer}.{_LAYER_NAMES[field]}"


class Decoder:
    """Weights of one model on one device, and its forward pass.

    ``embedding`` [V,H], ``layers``, ``final_norm`` [H], ``head`` [V,H] (the embedding itself where they are tied).
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Weight,
        layers: Sequence[LayerWeights],
        final_norm: torch.Tensor,
        head: Weight,
    ) -> None:
        self.config, self.ops = config, ops
        self.embedding, self.layers, self.final_norm, self.head = embedding, tuple(layers), final_norm, head
        inv_freq, self.rope_scale = rope_frequencies(config.rope, config.head_dim, config.max_position)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.inv_freq = inv_freq.to(self.device, wide)
        self.ends = ModelEnds(embedding, self.inv_freq, self.rope_scale, final_norm, config.norm_eps, head)
        self.shapes = tuple(
            LayerShape(config.n_heads, config.n_kv_heads, config.head_dim, config.norm_eps, config.window(layer))
            for layer in range(config.n_layers)
        )

    @classmethod
    def from_source(
        cls,
        source: TensorSource,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: str | None = None,
        keep: Keep = lambda name, shape, pack: pack(),
        progress: Callable[[int, int], None] = lambda done, layers: None,
    ) -> Decoder:
        """Reads every tensor of ``source``; with ``quantization`` the linear weights are packed in 8 or 4 bits.

        The output head (the embedding too, where they are tied) then has 8 bits: in 4 it costs more quality than it
        saves time. Quantized weights go through ``keep``; ``progress`` is told how many layers of how many are done.

        Raises ModelFileError when a tensor is missing, unexpected, of another shape or not of a floating type.
        """
        config = source.config
        check_tensors(source)

        def floating(name: str) -> torch.Tensor:
            tensor = source.get(name)
            if not tensor.is_floating_point():
                raise ModelFileError(f"{source.where}: tensor {name} is {tensor.dtype}; allowed are floating types")
            return tensor

        def vector(name: str) -> torch.Tensor:
            return floating(name).to(device, work).contiguous()

        def matrix(name: str, quantization: str | None = None) -> Weight:
            def pack() -> Weight:
                stored = StoredMatrix(lambda: floating(name), source.blocks(name))
                try:
                    return ops.matrix(stored, dtype, torch.device(device), quantization)
                except SettingError:
                    raise
                except ValueError as error:
                    raise ModelFileError(f"{source.where}: tensor {name} cannot be packed: {error}") from error

            weight = pack() if quantization is None else keep(name, source.shape(name), pack)
            source.drop()
            return weight

        def layer_weights(layer: int) -> LayerWeights:
            progress(layer, config.n_layers)
            weights: dict[str, Any] = {}
            for field in layer_shapes(config):
                name = _name(layer, field)
                weights[field] = matrix(name, quantization) if field in _LINEAR else vector(name)
            return LayerWeights(**weights)

        work = ops.compute_dtype(dtype)
        layers = [layer_weights(layer) for layer in range(config.n_layers)]
        progress(config.n_layers, config.n_layers)
        for_head = None if quantization is None else "int8"
        embedding = matrix(EMBEDDING, for_head if config.tie_embeddings else None)
        head = embedding if config.tie_embeddings else matrix(HEAD, for_head)
        return cls(config, ops, embedding, layers, vector(FINAL_NORM), head)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and norms."""
        return self.final_norm.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values, unless told otherwise."""
        return self.ops.kv_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    @cached_property
    def weight_bytes(self) -> int:
        """Memory of all weights, bytes; a tied head counts once."""
        weights: list[Weight | None] = [self.embedding, self.final_norm, self.head]
        weights += [getattr(layer, f.name) for layer in self.layers for f in fields(layer)]
        return sum({id(weight): weight.nbytes for weight in weights if weight is not None}.values())

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A model of only these layers, in this order, between the same embedding and head; weights are shared."""
        windows = tuple(self.config.window(layer) for layer in layers) if self.config.sliding_window else ()
        config = replace(self.config, n_layers=len(layers), sliding_window=windows)
        kept = [self.layers[layer] for layer in layers]
        return Decoder(config, self.ops, self.embedding, kept, self.final_norm, self.head)

    def stacks(self, kv: Sequence[LayerKV], feature_layers: tuple[int, ...] = ()) -> tuple[LayerStack, ...]:
        """The layers over ``kv`` (one entry a layer), cut after each of ``feature_layers``: what ``run`` takes.

        Raises ValueError for a layer that the model does not have.
        """
        n = len(self.layers)
        if not all(0 <= layer < n for layer in feature_layers):
            raise ValueError(f"feature_layers is {feature_layers}; allowed are 0 to {n - 1}")
        ends = sorted({*(layer + 1 for layer in feature_layers), n})
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return tuple(LayerStack(self.layers[part], self.shapes[part], tuple(kv[part])) for part in parts)

    def forward(self, batch: Batch, kv: Sequence[LayerKV], feature_layers: tuple[int, ...] = ()) -> ForwardOut:
        """One pass over the rows of ``batch``: writes their KV into ``kv`` (one entry a layer), returns logits [M,V].

        ``features`` [N,F] are the hidden states after the layers ``feature_layers`` (0 = after the first layer, before
        any final norm), side by side in the order given.
        """
        return self.run(batch, self.stacks(kv, feature_layers), feature_layers)

    def run(self, batch: Batch, stacks: Sequence[LayerStack], feature_layers: tuple[int, ...] = ()) -> ForwardOut:
        """``forward`` over ``stacks(kv, feature_layers)`` that were made before."""
        order = sorted(set(feature_layers))
        return self.ops.forward(self.ends, stacks, batch, [order.index(layer) for layer in feature_layers])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head on hidden states [M,H] of the last layer: [M,V]."""
        if not len(hidden):  # a pass over the middle of a prompt
            return hidden.new_empty(0, self.config.vocab_size)
        return self.ops.linear(self.ops.rms_norm(hidden, self.final_norm, self.config.norm_eps), self.head)


def check_tensors(source: TensorSource) -> None:
    """Raises ModelFileError unless ``source`` holds the tensors that its config asks for, and no others."""
    given, layers = set(source.names()), source.config.n_layers
    if layers > len(given):  # before the list of what is expected grows as long as a stranger says
        raise ModelFileError(f"{source.where} holds {len(given)} tensors; the config asks for {layers} layers")
    expected = expected_tensors(source.config)
    missing = [name for name in expected if name not in given]
    if missing:
        first, more = missing[0], f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(f"{source.where} lacks tensor {first} of shape {_shown(expected[first])}{more}")
    for name in sorted(given):
        shape, wanted = source.shape(name), expected.get(name)
        if wanted is None and name == HEAD:
            wanted = expected[EMBEDDING]  # a tied head that was saved all the same
        if wanted is None and not name.endswith("rotary_emb.inv_freq"):
            raise ModelFileError(
                f"{source.where} holds an unexpected tensor {name} of shape {_shown(shape)}; "
                f"a {source.config.architecture} model with this config has no such tensor"
            )
        if wanted is not None and shape != wanted:
            raise ModelFileError(
                f"{source.where}: tensor {name} has shape {_shown(shape)}; the config asks for {_shown(wanted)}"
            )


def _shown(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
