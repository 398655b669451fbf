"""Which tokens two vocabularies share, and how a draft model reads what it has no token for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.core.errors import SettingError
from outrider.models.load import LoadedModel
from outrider.models.tokenizer import Tokenizer
from outrider.spec.vocabulary import SharedVocabulary
from tests.engine.harness import toy_target
from tests.tokens import byte_level, sentencepiece
from tests.toy import toy_config


def speaking(tokenizer: Tokenizer | None, rows: int = 0, eos: tuple[int, ...] = ()) -> LoadedModel:
    """A toy model with ``tokenizer``."""
    size = rows or (tokenizer.vocab_size if tokenizer else 8)
    shown: Any = tokenizer
    return toy_target(
        toy_config(vocab=size, layers=1, hidden=16, heads=2, kv_heads=1, ffn=16), tokenizer=shown, eos=eos
    )


def shared(target: Tokenizer, drafter: Tokenizer) -> SharedVocabulary:
    return SharedVocabulary(speaking(drafter), speaking(target))


def pairs(both: SharedVocabulary) -> dict[int, int]:
    return dict(zip(both.target_ids.tolist(), both.draft_ids.tolist(), strict=True))


LETTERS = list("abcdefgh")


def test_the_same_text_is_the_same_token_however_it_is_written() -> None:
    """A space as Ġ or ▁, a newline as Ċ or <0x0A>, letters beyond ASCII, half a character."""
    target = byte_level(["x", " the", "\n", "é", b"\xe4", "▁", "b"])
    drafter = sentencepiece(["<unk>", "é", "<0x0A>", " the", "<0xE4>", "the", "Ġthe", "b"])
    assert pairs(shared(target, drafter)) == {1: 3, 2: 2, 3: 1, 4: 4, 6: 7}
    assert target.token(1) == "Ġthe"
    assert drafter.token(3) == "▁the"


def test_duplicates_pair_one_to_one_and_byte_tokens_come_last() -> None:
    """'A' and <0x41> are two tokens of one text: the likelier one pairs, and both are read as what the other has."""
    twice = sentencepiece(["<unk>", "<0x41>", "A", "b"])
    once = byte_level(["b", "A"])
    both = shared(twice, once)
    assert pairs(both) == {2: 1, 3: 0}
    assert (both.draft_id(1), both.draft_id(2)) == (1, 1)
    assert pairs(shared(once, twice)) == {0: 3, 1: 2}
    assert pairs(shared(twice, sentencepiece(["<unk>", "b", "A", "<0x41>"]))) == {0: 0, 1: 3, 2: 2, 3: 1}
    only_byte = sentencepiece(["<unk>", "<0x41>", "b"])
    assert pairs(shared(once, only_byte)) == {0: 2, 1: 1}


def test_what_only_looks_like_a_byte_or_a_control_token_is_text() -> None:
    target = byte_level(["<0x41>", "<s>", "</s>", *LETTERS], special=["<|end|>"])
    drafter = sentencepiece(["<unk>", "<0x41>", *LETTERS], special=["<s>", "</s>"], added=["<|end|>"])
    both = shared(target, drafter)
    names = {target.token(t): drafter.token(d) for t, d in pairs(both).items()}
    assert names == {letter: letter for letter in LETTERS}
    assert both.draft_id(0) is both.draft_id(1) is None


def test_added_tokens_pair_by_their_text_and_control_tokens_by_name() -> None:
    target = byte_level(LETTERS, special=["<|im_end|>", "<|x|>"], added=["    ", "<tool>"])
    drafter = sentencepiece(["<unk>", "    ", *LETTERS], special=["<|y|>", "<|im_end|>"], added=["<tool>"])
    names = {target.token(t): drafter.token(d) for t, d in pairs(shared(target, drafter)).items()}
    assert names == {**{x: x for x in LETTERS}, "    ": "▁▁▁▁", "<tool>": "<tool>", "<|im_end|>": "<|im_end|>"}


def test_bos_and_eos_pair_by_what_they_are_for() -> None:
    target = byte_level(LETTERS, special=["<|begin|>", "<|end|>", "<|eot|>"], bos="<|begin|>")
    drafter = sentencepiece(["<unk>", *LETTERS], special=["<s>", "</s>"], bos="<s>", adds_bos=True)
    n = len(LETTERS)
    both = SharedVocabulary(speaking(drafter, eos=(n + 2,)), speaking(target, eos=(n + 1, n + 2)))
    assert {t: d for t, d in pairs(both).items() if t >= n} == {n: n + 1, n + 1: n + 2}
    assert both.prefix == (n + 1,)
    assert (both.draft_id(n + 2), both.text_of(n + 2)) == (None, b"<|eot|>")
    lacking = SharedVocabulary(speaking(sentencepiece(["<unk>", *LETTERS])), speaking(target, eos=(n + 1,)))
    assert {t for t in pairs(lacking) if t >= n} == set()
    assert lacking.text_of(n) == b"", "a BOS that the draft model lacks is left out"
    named = byte_level(LETTERS, special=["</s>", "<|end|>"])
    both = SharedVocabulary(speaking(drafter, eos=(n + 2,)), speaking(named, eos=(n + 1, n)))
    assert {t: d for t, d in pairs(both).items() if t >= n} == {n: n + 2}, "by name first, and each one once"


def test_padding_and_tokens_without_a_row_are_not_shared() -> None:
    target, drafter = byte_level(LETTERS), byte_level(list(reversed(LETTERS)))
    both = SharedVocabulary(speaking(drafter, rows=6), speaking(target, rows=10))
    assert pairs(both) == {t: 7 - t for t in range(2, 8)}
    assert [drafter.token(i) for i in both.encode(b"cab")] == ["c"], "its model has no row for 'a' and 'b'"


def test_other_text_is_split_by_the_draft_models_tokenizer_and_no_byte_is_changed() -> None:
    both = shared(byte_level(["xyz", *LETTERS]), sentencepiece(["<unk>", "ab", " ab", "cd", " ", *LETTERS]))

    def split(text: bytes) -> list[str]:
        return [both._tokenizer.token(i) for i in both.encode(text)]

    assert split(b"abcd") == ["ab", "cd"], "no space comes in front in the middle of a text"
    assert split(b" abcd") == ["▁ab", "cd"]
    assert split(b"") == []
    assert split(b"a?b") == ["a", "b"], "what it cannot write is left out"
    whole = shared(byte_level(LETTERS), sentencepiece(["<unk>", *LETTERS, *(f"<0x{i:02X}>" for i in range(256))]))
    for text in ("a 你b".encode(), b"\xe4\xbd", b"a\xffb"):
        assert b"".join(map(whole._tokenizer.token_bytes, whole.encode(text))) == text
    inner = byte_level([*LETTERS, "hh"])
    assert [inner.token(i) for i in shared(byte_level(LETTERS), inner).encode(b"ahhb")] == ["a", "hh", "b"]


@pytest.mark.parametrize("which", ["drafter", "target"])
def test_a_missing_tokenizer_is_named(which: str) -> None:
    with_one, without = speaking(byte_level(LETTERS)), replace(speaking(None), name="mute")
    drafter, target = (without, with_one) if which == "drafter" else (with_one, without)
    with pytest.raises(SettingError, match="use_heterogeneous_vocab is True, but mute has no tokenizer"):
        SharedVocabulary(drafter, target)


def test_vocabularies_with_too_little_in_common_are_refused() -> None:
    with pytest.raises(SettingError, match=r"share 0 tokens of vocabularies of 8 and 9; allowed .* at least 5%"):
        shared(byte_level(LETTERS), sentencepiece(["<unk>", *(letter * 2 for letter in LETTERS)]))
    many = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    with pytest.raises(SettingError, match="share 4 tokens"):
        shared(byte_level(["1", "2", "3", "4", *many]), byte_level(["1", "2", "3", "4", *(m.upper() for m in many)]))
