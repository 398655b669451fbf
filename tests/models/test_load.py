from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.load import load_model, open_source, pick_device, pick_dtype
from tests.ops.paged import Paged, Rows


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer whose end token is 5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=alphabet[5]).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    config = transformers.Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=9,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def test_load_a_folder(folder: Path) -> None:
    model = load_model(str(folder), device="cpu")
    assert model.name == "my-model"
    assert model.decoder.dtype == torch.float32
    assert model.weight_bytes == model.decoder.weight_bytes > 0
    assert model.config.eos_ids == (9, 5)
    assert model.tokenizer.decode(model.tokenizer.encode("fine")) == "fine"
    assert model.chat_template is None


def test_quantization_and_dtype_reach_the_decoder(folder: Path) -> None:
    exact = load_model(str(folder), device="cpu", dtype="float64")
    small = load_model(str(folder), device="cpu", dtype="bfloat16", quantization="int8")
    assert exact.decoder.dtype == torch.float64
    assert small.decoder.dtype == torch.bfloat16
    assert small.weight_bytes < exact.weight_bytes / 4


def test_settings_that_are_refused(folder: Path) -> None:
    with pytest.raises(SettingError, match="quantization is 'int3'; allowed is int8"):
        load_model(str(folder), quantization="int3")
    with pytest.raises(SettingError, match=r"dtype is 'float23'.*did you mean 'float32'"):
        load_model(str(folder), dtype="float23")
    with pytest.raises(SettingError, match="device is 'gpu'; allowed is auto, cpu, cuda or cuda:N"):
        load_model(str(folder), device="gpu")


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "tpu", "", "cpu:0", "cuda :0"])
def test_bad_device(device: str) -> None:
    with pytest.raises(SettingError, match="allowed is auto, cpu, cuda or cuda:N"):
        pick_device(device)


def test_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(SettingError, match="has no CUDA devices"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SettingError, match="has 2 CUDA devices"):
        pick_device("cuda:2")


def test_auto_dtype_follows_the_device() -> None:
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", torch.device("cpu")) == torch.float16


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelFileError, match=r"weights\.bin is a file; allowed are \.gguf files"):
        open_source(tmp_path / "weights.bin")


@pytest.mark.model
def test_default_model_continues_a_sentence(smollm2_path: Path) -> None:
    model = load_model(str(smollm2_path), device="cpu")
    tokens = model.tokenizer.encode("The capital of France is")
    (logits,) = Paged(model.decoder, block_size=16).run(Rows(0, tokens))
    assert model.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
