from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from outrider.core.errors import ModelFileError
from outrider.models.config import RopeConfig
from outrider.models.hf_config import config_from_hf
from outrider.models.rope import rope_frequencies

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0},
    "yarn tuned": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn, factor for attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "attention_factor": 1.3,
    },
}


def hf(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    values = {"architectures": [architecture], **SIZES, **changes}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 512, "rope_parameters": dict(ROPES[name])})
    expected, scale = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](config, "cpu")
    ours = config_from_hf({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, "here")
    got, got_scale = rope_frequencies(ours.rope, ours.head_dim, ours.max_position)
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=0)
    assert got_scale == pytest.approx(scale, rel=1e-12)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    rope = ROPES["llama3"]
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    new = config_from_hf(hf(rope_parameters=rope), "here")
    assert new.rope == RopeConfig(500.0, "llama3", 8.0, 64, 1.0, 4.0)
    assert config_from_hf(hf(rope_scaling={**old, "type": "llama3"}, rope_theta=500), "here") == new
    assert config_from_hf(hf(rope_scaling=None, rope_theta=1e6), "here").rope == RopeConfig(1e6)
    assert config_from_hf(hf(), "here").rope == RopeConfig(10000.0)


def test_yarn_without_factor_takes_the_ratio_of_contexts() -> None:
    given = {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert config_from_hf(hf(rope_scaling=given), "here").rope == RopeConfig(10000.0, "yarn", 4.0, 64)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 5}, ()),
        ("MistralForCausalLM", {"sliding_window": 5}, (5, 5, 5)),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {}, (4096, 4096, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": 5, "max_window_layers": 0}, ()),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 5, "max_window_layers": 2, "use_sliding_window": True},
            (None, None, 5),
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 5, "use_sliding_window": True}, ()),  # max_window_layers is 28
    ],
)
def test_windows(architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config_from_hf(hf(architecture, **changes), "here").sliding_window == windows


def test_left_out_keys_take_the_defaults_of_transformers() -> None:
    bare = hf(num_key_value_heads=..., max_position_embeddings=..., bos_token_id=..., eos_token_id=...)
    config = config_from_hf(bare, "here")
    assert (config.n_kv_heads, config.head_dim, config.max_position, config.norm_eps) == (4, 8, 2048, 1e-6)
    assert (config.bos_id, config.eos_ids, config.tie_embeddings) == (1, (2,), False)
    qwen = config_from_hf(hf("Qwen3ForCausalLM", bos_token_id=..., eos_token_id=...), "here")
    assert (qwen.head_dim, qwen.bos_id, qwen.eos_ids, qwen.qk_norm, qwen.qkv_bias) == (128, None, (), True, False)
    assert config_from_hf(hf("Qwen2ForCausalLM"), "here").qkv_bias
    assert config_from_hf(hf(architectures=None, model_type="qwen2"), "here").architecture == "qwen2"


def test_end_tokens_of_both_files_join() -> None:
    config = config_from_hf(hf(eos_token_id=[7, 8]), "here", {"eos_token_id": [9, 7]})
    assert config.eos_ids == (9, 7, 8)
    assert config_from_hf(hf(eos_token_id=5), "here", {}).eos_ids == (5,)
    assert config_from_hf(hf(eos_token_id=None), "here", {"eos_token_id": 3}).eos_ids == (3,)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (hf("LlamaForCausallM"), ["LlamaForCausallM", "Qwen3ForCausalLM", "did you mean 'LlamaForCausalLM'"]),
        (hf("MixtralForCausalLM"), ["MixtralForCausalLM", "did you mean 'MistralForCausalLM'"]),
        (hf(architectures=...), ["architectures", "None", "LlamaForCausalLM"]),
        (hf(hidden_size=...), ["hidden_size is None", "whole number"]),
        (hf(num_hidden_layers="3"), ["num_hidden_layers is '3'"]),
        (hf(num_attention_heads=0), ["num_attention_heads is 0", "from 1 to"]),
        (hf(num_key_value_heads=3), ["num_key_value_heads is 3", "divisor", "4"]),
        (hf(head_dim=7), ["head_dim is 7", "even"]),
        (hf(hidden_act="gelu"), ["hidden_act is 'gelu'", "silu"]),
        (hf(rms_norm_eps=-1), ["rms_norm_eps is -1"]),
        (hf(tie_word_embeddings="yes"), ["tie_word_embeddings is 'yes'", "true or false"]),
        (hf(eos_token_id="x"), ["eos_token_id is 'x'"]),
        (hf(quantization_config={"quant_method": "gptq"}), ["quantization_config", "gptq"]),
        (hf(partial_rotary_factor=0.5), ["partial_rotary_factor is 0.5"]),
        (hf(rope_parameters={"partial_rotary_factor": 0.25}), ["partial_rotary_factor is 0.25"]),
        (hf(rope_scaling={"type": "dynamic", "factor": 2.0}), ["'dynamic'", "yarn"]),
        (hf(rope_parameters={"rope_type": "longrope"}), ["'longrope'", "default, linear, llama3, yarn"]),
        (hf(rope_parameters={"full_attention": {"rope_type": "default"}}), ["rope_parameters", "flat"]),
        (hf(rope_scaling={"type": "linear"}), ["factor is None"]),
        (hf(rope_scaling={"type": "llama3", "factor": 2}), ["low_freq_factor is None"]),
        (
            hf(rope_scaling={"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}),
            ["low_freq_factor below high_freq_factor"],
        ),
        (hf("MistralForCausalLM", sliding_window=0), ["sliding_window is 0"]),
        (
            hf("Qwen2ForCausalLM", use_sliding_window=True, layer_types=["full_attention", "linear_attention"]),
            ["layer_types", "3 times"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_config_that_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelFileError) as error:
        config_from_hf(values, "folder/config.json")
    for word in ["folder/config.json", *words]:
        assert word in str(error.value)
