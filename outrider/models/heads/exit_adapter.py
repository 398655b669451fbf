"""Kangaroo's exit adapter: attention between two norms, from a hidden state early in the target to its output head.

Source: Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", 2024; names and order as in
its published code. Row p reads the target's hidden state at position p, after the exit layer and before any norm:
``x + attention(norm(x))`` without an MLP, then the adapter's own final norm, then the target's output head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.core.errors import ModelFileError
from outrider.core.types import Batch
from outrider.models.config import ModelConfig
from outrider.models.heads.files import HeadFiles, HeadWeights
from outrider.models.hf_config import config_from_hf
from outrider.models.load import LoadedModel
from outrider.models.rope import rope_frequencies
from outrider.models.values import MAX_LAYERS, whole
from outrider.ops.contract import LayerKV, LayerShape, LayerStack, LayerWeights, Ops, Weight


@dataclass(frozen=True, eq=False)
class ExitAdapter:
    """The weights of one adapter. H is the target's width, ``norm`` [H]; ``output`` [V,H] is the target's head.

    ``layer`` is a decoder layer whose MLP has one unit of zeros, which adds nothing: so any implementation runs it.
    """

    ops: Ops
    config: ModelConfig
    layer: LayerWeights
    norm: torch.Tensor
    output: Weight
    inv_freq: torch.Tensor
    rope_scale: float
    weight_bytes: int

    def stack(self, kv: LayerKV) -> LayerStack:
        """The layer over its own KV: what ``forward`` takes."""
        c = self.config
        return LayerStack((self.layer,), (LayerShape(c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps, None),), (kv,))

    def forward(self, states: torch.Tensor, batch: Batch, stack: LayerStack) -> torch.Tensor:
        """The target's hidden states [N,H] of the rows of ``batch``: writes their KV, and returns [N,H]."""
        positions = torch.from_numpy(batch.positions).to(states.device)
        rope = self.ops.rope_table(self.inv_freq, self.rope_scale, positions)
        return self.ops.decoder_layers(states.contiguous(), stack, rope, batch)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N,V] from what ``forward`` returns."""
        return self.ops.linear(self.ops.rms_norm(x, self.norm, self.config.norm_eps), self.output)


def load_exit_adapter(name: str, target: LoadedModel, exit_layer: int) -> ExitAdapter:
    """Reads an adapter for the states of ``target`` after its first ``exit_layer`` layers.

    Raises ModelFileError where a tensor is missing, left over or of another shape than config and target ask for, and
    where the config names another exit layer.
    """
    files, decoder = HeadFiles.open(name), target.decoder
    config = _config(files, target, exit_layer)
    weights = HeadWeights(files, decoder, None)
    hidden, q, kv = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    at = "layers.0.self_attn.{}_proj.weight"
    nothing = torch.zeros(1, hidden, dtype=decoder.dtype, device=decoder.device)
    layer = LayerWeights(
        input_norm=weights.vector("layers.0.input_layernorm.weight", hidden),
        q=weights.matrix(at.format("q"), q, hidden),
        k=weights.matrix(at.format("k"), kv, hidden),
        v=weights.matrix(at.format("v"), kv, hidden),
        o=weights.matrix(at.format("o"), hidden, q),
        post_norm=torch.ones_like(nothing[0]),
        gate=nothing,
        up=nothing,
        down=nothing.T.contiguous(),
    )
    norm = weights.vector("norm.weight", hidden)
    files.finish()
    inv_freq, rope_scale = rope_frequencies(config.rope, config.head_dim, config.max_position)
    wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
    return ExitAdapter(
        ops=decoder.ops,
        config=config,
        layer=layer,
        norm=norm,
        output=decoder.head,
        inv_freq=inv_freq.to(decoder.device, wide),
        rope_scale=rope_scale,
        weight_bytes=weights.nbytes,
    )


def _config(files: HeadFiles, target: LoadedModel, exit_layer: int) -> ModelConfig:
    """The adapter's shape: a Llama config, as Kangaroo's code reads it, with an optional ``exit_layer``."""
    config = config_from_hf({**files.config, "architectures": ["LlamaForCausalLM"]}, files.where)
    trained_for = files.config.get("exit_layer")
    if trained_for is not None:
        trained_for = whole(trained_for, f"{files.where}: exit_layer", 1, MAX_LAYERS)
    for key, given, wanted in (
        ("num_hidden_layers", config.n_layers, 1),
        ("attention_bias", config.qkv_bias, False),
    ):
        if given != wanted:
            raise ModelFileError(f"{files.where}: {key} is {str(given).lower()}; supported is {str(wanted).lower()}")
    if config.hidden_size != target.config.hidden_size:
        raise ModelFileError(
            f"{files.where}: hidden_size is {config.hidden_size}; the target {target.name} has "
            f"{target.config.hidden_size}"
        )
    if config.vocab_size < target.n_tokens:
        raise ModelFileError(
            f"{files.where}: vocab_size is {config.vocab_size}; the target {target.name} has {target.n_tokens} tokens"
        )
    if trained_for not in (None, exit_layer):
        raise ModelFileError(f"{files.where}: exit_layer is {trained_for}; the setting exit_layer is {exit_layer}")
    return config
