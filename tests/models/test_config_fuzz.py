"""Configurations with absurd values: every one loads and can run, or is refused in one sentence."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.core.errors import ModelFileError
from outrider.models.decoder import Decoder
from outrider.models.hf import HFSource
from outrider.ops.reference import ReferenceOps
from tests.models.test_hf_config import ROPES, hf
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, toy_config

ABSURD: tuple[Any, ...] = (
    *("", "x", "1", "default", None, True, False, [], [1], [None], {}, {"a": 1}, [[]], {"a": {}}),
    *(0, 1, -1, 2, 3, 0.5, -0.0, 1e-320, 1e-13, 1e13, 1e308, 10**7, 10**12, -(10**12), 10**400, 2**63),
    *(math.inf, -math.inf, math.nan, 1.0, 1.0000000000000002),
)
BASE = {"use_sliding_window": True, "layer_types": None, "sliding_window": 4, "max_window_layers": 1}
FAMILIES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
LLAMA3 = {"original_max_position_embeddings": 64, "rope_theta": 500.0, **ROPES["llama3"]}
YARN = {**ROPES["yarn tuned"], "attention_factor": None, "rope_theta": 100.0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per architecture a folder with weights that fit the unchanged configuration."""
    folders = {}
    for architecture, family in FAMILIES.items():
        folder = folders[architecture] = tmp_path_factory.mktemp(family)
        source = MemorySource(toy_config(family, vocab=48, layers=3, hidden=32, ffn=48))
        save_file(
            {name: source.get(name).float().contiguous() for name in source.names()}, folder / "model.safetensors"
        )
    return folders


def runs(folder: Path, values: dict[str, Any]) -> bool:
    """Whether a folder with this config.json loads; then it must also run. Other errors than ModelFileError go on."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        decoder = Decoder.from_source(HFSource(folder), ReferenceOps(), torch.float32, "cpu")
    except ModelFileError as error:
        if str(folder) not in str(error) or "\n" in str(error) or len(str(error)) > 500:
            raise AssertionError(str(error)) from error
        return False
    config = decoder.config
    assert math.isfinite(decoder.rope_scale)
    assert decoder.rope_scale > 0
    assert decoder.inv_freq.isfinite().all()
    assert all(0 <= i < config.vocab_size for i in config.eos_ids)
    (logits,) = Paged(decoder).run(Rows(0, [1, 2, 3]))
    assert logits.isfinite().all()
    return True


@pytest.mark.parametrize("architecture", FAMILIES)
def test_any_value_of_any_key(architecture: str, weights: dict[str, Path]) -> None:
    plain = {**hf(architecture), **BASE, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "head_dim": 8, "hidden_act": "silu"}
    plain |= {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "quantization_config": None}
    assert runs(weights[architecture], plain)
    outcomes = {runs(weights[architecture], plain | {key: value}) for key in plain for value in ABSURD}
    assert outcomes == {True, False}


@pytest.mark.parametrize("rope", [LLAMA3, YARN, ROPES["linear"]], ids=["llama3", "yarn", "linear"])
def test_any_value_of_the_rope(rope: dict[str, Any], weights: dict[str, Path]) -> None:
    folder, plain = weights["LlamaForCausalLM"], hf()
    assert runs(folder, plain | {"rope_parameters": rope})
    keys = [*rope, "truncate", "attention_factor", "partial_rotary_factor"]
    changed = [plain | {"rope_parameters": rope | {key: value}} for key in keys for value in ABSURD]
    outside = ("rope_scaling", "rope_theta", "original_max_position_embeddings", "max_position_embeddings")
    without = {key: value for key, value in rope.items() if key not in (*outside, "factor")}
    changed += [plain | {"rope_parameters": rope, key: value} for key in outside for value in ABSURD]
    changed += [plain | {"rope_parameters": without, key: value} for key in outside for value in ABSURD]
    assert {runs(folder, values) for values in changed} == {True, False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; allowed is a whole number from 1 to 16384"),
        ({"num_hidden_layers": 16384}, "holds 30 tensors; the config asks for 16384 layers"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf; allowed is a number from"),
        ({"rope_theta": math.inf}, "rope_theta is inf; allowed is a number from"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 1000*\.\.\.; allowed is a number from"),
        ({"head_dim": 0}, "head_dim is 0; allowed is a whole number from 1 to"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; allowed"),
        ({"eos_token_id": 48}, "eos_token_id is 48; allowed are token ids from 0 to 47"),
        ({"bos_token_id": [1, 48]}, r"bos_token_id is \[1, 48\]; allowed are token ids"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta is 1; allowed with yarn is a number above 1"),
        ({"rope_parameters": YARN | {"beta_fast": math.inf}}, "beta_fast is inf; allowed is a number from"),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": math.inf}},
            "original_max_position_embeddings is inf; allowed is a number from 1 to",
        ),
    ],
)
def test_what_is_said(changes: dict[str, Any], words: str, weights: dict[str, Path]) -> None:
    folder, start = weights["LlamaForCausalLM"], time.perf_counter()
    (folder / "config.json").write_text(json.dumps(hf(**changes)))
    with pytest.raises(ModelFileError, match=words):
        Decoder.from_source(HFSource(folder), ReferenceOps(), torch.float32, "cpu")
    assert time.perf_counter() - start < 30  # it was minutes, and all the memory


def test_any_value_of_the_generation_config(weights: dict[str, Path]) -> None:
    folder = weights["LlamaForCausalLM"]
    for value in ABSURD:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert runs(folder, hf()) == (value is None or (value in ([], 0, 1, 2, 3, [1]) and type(value) in (int, list)))
    (folder / "generation_config.json").unlink()
