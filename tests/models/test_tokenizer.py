"""Tokenizers: rebuilt ones against originals, exact bytes, folders, and clear refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, trainers

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_metadata
from outrider.models.load import open_model
from outrider.models.tokenizer import Tokenizer
from tests.models.corpus import CONTROL, CORPUS, PLAIN, SMOLLM2_IDS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(digits: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTES | {"use_regex": False}]}


GPT2 = BYTES | {"use_regex": True}
SMOLLM = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
ORIGINALS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "smollm": (SMOLLM, False, False),
    "llama-bpe": (_split("{1,3}"), False, True),
    "qwen2": (_split(""), True, False),
    "gpt-2": (GPT2, False, False),
}
"""Per family: the pre-tokenizer as its published tokenizer.json has it, whether it normalizes to NFC, ignore_merges."""


def original(pre: str) -> tokenizers.Tokenizer:
    """A tiny tokenizer of the family, trained here on a part of the corpus."""
    splitter, nfc, ignore_merges = ORIGINALS[pre]
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    settings = json.loads(inner.to_str()) | {
        "pre_tokenizer": splitter,
        "normalizer": {"type": "NFC"} if nfc else None,
        "decoder": BYTES | {"use_regex": True},
    }
    inner = tokenizers.Tokenizer.from_str(json.dumps(settings))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    inner.train_from_iterator(PLAIN, trainer)
    return inner


def byte_level_metadata(inner: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes to GGUF for ``inner``."""
    model = json.loads(inner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="module", params=ORIGINALS)
def family(request: pytest.FixtureRequest) -> tuple[str, tokenizers.Tokenizer, dict[str, Any]]:
    inner = original(request.param)
    return request.param, inner, byte_level_metadata(inner, request.param)


@pytest.fixture(scope="module")
def smollm() -> dict[str, Any]:
    return byte_level_metadata(original("smollm"), "smollm")


def test_rebuilt_tokenizer_gives_the_originals_ids(family: tuple[str, tokenizers.Tokenizer, dict[str, Any]]) -> None:
    pre, inner, metadata = family
    rebuilt = tokenizer_from_metadata(metadata)
    for text in CORPUS:
        assert rebuilt.encode(text) == inner.encode(text).ids, (pre, text)
    inner.encode_special_tokens = True
    for text in CONTROL:
        assert rebuilt.encode(text, specials=False) == inner.encode(text).ids, (pre, text)


def test_another_family_gives_other_ids(family: tuple[str, tokenizers.Tokenizer, dict[str, Any]]) -> None:
    pre, inner, metadata = family
    for other in set(ORIGINALS) - {pre}:
        rebuilt = tokenizer_from_metadata(metadata | {"tokenizer.ggml.pre": other})
        assert any(rebuilt.encode(text) != inner.encode(text).ids for text in CORPUS), (pre, other)


def test_bytes_of_tokens_make_the_text(family: tuple[str, tokenizers.Tokenizer, dict[str, Any]]) -> None:
    pre, _, metadata = family
    rebuilt = tokenizer_from_metadata(metadata)
    for text in CORPUS:
        ids = rebuilt.encode(text)
        expected = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
        assert b"".join(map(rebuilt.token_bytes, ids)).decode() == expected
        assert rebuilt.decode(ids, skip_special_tokens=False) == expected
        assert rebuilt.decode(rebuilt.encode(text, specials=False)) == expected
    one_byte = [rebuilt.token_bytes(i) for i in range(3, rebuilt.vocab_size) if len(rebuilt.token_bytes(i)) == 1]
    assert sorted(one_byte) == [bytes([b]) for b in range(256)]


def test_specials_and_ends(smollm: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_metadata(smollm)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2, 0), 900)
    assert [i for i in range(900) if tokenizer.is_special(i)] == [0, 1, 2]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token(tokenizer.encode(" ")[0]) == "Ġ"


def test_bos(smollm: dict[str, Any]) -> None:
    quiet = tokenizer_from_metadata(smollm)
    ids = quiet.encode("hi")
    assert ids[0] != 1
    assert quiet.encode("hi", add_bos=True) == [1, *ids]
    adding = tokenizer_from_metadata(smollm | {"tokenizer.ggml.add_bos_token": True})
    assert adding.encode("hi") == [1, *ids]
    assert adding.encode("hi", add_bos=False) == ids
    assert adding.encode("hi", specials=False) == [1, *ids]
    none = tokenizer_from_metadata({k: v for k, v in smollm.items() if "bos_token_id" not in k})
    with pytest.raises(SettingError, match="no BOS token"):
        none.encode("hi", add_bos=True)


@pytest.mark.parametrize("token_id", [-1, 900, 2**31, 2**40])
def test_unknown_ids_are_refused(smollm: dict[str, Any], token_id: int) -> None:
    tokenizer = tokenizer_from_metadata(smollm)
    for call in (tokenizer.token, tokenizer.token_bytes, lambda i: tokenizer.decode([i])):
        with pytest.raises(SettingError, match=f"token id is {token_id}; allowed .* 0 to 899"):
            call(token_id)


def test_text_that_is_no_unicode_is_refused(smollm: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_metadata(smollm)
    with pytest.raises(SettingError, match=r"lone surrogate U\+D83D at 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(SettingError, match="type bytes"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


def test_first_difference(smollm: dict[str, Any]) -> None:
    mine, tokens = tokenizer_from_metadata(smollm), smollm["tokenizer.ggml.tokens"]

    def other(tokens: list[str], types: list[int] | None = None) -> Tokenizer:
        types = types or smollm["tokenizer.ggml.token_type"]
        changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": []}
        return tokenizer_from_metadata(smollm | changed)

    assert mine.first_difference(other(tokens)) is None
    assert mine.first_difference(other(["<s>", *tokens[1:]])) is None  # only a control token's name
    longer = [*tokens, "<think>"], [*smollm["tokenizer.ggml.token_type"], 4]
    assert mine.first_difference(other(*longer)) is None
    swapped = [*tokens[:500], tokens[501], tokens[500], *tokens[502:]]
    assert mine.first_difference(other(swapped)) == (500, tokens[500], tokens[501])
    shorter = tokens[:-1], smollm["tokenizer.ggml.token_type"][:-1]
    assert mine.first_difference(other(*shorter)) == (899, tokens[899], None)
    assert other(*shorter).first_difference(mine) == (899, None, tokens[899])


# SentencePiece


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A small vocabulary of pieces in the order a training run found them, as a converter writes it."""
    inner = tokenizers.Tokenizer(models.BPE())
    marked = [" ".join(text.split()).replace(" ", "▁") for text in PLAIN if len(text) < 100]
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, min_frequency=1)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", "merged_with_next")
    inner.train_from_iterator(marked, trainer)
    pieces = sorted(inner.get_vocab(), key=lambda piece: (len(piece) == 1, inner.token_to_id(piece)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def best_neighbours_first(text: str, metadata: dict[str, Any]) -> Iterator[int]:
    """SentencePiece BPE from its definition: join the neighbours with the best score, leftmost first, until none."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    score = {t: s for t, s, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True) if kind == 1}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    for part in parts:
        if part in score:
            yield tokens.index(part)
        else:
            yield from (3 + byte for byte in part.encode())


def test_sentencepiece_joins_the_best_neighbours_first() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_from_metadata(metadata)
    longest = 0
    for text in CORPUS:
        if len(text) < 120:
            expected = list(best_neighbours_first(" " + text, metadata)) if text else []
            assert tokenizer.encode(text, add_bos=False) == expected, text
            longest = max(longest, *(len(tokenizer.token_bytes(i)) for i in expected), 0) if expected else longest
            plain = text.replace("▁", " ")  # it cannot tell the mark from a space
            assert tokenizer.decode(expected) == plain
            assert b"".join(map(tokenizer.token_bytes, expected)).decode() == (" " + plain if text else "")
    assert longest >= 5
    assert tokenizer.encode("hi")[0] == tokenizer.bos_id == 1


def test_sentencepiece_marks_bytes_and_prefix() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata())
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.encode("<s>", add_bos=False) == [1]
    assert 1 not in tokenizer.encode("<s>", add_bos=False, specials=False)
    assert tokenizer.strips_leading_space
    bare = tokenizer_from_metadata(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert not bare.strips_leading_space
    assert bare.decode(bare.encode(" two", add_bos=False)) == " two"
    assert tokenizer.decode(tokenizer.encode(" two", add_bos=False)) == " two"
    assert bare.encode(" two") == tokenizer.encode("two")


# Broken metadata


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; known are gpt2, llama"),
        ({"model": []}, "tokenizer.ggml.model is"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'; known are smollm, llama-bpe"),
        ({"pre": None}, "tokenizer.ggml.pre is None; known are"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'; expected is a list"),
        ({"token_type": [1, 1]}, "token_type has 2 values; expected are 900"),
        ({"tokens": ["a"] * 900}, "has 'a' twice, as 0 and 1"),
        ({"tokens": list(range(900))}, "not a str"),
        ({"merges": ["a"]}, "merges has 'a'; allowed are two known tokens"),
        ({"merges": ["a nosuch"]}, "merges has 'a nosuch'"),
        ({"bos_token_id": 900}, "bos_token_id is 900; allowed is a whole number from 0 to 899"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_broken_metadata_is_refused(smollm: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokenizer_from_metadata(smollm | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def test_no_token_and_unused_tokens(smollm: dict[str, Any]) -> None:
    padded = {
        "tokenizer.ggml.tokens": [*smollm["tokenizer.ggml.tokens"], "[PAD900]", "[PAD901]"],
        "tokenizer.ggml.token_type": [*smollm["tokenizer.ggml.token_type"], 5, 5],
        "tokenizer.ggml.bos_token_id": 0xFFFFFFFF,
    }
    tokenizer = tokenizer_from_metadata(smollm | padded)
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (900, None)
    assert set(PRE_TOKENIZERS) >= {"smollm", "llama-bpe", "llama3", "qwen2", "gpt-2", "default"}


# The default model


@pytest.mark.model
def test_default_model(smollm2_path: Path) -> None:
    tokenizer = open_model(smollm2_path).tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (49152, 1, (2,), False)
    for text, ids in SMOLLM2_IDS.items():
        assert " ".join(map(str, tokenizer.encode(text))) == ids, text
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
