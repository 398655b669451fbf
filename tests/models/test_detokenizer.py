"""Streamed text is the whole text, and nothing comes out before it is certain."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import SettingError
from outrider.models.detokenizer import Detokenizer
from outrider.models.gguf_tokenizer import tokenizer_from_metadata
from outrider.models.tokenizer import Tokenizer
from tests.models.corpus import CORPUS

LETTERS = ["Ġ", *"abé", "a b"]


def byte_tokenizer() -> Tokenizer:
    """All 256 bytes as GPT-2 writes them, and three control tokens in front."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    tokens = ["<s>", "</s>", "<mark é>", *(chr(b if b in printable else next(others)) for b in range(256))]
    return tokenizer_from_metadata(_metadata("gpt2", tokens, [3, 3, 4, *[1] * 256]))


def piece_tokenizer() -> Tokenizer:
    """SentencePiece: control tokens, all bytes, some pieces."""
    pieces = ["▁", "▁a", "a", "▁▁", "é", "▁é▁"]
    tokens = ["<s>", "</s>", "<mark é>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return tokenizer_from_metadata(_metadata("llama", tokens, [3, 3, 4, *[6] * 256, *[1] * len(pieces)]))


def _metadata(kind: str, tokens: list[str], types: list[int]) -> dict[str, Any]:
    columns = {"tokens": tokens, "token_type": types, "scores": [0.0] * len(tokens), "merges": []}
    return {f"tokenizer.ggml.{k}": v for k, v in {"model": kind, "pre": "gpt-2", **columns}.items()}


TOKENIZERS = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_streamed_is_whole_for_any_ids(name: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    lead = st.sampled_from([3 + b for b in (0x20, 0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x96, 0xED, 0xF0, 0x9F, 0xFF)])
    ids = data.draw(st.lists(st.one_of(st.integers(0, tokenizer.vocab_size - 1), lead), max_size=12))
    assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_is_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in CORPUS:
        expected = text if name == "bytes" else text.replace("▁", " ")
        assert streamed(tokenizer, tokenizer.encode(text, add_bos=False), True) == expected


def test_a_character_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bytes"])
    assert [detokenizer.push(3 + b) for b in "a😀é".encode()] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.flush() == ""
    assert detokenizer.push(3 + 0xF0) == ""
    assert detokenizer.flush() == "\ufffd"


def test_invalid_bytes_do_not_hold_back_what_follows() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bytes"])
    assert [detokenizer.push(3 + b) for b in (0xE2, 0x82, 0x41, 0xFF, 0x42)] == ["", "", "\ufffdA", "\ufffd", "B"]


def test_special_tokens() -> None:
    ids = [0, 3 + 0x41, 1, 2]
    assert streamed(TOKENIZERS["bytes"], ids, True) == "A<mark é>"
    assert streamed(TOKENIZERS["bytes"], ids, False) == "<s>A</s><mark é>"


def test_leading_space() -> None:
    tokenizer = TOKENIZERS["pieces"]
    space_a, a = tokenizer.encode("a", add_bos=False)[0], 3 + 256 + 2
    assert tokenizer.token(a) == "a"
    assert streamed(tokenizer, [0, space_a, space_a], True) == "a a"
    continuing = Detokenizer(tokenizer, strip_leading_space=False)
    assert [continuing.push(i) for i in (space_a, a)] == [" a", "a"]
    assert Detokenizer(TOKENIZERS["bytes"]).push(3 + 0x20) == " "


def test_unknown_id_is_refused() -> None:
    with pytest.raises(SettingError, match="token id is 999; allowed"):
        Detokenizer(TOKENIZERS["bytes"]).push(999)


def test_work_per_token_does_not_grow() -> None:
    detokenizer = Detokenizer(TOKENIZERS["bytes"])

    def seconds(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            detokenizer.push(3 + 0x61)
        return time.perf_counter() - start

    seconds(1000)
    first = min(seconds(2000) for _ in range(3))
    seconds(100_000)
    assert min(seconds(2000) for _ in range(3)) < 5 * first
