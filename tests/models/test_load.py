from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import gguf_source
from outrider.models.decoder import Decoder, weight_bytes
from outrider.models.gguf_file import GGUFFile
from outrider.models.hf import HFSource
from outrider.models.load import load_model, open_model, pick_device, pick_dtype
from outrider.ops.contract import Int8Weight
from outrider.ops.reference import ReferenceOps
from tests.models.gguf_files import tensors, write
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, toy_config


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer whose end token is 5."""
    from tokenizers import Tokenizer, decoders, models

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
    small = load_model(str(folder), device="cpu", dtype="bfloat16", quantization="int8", ops="reference")
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
        open_model(tmp_path / "weights.bin")


def test_the_format_follows_from_what_is_there_not_from_the_name(folder: Path, tmp_path: Path) -> None:
    renamed = folder.rename(tmp_path / "folder.gguf")
    assert load_model(str(renamed), device="cpu").name == "folder.gguf"


def test_a_gguf_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parsed = write(tmp_path / "x.gguf", tensors(), edit=add_tokenizer), list[Path]()

    class Counting(GGUFFile):
        def __init__(self, path: Path) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf_source, "GGUFFile", Counting)
    model = load_model(str(path), device="cpu")
    assert parsed == [path]
    assert model.chat_template is not None
    assert model.chat_template.source == "template"
    assert model.tokenizer is not None
    assert (model.n_tokens, model.tokenizer.vocab_size) == (40, 42)
    assert (model.tokenizer.unused_ids, model.unused_ids) == ((5, 40), (5,))
    assert model.config.eos_ids == (2, 3)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """42 tokens for 40 rows, of which two stand for none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:41]
    del writer.kv_data[0]["tokenizer.ggml.tokens"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, alphabet[0] + alphabet[1]])
    writer.add_token_types([5 if i in (5, 40) else 1 for i in range(42)])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_chat_template("template")


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ZeroDivisionError("odd\n file"), "my-model cannot be read: ZeroDivisionError: odd file$"),
        (Panic("at the disco"), "my-model cannot be read: Panic: at the disco$"),
        (MemoryError(), "my-model does not fit in memory; its weights need 0 MiB on cpu$"),
        (torch.OutOfMemoryError("x"), "my-model does not fit in memory; its weights need 0 MiB on cpu$"),
        (RuntimeError("can't allocate memory: 7 bytes"), "my-model does not fit in memory; its weights need 0 MiB"),
    ],
)
def test_what_nobody_foresaw_is_one_sentence(
    raised: BaseException, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise raised

    monkeypatch.setattr(HFSource, "get", broken)
    with pytest.raises(ModelFileError, match=words) as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)


def test_ctrl_c_and_our_own_errors_come_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for raised in (KeyboardInterrupt(), ModelFileError("as it is")):
        monkeypatch.setattr(HFSource, "get", lambda *_, raised=raised: (_ for _ in ()).throw(raised))
        with pytest.raises(type(raised)) as error:
            load_model(str(folder), device="cpu")
        assert error.value is raised


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_memory_of_weights_is_known_before(quantization: str | None) -> None:
    for config in (toy_config(tie_embeddings=True), toy_config("qwen2", layers=3), toy_config("qwen3")):
        decoder = Decoder.from_source(MemorySource(config), ReferenceOps(), torch.float32, "cpu", quantization)
        weights = [w for x in decoder.layers for w in vars(x).values()] + [decoder.head]
        scales = sum(w.scale.nbytes for w in weights if isinstance(w, Int8Weight))
        assert (scales > 0) == (quantization == "int8")
        assert weight_bytes(config, torch.float32, quantization) == decoder.weight_bytes - scales


@pytest.mark.model
def test_default_model_continues_a_sentence(smollm2_path: Path) -> None:
    model = load_model(str(smollm2_path), device="cpu")
    tokens = model.tokenizer.encode("The capital of France is")
    (logits,) = Paged(model.decoder, block_size=16).run(Rows(0, tokens))
    assert model.tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
