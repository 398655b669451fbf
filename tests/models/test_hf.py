from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.decoder import Decoder
from outrider.models.hf import HFSource, resolve
from outrider.ops.reference import ReferenceOps
from tests.models.test_hf_config import ROPES, SIZES, hf
from tests.ops.paged import Paged, Rows

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    **{f"llama {name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with layer types": (
        "Qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
TOKENS = [(11 * i * i + 5 * i + 3) % 48 for i in range(60)]


def make(family: str, options: dict[str, Any], folder: Path, **saving: Any) -> transformers.PreTrainedModel:
    """A random model saved in ``folder``; biases and norms random too, which transformers starts at 0 and 1."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.normal_(1, 0.3)
    model.save_pretrained(folder, **saving)
    return model


def load(folder: Path) -> Decoder:
    return Decoder.from_source(HFSource(folder), ReferenceOps(), torch.float32, "cpu")


def assert_agrees(model: transformers.PreTrainedModel, decoder: Decoder) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    (got,) = Paged(decoder).run(Rows(0, TOKENS))
    assert expected.std() > 0.5  # logits that are nearly equal would agree by themselves
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make(*MODELS[name], tmp_path)
    assert_agrees(model, load(tmp_path))


def test_shards_agree_with_transformers(tmp_path: Path) -> None:
    model = make("Llama", {}, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_agrees(model, load(tmp_path))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make("Llama", {}, tmp_path, max_shard_size="20KB")
    return tmp_path


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/model.safetensors",
        "..\\secret.safetensors",
        "..",
        ".hidden.safetensors",
        "",
        "pytorch_model.bin",
        "a\0.safetensors",
    ],
)
def test_index_may_only_name_plain_files(sharded: Path, name: str) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, sharded.parent / "secret.safetensors")
    edit_index(sharded, lambda listed: listed.update({"model.norm.weight": name}))
    with pytest.raises(ModelFileError, match="plain names") as error:
        HFSource(sharded)
    assert repr(name) in str(error.value)


def test_damaged_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    with pytest.raises(ModelFileError, match="no weight_map"):
        HFSource(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": ')
    with pytest.raises(ModelFileError, match=r"index\.json is not a readable JSON file"):
        HFSource(sharded)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=f"lacks the file {shard.name}"):
        HFSource(sharded)


def test_index_that_lists_what_a_shard_does_not_hold(sharded: Path) -> None:
    edit_index(sharded, lambda listed: listed.update({"model.extra": listed["model.norm.weight"]}))
    with pytest.raises(ModelFileError, match=r"lists tensor model\.extra"):
        HFSource(sharded)


def test_stray_tensor_of_a_shard_is_not_overlooked(sharded: Path) -> None:
    shard = min(sharded.glob("*.safetensors"))
    save_file({**load_file(shard), "model.layers.0.stray": torch.ones(2)}, shard)
    with pytest.raises(ModelFileError, match=r"unexpected tensor model\.layers\.0\.stray"):
        load(sharded)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights(keep: int, tmp_path: Path) -> None:
    make("Llama", {}, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged"):
        HFSource(tmp_path)


def test_pickle_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf()))
    with pytest.raises(ModelFileError, match=r"holds no weights; expected is model\.safetensors"):
        HFSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelFileError, match=r"holds only pickle weights .* convert to safetensors"):
        HFSource(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "lacks the file config.json"), ("[1]", "list"), ("{", "not a readable JSON")]
)
def test_bad_config_file(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=words):
        HFSource(tmp_path)


def test_source_reads_generation_config_and_keeps_the_file_type(tmp_path: Path) -> None:
    make("Llama", {"dtype": "bfloat16"}, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    source = HFSource(tmp_path)
    assert source.config.eos_ids == (4, 2)
    assert source.get("model.norm.weight").dtype == torch.bfloat16
    assert source.shape("model.embed_tokens.weight") == (48, 32)
    assert source.where == str(tmp_path)
    with pytest.raises(ModelFileError, match="lacks tensor nothing"):
        source.get("nothing")


def test_resolve_takes_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "~/no-such-model", "missing.gguf", "a/b/c"])
def test_missing_path(name: str) -> None:
    with pytest.raises(ModelFileError, match="no such file or folder"):
        resolve(name)


@pytest.mark.parametrize("name", ["smollm", "", "a b/c", "org/"])
def test_name_that_means_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="hub id like 'org/name'") as error:
        resolve(name)
    assert ("did you mean 'smollm2'" in str(error.value)) == (name == "smollm")


def test_hub_snapshot_takes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    seen: dict[str, Any] = {}

    def snapshot(repo_id: str, **options: Any) -> str:
        seen.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/some-model") == tmp_path
    repo_id = seen.pop("repo_id")
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
        "modeling_x.py",
        "pytorch_model.bin",
        "original/params.json",
        "consolidated.safetensors",
    ]
    assert repo_id == "org/some-model"
    assert list(filter_repo_objects(files, **seen)) == files[:4]


def test_offline_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("a long story\nover several lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelFileError) as error:
        resolve("org/some-model")
    assert "'org/some-model' is not a folder here and cannot be fetched" in str(error.value)
    assert "\n" not in str(error.value)
