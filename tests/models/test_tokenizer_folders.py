"""Tokenizers of Hugging Face folders: what the files say together, holes in the ids, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.gguf_tokenizer import tokenizer_from_metadata
from outrider.models.tokenizer import tokenizer_from_folder
from tests.models.corpus import CORPUS
from tests.models.test_tokenizer import byte_level_metadata, original


def write(folder: Path, inner: tokenizers.Tokenizer, **files: Any) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_folder(tmp_path: Path) -> None:
    inner = original("smollm")
    inner.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<end>", normalized=False)])
    expected = {text: inner.encode(text).ids for text in CORPUS}
    inner.enable_truncation(5)
    inner.enable_padding(length=16)
    write(
        tmp_path,
        inner,
        tokenizer_config={"bos_token": {"content": "<|im_start|>"}, "eos_token": "<end>"},
        config={"eos_token_id": 2, "bos_token_id": 0},
        generation_config={"eos_token_id": [2, 0]},
    )
    tokenizer = tokenizer_from_folder(tmp_path)
    assert {text: tokenizer.encode(text) for text in CORPUS} == expected
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2, 0, 901), 902)
    assert tokenizer.is_special(901)  # the config names it
    assert not tokenizer.is_special(900)
    assert tokenizer.decode([900, 901]) == "<tool>"


def test_folders_bos_follows_post_processor_and_config(tmp_path: Path) -> None:
    inner = original("smollm")
    inner.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    write(tmp_path, inner, tokenizer_config={"bos_token": "<|im_start|>"})
    assert tokenizer_from_folder(tmp_path).encode("")[:1] == [1]
    write(tmp_path, inner, tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": False})
    assert tokenizer_from_folder(tmp_path).encode("") == []
    write(tmp_path, original("smollm"), tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": True})
    assert tokenizer_from_folder(tmp_path).encode("") == [1]


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json, which is needed$"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone is not enough"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelFileError, match="not a valid tokenizer file"):
        tokenizer_from_folder(tmp_path)
    write(tmp_path, original("gpt-2"), config={"eos_token_id": "end"})
    with pytest.raises(ModelFileError, match="eos_token_id is 'end'; allowed are token ids"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="holds a JSON list"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    far = json.loads(original("gpt-2").to_str())
    far["model"]["vocab"]["Ġ"] = 4 * 10**9
    (tmp_path / "tokenizer.json").write_text(json.dumps(far))
    with pytest.raises(ModelFileError, match=r"token id 4000000000 among 900 tokens; allowed are ids below 4624$"):
        tokenizer_from_folder(tmp_path)
    twice = json.loads(original("gpt-2").to_str())
    twice["model"]["vocab"]["Ġ"] = 7
    (tmp_path / "tokenizer.json").write_text(json.dumps(twice))
    with pytest.raises(ModelFileError, match="has 900 tokens but only 899 ids"):
        tokenizer_from_folder(tmp_path)
    wordpiece = original("gpt-2")
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="has the decoder WordPiece; known are byte-level and SentencePiece"):
        tokenizer_from_folder(write(tmp_path, wordpiece))


@pytest.mark.parametrize(
    ("extra", "special"),
    [
        ({"extra_special_tokens": {"image_token": "<image>", "<tool>": "<x>"}}, {"<image>", "<x>"}),
        ({"extra_special_tokens": ["<image>"], "additional_special_tokens": [{"content": "<x>"}]}, {"<image>", "<x>"}),
        ({"additional_special_tokens": None, "extra_special_tokens": [None, 5, [], "unknown"]}, set()),
    ],
)
def test_extra_special_tokens(extra: dict[str, Any], special: set[str], tmp_path: Path) -> None:
    inner, named = original("smollm"), ["<image>", "<tool>", "<x>"]
    inner.add_tokens([AddedToken(token, normalized=False) for token in named])
    tokenizer = tokenizer_from_folder(write(tmp_path, inner, tokenizer_config=extra))
    assert {tokenizer.token(i) for i in range(900, 903) if tokenizer.is_special(i)} == special


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", [5, "<x>", True])
def test_extra_special_tokens_that_are_no_list(key: str, value: object, tmp_path: Path) -> None:
    write(tmp_path, original("smollm"), tokenizer_config={key: value})
    with pytest.raises(ModelFileError, match=f"tokenizer_config.json: {key} is {value!r}; allowed is a list"):
        tokenizer_from_folder(tmp_path)


# Holes in the ids


def test_ids_that_stand_for_no_token(tmp_path: Path) -> None:
    smollm = byte_level_metadata(original("smollm"), "smollm")
    assert tokenizer_from_metadata(smollm).unused_ids == ()
    types = list(smollm["tokenizer.ggml.token_type"])
    types[880], types[899] = 5, 5
    merges = [m for m in smollm["tokenizer.ggml.merges"] if m.replace(" ", "") in smollm["tokenizer.ggml.tokens"][:880]]
    holes = tokenizer_from_metadata(smollm | {"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges})
    assert (holes.vocab_size, holes.unused_ids) == (899, (880,))

    gap = json.loads(original("smollm").to_str())
    last = {"id": 905, "content": "<x>", "special": True}
    gap["added_tokens"].append(last | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False))
    gap["model"]["vocab"]["<x>"] = 905
    (tmp_path / "tokenizer.json").write_text(json.dumps(gap))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.unused_ids) == (906, (900, 901, 902, 903, 904))
    for unused in (900, 904):
        with pytest.raises(SettingError, match=f"token id is {unused}; allowed is a known token"):
            tokenizer.token_bytes(unused)
    assert tokenizer.first_difference(tokenizer_from_metadata(smollm)) is None
