"""EAGLE's checkpoints: EAGLE-1 and 2, EAGLE-3, and the ``speculators`` form of it. Every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.core.errors import ModelFileError
from outrider.models.config import ModelConfig
from outrider.models.heads.eagle import EagleHead, HeadLayer, Linear
from outrider.models.heads.files import HeadFiles, HeadWeights
from outrider.models.hf_config import config_from_hf
from outrider.models.load import LoadedModel
from outrider.models.values import MAX_SIZE, shown, whole
from outrider.ops.contract import Weight

_EAGLE3 = ("LlamaForCausalLMEagle3",)
_SPECULATORS = ("eagle3",)


def load_eagle(name: str, target: LoadedModel, quantization: str | None = None) -> EagleHead:
    """Reads a head for ``target``. What the file leaves out (embedding, output matrix) is the target's own.

    Raises ModelFileError where a tensor is missing, left over or of another shape than config and target ask for.
    """
    return eagle_from_files(HeadFiles.open(name), target, quantization)


def eagle_from_files(files: HeadFiles, target: LoadedModel, quantization: str | None = None) -> EagleHead:
    """``load_eagle`` from files that are open."""
    reading = _Reading(files, target, quantization)
    kind = files.config.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS:
        raise ModelFileError(f"{files.where}: speculators_model_type is {shown(kind)}; allowed is eagle3")
    third = kind is not None or tuple(files.config.get("architectures") or ()) == _EAGLE3
    return reading.third(speculators=kind is not None) if third else reading.first()


class _Reading:
    def __init__(self, files: HeadFiles, target: LoadedModel, quantization: str | None) -> None:
        self.files, self.target = files, target
        self.weights = HeadWeights(files, target.decoder, quantization)

    def first(self) -> EagleHead:
        """EAGLE-1 and 2: feature and embedding through ``fc``, then plain layers, the first without an input norm."""
        files, shape = self.files, self.target.config
        config = self.llama(files.config)
        width = config.hidden_size
        if width != shape.hidden_size:
            raise ModelFileError(f"{files.where}: hidden_size is {width}; the target has {shape.hidden_size}")
        asked = files.config.get("bias") is not None and files.flag("bias")
        if "fc.bias" in files and files.config.get("bias") is False:
            raise ModelFileError(f"{files.where}: bias is false, but there is a tensor fc.bias")
        fc = Linear(self.weights.matrix("fc.weight", width, 2 * width), self.weights.bias("fc.bias", width, asked))
        embedding = self.embedding(config)
        layers = [self.layer(f"layers.{i}", config, width) for i in range(config.n_layers)]
        output = self.output(config.vocab_size, width)
        files.finish()
        return EagleHead(
            ops=self.target.decoder.ops,
            config=config,
            feature_layers=(shape.n_layers - 1,),
            embedding=embedding,
            fc=fc,
            layers=layers,
            output=output,
            vocab_size=shape.vocab_size,
            weight_bytes=self.weights.nbytes,
            final_norm=(self.target.decoder.final_norm, shape.norm_eps),
        )

    def third(self, speculators: bool) -> EagleHead:
        """EAGLE-3: several layers' states through ``fc``; the first layer reads embedding and feature side by side."""
        files, shape, values = self.files, self.target.config, self.files.config
        nested = values.get("transformer_layer_config") if speculators else values
        if not isinstance(nested, dict):
            raise ModelFileError(f"{files.where}: transformer_layer_config is {shown(nested)}; expected is an object")
        if speculators and values.get("norm_before_residual") is None:
            raise ModelFileError(f"{files.where}: the config lacks norm_before_residual, which must be given")
        config = self.llama(nested)
        own = values.get("eagle_config") or {}
        if not isinstance(own, dict):
            raise ModelFileError(f"{files.where}: eagle_config is {shown(own)}; expected is an object")

        def flag(key: str, default: bool = False) -> bool:
            return files.flag(key, default, own if key in own else values)

        if not flag("use_aux_hidden_state", True):
            raise ModelFileError(f"{files.where}: use_aux_hidden_state is false; supported is true")
        if flag("fc_norm"):
            raise ModelFileError(f"{files.where}: fc_norm is true; supported is false")
        layers_read = self.feature_layers(own, values)
        width, wide = config.hidden_size, len(layers_read) * shape.hidden_size
        norm_output = flag("norm_output")
        before_fc = self.weights.vector("input_norm.weight", wide) if flag("norm_before_fc") else None
        fc = Linear(self.weights.matrix("fc.weight", width, wide), self.weights.bias("fc.bias", width))
        embedding = self.embedding(config)
        files.renamed("midlayer.", "layers.0.")
        layers = [self.layer(f"layers.{i}", config, 2 * width if i == 0 else width) for i in range(config.n_layers)]
        norm = self.weights.vector("norm.weight", width)
        tokens, rows = self.tokens(config)
        output = self.output(rows, width)
        files.finish()
        return EagleHead(
            ops=self.target.decoder.ops,
            config=config,
            feature_layers=layers_read,
            embedding=embedding,
            fc=fc,
            layers=layers,
            output=output,
            vocab_size=shape.vocab_size,
            weight_bytes=self.weights.nbytes,
            fc_norm=before_fc,
            norm=norm,
            norm_before_residual=flag("norm_before_residual"),
            norm_output=norm_output,
            tokens=tokens,
        )

    def llama(self, values: Mapping[str, Any]) -> ModelConfig:
        """The shape of the head's layers; whatever the config calls itself, they are Llama's."""
        config = config_from_hf({**values, "architectures": ["LlamaForCausalLM"]}, self.files.where)
        needed = self.target.n_tokens
        if config.vocab_size < needed:
            raise ModelFileError(
                f"{self.files.where}: vocab_size is {config.vocab_size}; the target {self.target.name} has {needed} "
                "tokens"
            )
        return replace(config, tie_embeddings=False)

    def feature_layers(self, own: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[int, ...]:
        """The target's layers whose output is read, ascending: so they stand side by side, however they are listed.

        By default EAGLE's own: what goes into layers 2, N/2 and N - 3, so the output of the layer before each. A config
        that names numbers counts so too (as vLLM reads it), unless the lowest is 1: then it names the layers whose
        output is meant (as SpecForge and ModelOpt write it). SGLang tells the two apart by the same rule (its pull
        request 25454).
        """
        n, key = self.target.config.n_layers, "eagle_aux_hidden_state_layer_ids"
        given = own.get(key) or values.get(key) or [2, n // 2, n - 3]
        whole_numbers = isinstance(given, list) and all(type(i) is int for i in given)
        outputs = whole_numbers and min(given) == 1
        highest = n - 1 if outputs else n
        if not whole_numbers or not all(1 <= i <= highest for i in given) or len(set(given)) < len(given):
            raise ModelFileError(
                f"{self.files.where}: {key} is {shown(given)}; allowed are different numbers from 1 to {highest}, the "
                f"layers of the target {self.target.name}"
            )
        return tuple(sorted(i if outputs else i - 1 for i in given))

    def layer(self, name: str, config: ModelConfig, width: int) -> HeadLayer:
        """A decoder layer whose q, k and v read ``width``; biases and an input norm where the file has them."""
        c, weights = config, self.weights
        q, kv, hidden, ffn = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
        sizes = {
            "self_attn.q": (q, width, c.qkv_bias),
            "self_attn.k": (kv, width, c.qkv_bias),
            "self_attn.v": (kv, width, c.qkv_bias),
            "self_attn.o": (hidden, q, c.o_bias),
            "mlp.gate": (ffn, hidden, c.mlp_bias),
            "mlp.up": (ffn, hidden, c.mlp_bias),
            "mlp.down": (hidden, ffn, c.mlp_bias),
        }
        linear = {
            short.split(".")[1]: Linear(
                weights.matrix(f"{name}.{short}_proj.weight", out, into),
                weights.bias(f"{name}.{short}_proj.bias", out, wanted),
            )
            for short, (out, into, wanted) in sizes.items()
        }
        joins = width != hidden
        first = name == "layers.0"
        input_norm = None
        if joins or not first or f"{name}.input_layernorm.weight" in self.files:
            input_norm = weights.vector(f"{name}.input_layernorm.weight", hidden)
        return HeadLayer(
            linear=linear,
            post_norm=weights.vector(f"{name}.post_attention_layernorm.weight", hidden),
            input_norm=input_norm,
            hidden_norm=weights.vector(f"{name}.hidden_norm.weight", hidden) if joins else None,
        )

    def embedding(self, config: ModelConfig) -> Weight:
        """The head's own embedding, else the target's, which must then be as wide."""
        name, target = "embed_tokens.weight", self.target
        if name in self.files:
            return self.weights.matrix(name, config.vocab_size, config.hidden_size, packed=False)
        shape = target.config
        if (config.vocab_size, config.hidden_size) != (shape.vocab_size, shape.hidden_size):
            raise self.not_shared(name, config.vocab_size, config.hidden_size)
        return target.decoder.embedding

    def output(self, rows: int, width: int) -> Weight:
        """The head's own output matrix, else the target's, which must then have the same shape."""
        name, shape = "lm_head.weight", self.target.config
        if name in self.files:
            return self.weights.matrix(name, rows, width)
        if (rows, width) != (shape.vocab_size, shape.hidden_size):
            raise self.not_shared(name, rows, width)
        return self.target.decoder.head

    def not_shared(self, name: str, rows: int, width: int) -> ModelFileError:
        shape = self.target.config
        return ModelFileError(
            f"{self.files.where} lacks tensor {name} of shape {[rows, width]}, and that of the target "
            f"{self.target.name}, {[shape.vocab_size, shape.hidden_size]}, does not fit"
        )

    def tokens(self, config: ModelConfig) -> tuple[torch.Tensor | None, int]:
        """The target's token of each row of the output matrix (None: its own number), and how many rows it has."""
        files, key = self.files, "draft_vocab_size"
        given = files.config.get(key)
        rows = config.vocab_size if given is None else whole(given, f"{files.where}: {key}", 1, MAX_SIZE)
        if "d2t" not in files and rows == config.vocab_size:
            ids = torch.arange(rows)
        else:
            ids = torch.arange(rows) + files.take("d2t", rows, floating=False).long()
            if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or len(set(ids.tolist())) < rows:
                raise ModelFileError(
                    f"{files.where}: d2t maps two rows to one token, or one outside of 0 to {config.vocab_size - 1}"
                )
        if "t2d" in files:
            drafted = files.take("t2d", config.vocab_size, floating=False)
            if not torch.equal(drafted.bool().nonzero()[:, 0], ids.sort().values):
                raise ModelFileError(f"{files.where}: t2d is not true for exactly the tokens that d2t maps to")
        if torch.equal(ids, torch.arange(rows)):
            return None, rows
        if int(ids.max()) >= self.target.config.vocab_size:
            raise ModelFileError(
                f"{files.where}: d2t maps to token {int(ids.max())}; the target {self.target.name} has "
                f"{self.target.config.vocab_size}"
            )
        return ids.to(self.target.decoder.device), rows
