"""Checkpoints of exit adapters: as Kangaroo publishes them, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.config import SpecConfig
from outrider.core.errors import ModelFileError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.models.heads.exit_adapter import load_exit_adapter
from outrider.ops.contract import LayerKV
from outrider.runtime.batch import build_batch
from outrider.spec.proposer import DraftContext
from outrider.spec.registry import build_proposer
from tests.engine.harness import toy_target
from tests.engine.heads import Tensors, adapter_tensors, adapter_values, noise, write_head
from tests.models.adapter_plain import adapter_rows
from tests.models.test_heads import Evil
from tests.toy import toy_config

CONFIG = toy_config(layers=4)
TARGET = toy_target(CONFIG, seed=1)
VALUES = adapter_values(CONFIG)
TENSORS = adapter_tensors(VALUES, seed=5)
STATES = noise(77, 7, 32)
ROWS = build_batch([Span(Sequence(0, [0] * 7, 7, SamplingParams(), SpecParams(), 0, blocks=[0]), 0, 7)], block_size=8)


@pytest.mark.parametrize("pickled", ["", "pytorch_model.bin", "adapter.pt"])
def test_every_form_is_the_same_adapter(pickled: str, tmp_path: Path) -> None:
    """Safetensors and pickles of tensors, the folder or the file; rotary tables in old ones are not read."""
    saved = {**TENSORS, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write_head(tmp_path, {**VALUES, "exit_layer": 2}, saved, pickled)
    for path in (folder, folder / (pickled or "model.safetensors")):
        adapter = load_exit_adapter(str(path), TARGET, 2)
        kv = LayerKV.empty(8, 2, 8, torch.float64, "cpu")
        x = adapter.forward(STATES, ROWS, adapter.stack(kv))
        head = TARGET.decoder.head
        assert isinstance(head, torch.Tensor)
        torch.testing.assert_close(adapter.logits(x), adapter_rows(VALUES, TENSORS, STATES) @ head.T)
        assert adapter.output is head
        assert adapter.weight_bytes == sum(t.nbytes for t in TENSORS.values())


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        *(({}, {name: None}, f"lacks tensor {name} of shape") for name in TENSORS),
        ({}, {"norm.weight": noise(1, 31)}, "tensor norm.weight has shape [31]; the config asks for [32]"),
        ({}, {"norm.weight": torch.ones(32).int()}, "norm.weight is torch.int32; allowed are floating types"),
        ({"num_key_value_heads": 4}, {}, "k_proj.weight has shape [16, 32]; the config asks for [32, 32]"),
        ({}, {"layers.0.mlp.up_proj.weight": noise(1, 48, 32)}, "unexpected tensor layers.0.mlp.up_proj.weight"),
        ({}, {"layers.0.self_attn.q_proj.bias": noise(1, 32)}, "unexpected tensor layers.0.self_attn.q_proj.bias"),
        ({}, {"layers.1.input_layernorm.weight": noise(1, 32)}, "unexpected tensor layers.1.input_layernorm.weight"),
        ({}, {"lm_head.weight": noise(1, 32, 32)}, "unexpected tensor lm_head.weight"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2; supported is 1"),
        ({"attention_bias": True}, {}, "attention_bias is true; supported is false"),
        ({"hidden_size": 64}, {}, "hidden_size is 64; the target toy-1 has 32"),
        ({"vocab_size": 16}, {}, "vocab_size is 16; the target toy-1 has 32 tokens"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads is 0; allowed is"),
        ({"exit_layer": 3}, {}, "exit_layer is 3; the setting exit_layer is 2"),
        ({"exit_layer": "2"}, {}, "exit_layer is '2'; allowed is a whole number"),
    ],
)
def test_it_is_read_strictly(config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    tensors: Tensors = {k: v for k, v in {**TENSORS, **change}.items() if v is not None}
    folder = str(write_head(tmp_path, {**VALUES, **config}, tensors))
    with pytest.raises(ModelFileError) as error:
        load_exit_adapter(folder, TARGET, 2)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    spec = SpecConfig("self", options={"exit_layer": 2, "exit_adapter": folder})
    with pytest.raises(ModelFileError, match=r"^the exit adapter: "):
        build_proposer(spec, DraftContext(TARGET, spec))


def test_a_folder_that_is_none_and_a_pickle_that_runs_code(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no weights"):
        load_exit_adapter(str(tmp_path), TARGET, 2)
    write_head(tmp_path, VALUES, {"norm.weight": Evil()}, "pytorch_model.bin")  # type: ignore[dict-item]
    with pytest.raises(ModelFileError, match="holds more than plain tensors"):
        load_exit_adapter(str(tmp_path), TARGET, 2)
