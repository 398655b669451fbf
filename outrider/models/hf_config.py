"""From Hugging Face's ``config.json`` to a ModelConfig, with transformers' own defaults for what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import ModelFileError, nearest
from outrider.models.config import ModelConfig, RopeConfig
from outrider.models.rope import MAX_FACTOR, MIN_FACTOR, ROPE_KINDS
from outrider.models.values import MAX_LAYERS, MAX_SIZE, real, shown, token_ids, whole


@dataclass(frozen=True)
class _Family:
    """What an architecture's name alone says; sizes are the defaults of keys that may be left out."""

    name: str
    max_position: int
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    bos: int | None = None
    eos: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", 2048, bos=1, eos=2),
    "MistralForCausalLM": _Family("mistral", 131072, kv_heads=8, bos=1, eos=2),
    "Qwen2ForCausalLM": _Family("qwen2", 32768, kv_heads=32),
    "Qwen3ForCausalLM": _Family("qwen3", 32768, kv_heads=32, head_dim=128),
}

_DEFAULT_WINDOW = 4096


def config_from_hf(config: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a parsed ``config.json``; ``generation`` is ``generation_config.json``, whose end tokens join.

    Raises ModelFileError naming ``where``, the key, what it holds and what is allowed.
    """
    return _Reading(config, where).model(generation or {})


class _Reading:
    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.family = self.known_family()

    def model(self, generation: Mapping[str, Any]) -> ModelConfig:
        family, name = self.family, self.family.name
        if self.values.get("quantization_config"):
            raise self.bad("quantization_config", "none: give the unquantized model and set quantization='int8'")
        if self.values.get("hidden_act", "silu") not in ("silu", "swish"):
            raise self.bad("hidden_act", "silu")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", family.kv_heads or heads, null=heads)
        head_dim = self.size("head_dim", family.head_dim or hidden // heads, null=hidden // heads)
        if heads % kv_heads:
            raise self.bad("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        if head_dim % 2:
            raise self.bad("head_dim", f"an even number (here hidden_size / num_attention_heads is {hidden / heads:g})")
        layers = self.size("num_hidden_layers", high=MAX_LAYERS)
        vocab = self.size("vocab_size")
        max_position = self.size("max_position_embeddings", family.max_position)
        bias = name in ("llama", "qwen3") and self.flag("attention_bias")
        bos = self.ids("bos_token_id", self.values, family.bos, vocab)
        eos = self.ids("eos_token_id", generation, None, vocab)
        eos += self.ids("eos_token_id", self.values, family.eos, vocab)
        return ModelConfig(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self.size("intermediate_size"),
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=max_position,
            norm_eps=self.real("rms_norm_eps", self.values, 1e-6, high=1.0),
            rope=self.rope(max_position),
            qkv_bias=bias or name == "qwen2",
            o_bias=bias,
            mlp_bias=name == "llama" and self.flag("mlp_bias"),
            qk_norm=name == "qwen3",
            tie_embeddings=self.flag("tie_word_embeddings"),
            sliding_window=self.windows(layers),
            bos_id=bos[0] if bos else None,
            eos_ids=tuple(dict.fromkeys(eos)),
        )

    def known_family(self) -> _Family:
        given = self.values.get("architectures") or []
        if not given:  # a config that was never saved from a model: its type is all there is
            given = [a for a, f in FAMILIES.items() if f.name == self.values.get("model_type")]
        if not (isinstance(given, list) and len(given) == 1 and isinstance(given[0], str)):
            raise self.bad("architectures", f"one of {', '.join(FAMILIES)}")
        if given[0] not in FAMILIES:
            raise ModelFileError(
                f"{self.where}: architecture {shown(given[0])} is not supported; supported are "
                f"{', '.join(FAMILIES)}{nearest(given[0], FAMILIES)}"
            )
        return FAMILIES[given[0]]

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Each layer's sliding window; empty when no layer has one."""
        name = self.family.name
        if name == "llama" or (name != "mistral" and not self.flag("use_sliding_window")):
            return ()
        if self.values.get("sliding_window", _DEFAULT_WINDOW) is None:
            return ()
        window = self.size("sliding_window", _DEFAULT_WINDOW)
        if name == "mistral":
            return (window,) * layers
        kinds = self.values.get("layer_types")
        if kinds is None:
            first = self.size("max_window_layers", 28, low=0)
            kinds = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise self.bad("layer_types", f"a list of {layers} times {' or '.join(known)}")
        if "sliding_attention" not in kinds:
            return ()
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def rope(self, max_position: int) -> RopeConfig:
        """From ``rope_theta`` and ``rope_scaling`` (before transformers 5), or ``rope_parameters``."""
        key = "rope_scaling" if self.values.get("rope_scaling") else "rope_parameters"
        given = self.values.get(key) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise self.bad(key, "one flat object for all layers")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ModelFileError(
                f"{self.where}: {key} has rope type {shown(kind)}; supported are {', '.join(ROPE_KINDS)}"
                f"{nearest(shown(kind), ROPE_KINDS)}"
            )
        for holder in (given, self.values):
            if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
                raise ModelFileError(
                    f"{self.where}: partial_rotary_factor is {shown(holder['partial_rotary_factor'])}; supported is 1"
                )
        theta = self.real("rope_theta", given, self.real("rope_theta", self.values, 10000.0))
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, self.factor(given, None))
        trained = self.trained(given, max_position)
        implied = max_position / trained if kind == "yarn" else None  # DeepSeek-style files leave the factor out
        factor = self.factor(given, implied)
        if kind == "llama3":
            low, high = self.real("low_freq_factor", given, None), self.real("high_freq_factor", given, None)
            if not low < high:
                raise self.bad(key, f"low_freq_factor below high_freq_factor (given are {low:g} and {high:g})")
            return RopeConfig(theta, kind, factor, trained, low, high)
        if theta <= 1.0:  # the formula divides by its logarithm
            raise ModelFileError(f"{self.where}: rope_theta is {theta:g}; allowed with yarn is a number above 1")
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        return RopeConfig(
            theta,
            kind,
            factor,
            trained,
            beta_fast=self.real("beta_fast", given, 32.0),
            beta_slow=self.real("beta_slow", given, 1.0),
            truncate=self.flag("truncate", given, True),
            **{name: self.real(name, given, 0.0) for name in optional if given.get(name)},
        )

    def factor(self, given: Mapping[str, Any], default: float | None) -> float:
        """How many times the context was stretched."""
        return self.real("factor", given, default, MIN_FACTOR, MAX_FACTOR)

    def trained(self, given: Mapping[str, Any], max_position: int) -> int:
        """The context before it was stretched; as in transformers a value outside the rope object wins."""
        key = "original_max_position_embeddings"
        inside = self.real(key, given, max_position, 1, MAX_SIZE)
        return int(self.real(key, self.values, inside, 1, MAX_SIZE))

    def size(
        self, key: str, default: int | None = None, null: int | None = None, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """A whole number from ``low`` to ``high``; ``default`` where the key is missing, ``null`` where it is null."""
        value = self.values.get(key, default)
        return whole(null if value is None else value, f"{self.where}: {key}", low, high)

    def real(
        self, key: str, holder: Mapping[str, Any], default: float | None, low: float = 1e-12, high: float = 1e12
    ) -> float:
        """A positive number; null counts as missing."""
        value = holder.get(key)
        return real(default if value is None else value, f"{self.where}: {key}", low, high)

    def flag(self, key: str, holder: Mapping[str, Any] | None = None, default: bool = False) -> bool:
        """True or false; null counts as missing."""
        value = (self.values if holder is None else holder).get(key)
        if value not in (None, True, False):
            raise ModelFileError(f"{self.where}: {key} is {shown(value)}; allowed is true or false")
        return default if value is None else bool(value)

    def ids(self, key: str, holder: Mapping[str, Any], default: int | None, vocab: int) -> tuple[int, ...]:
        """Token ids: one, a list, or none. A default outside of a small vocabulary counts as none."""
        if key not in holder and default is not None and default >= vocab:
            return ()
        return token_ids(holder.get(key, default), f"{self.where}: {key}", vocab - 1)

    def bad(self, key: str, allowed: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} is {shown(self.values.get(key))}; allowed is {allowed}")
