"""Compiling grammars for a model's tokens: exact bytes, control tokens, end tokens, and grammars that are not sound."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.models.gguf_tokenizer import tokenizer_from_metadata
from outrider.models.grammars import MAX_COMPILED, Grammars
from outrider.models.tokenizer import Tokenizer, tokenizer_from_folder
from tests.models.test_tokenizer import sentencepiece_metadata
from tests.tiny import write_tiny_model

pytest.importorskip("llguidance")
EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_from_folder(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, (EOS,))


def allowed(grammars: Grammars, grammar: Grammar, *tokens: int) -> list[int]:
    compiled = grammars.compile(grammar)
    matcher = compiled.start()
    assert matcher.try_consume_tokens(list(tokens)) == len(tokens)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[: compiled.n_tokens]).tolist()


def test_ordinary_tokens_are_their_bytes(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Any text: every token that is a start of valid UTF-8, no control token; the end token as nothing may follow."""

    def starts_text(data: bytes) -> bool:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return True

    free = [i for i in range(300) if not tokenizer.is_special(i) and starts_text(tokenizer.token_bytes(i))]
    assert allowed(grammars, Grammar("regex", r"(?s:.*)")) == sorted([*free, EOS])
    assert 200 < len(free) < 297


def test_a_character_over_several_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The two bytes of é, one token each."""
    one = {tokenizer.token_bytes(i): i for i in range(300)}
    lead, tail = one["é".encode()[:1]], one["é".encode()[1:]]
    grammar = Grammar("regex", "[éç]")
    assert lead in allowed(grammars, grammar)
    assert tail in allowed(grammars, grammar, lead)
    assert one[b"a"] not in allowed(grammars, grammar, lead)
    assert allowed(grammars, grammar, lead, tail) == [EOS]


def test_control_tokens_are_not_their_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The text of a control token may be written, letter by letter; the token itself is never drawn."""
    ids = tokenizer.encode("<|im_start|>", specials=False)
    assert len(ids) > 1
    grammar = Grammar.choice(["<|im_start|>", "<|im_end|>"])
    assert not set(allowed(grammars, grammar)) & {0, 1, 2}
    assert allowed(grammars, grammar, *ids) == [EOS]


def test_an_ordinary_token_may_be_the_end(tokenizer: Tokenizer) -> None:
    """The EOS trick: what is declared an end token is no text any more; several end tokens all end it."""
    letter = {tokenizer.token_bytes(i): i for i in range(300)}
    ends = (letter[b"a"], EOS)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (*ends, 5000))
    first = allowed(grammars, Grammar("regex", "[ab]{1,2}"))
    assert letter[b"b"] in first
    assert letter[b"a"] not in first
    assert set(allowed(grammars, Grammar("regex", "[ab]{1,2}"), letter[b"b"])) >= set(ends)


def test_forced_text_is_written_as_the_model_reads_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = "Outrider proposes, the target verifies."
    ids = tokenizer.encode(text)
    assert len(ids) < len(text)
    for i, token in enumerate(ids):
        assert allowed(grammars, Grammar.choice([text]), *ids[:i]) == [token]


def test_sentencepiece() -> None:
    """Its encoder puts a space before the text; the grammar sees the bytes that tokens really add."""
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata())
    eos = next(i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (eos,))
    for text in ("abc", " a b", "\n\x07é"):
        written, ids = b"", []
        while written != text.encode():
            nexts = allowed(grammars, Grammar.choice([text]), *ids)
            assert nexts
            assert all(text.encode().startswith(written + tokenizer.token_bytes(i)) for i in nexts)
            ids.append(nexts[-1])
            written += tokenizer.token_bytes(nexts[-1])
        assert allowed(grammars, Grammar.choice([text]), *ids) == [eos]


@pytest.mark.parametrize("text", ["yes", "é ü", 'q"x\\n', "a\nb", "你好", "a/b|c"])
def test_choices_are_taken_literally(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert EOS in allowed(grammars, Grammar.choice(["other", text, text + "x"]), *ids)


@pytest.mark.parametrize("text", ['start: "a" /[0-9]/+', 'root ::= "a" [0-9]+'])
def test_lark_and_gbnf(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    assert allowed(grammars, Grammar("lark", text)) == tokenizer.encode("a")
    assert EOS in allowed(grammars, Grammar("lark", text), *tokenizer.encode("a42"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "guided_x cannot be used as a regular expression: unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("json_schema", '{"type": "foo"}', "guided_x cannot be used as a JSON schema: Invalid type: foo"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "Unimplemented keys"),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"$ref": "#/$defs/a"}', "guided_x cannot be used"),
        ("lark", 'start: "a" b', "guided_x cannot be used as a grammar: .*unknown name"),
        ("lark", 'root ::= "a', "guided_x cannot be used as a grammar"),
        ("lark", "root ::= " + "(" * 9000, "guided_x cannot be used as a grammar"),
        ("regex", "(" * 9000 + "a" + ")" * 9000, "guided_x cannot be used as a regular expression"),
    ],
)
def test_an_unsound_grammar_is_named(grammars: Grammars, kind: str, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        grammars.compile(Grammar(kind, text, "guided_x"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_schema_that_allows_everything(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert set(tokenizer.encode("n1")) <= set(allowed(grammars, Grammar.schema(True)))


def test_rules_behind_rules_by_the_thousand(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The compiler calls itself once a rule: on an ordinary stack this ends the process."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(8000))
    assert allowed(grammars, Grammar("lark", f'start: r0\n{rules}\nr8000: "a"')) == tokenizer.encode("a")


def test_the_first_mask_is_made_by_whoever_compiles(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no answer waits for it, nor meets its limit."""
    monkeypatch.setattr("outrider.models.grammars._MAX_STEP", 16)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (EOS,))
    grammar = Grammar("lark", 'start: ("a" | "b" | "c" "d" | "e" start)+', "guided_grammar")
    with pytest.raises(SettingError, match=r"guided_grammar cannot be used as a grammar: .*limit 16; mask"):
        grammars.compile(grammar)


def test_what_a_model_must_have(tokenizer: Tokenizer) -> None:
    with pytest.raises(SettingError, match="guided_regex needs a tokenizer"):
        Grammars(None, 32, (0,)).compile(Grammar("regex", "a", "guided_regex"))
    with pytest.raises(SettingError, match="guided_regex needs an end token"):
        Grammars(tokenizer, tokenizer.vocab_size, ()).compile(Grammar("regex", "a", "guided_regex"))


def test_without_the_package(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingError, match=r"guided_regex needs the package llguidance.*outrider\[grammar\]"):
        Grammars(tokenizer, tokenizer.vocab_size, (EOS,)).compile(Grammar("regex", "a", "guided_regex"))


def test_compiled_once_and_not_kept_for_ever(grammars: Grammars) -> None:
    first = grammars.compile(Grammar("regex", "first"))
    assert grammars.compile(Grammar("regex", "first")) is first
    other = grammars.compile(Grammar("regex", "first", "guided_regex"))
    assert (first.where, other.where) == ("grammar", "guided_regex"), "errors name the field of their own request"
    assert other._origin is first._origin
    for i in range(MAX_COMPILED):
        grammars.compile(Grammar("regex", f"a{i}"))
    assert grammars.compile(Grammar("regex", "first")) is not first


def test_from_several_threads(tokenizer: Tokenizer) -> None:
    shared = Grammars(tokenizer, tokenizer.vocab_size, (EOS,))
    seen: list[list[int]] = []
    work = [threading.Thread(target=lambda: seen.append(allowed(shared, Grammar("regex", "[ab]c")))) for _ in range(6)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(seen) == 6
    assert seen.count(seen[0]) == 6


@pytest.mark.model
def test_the_default_model(smollm2_path: Path) -> None:
    from outrider.models.load import open_model

    tokenizer = open_model(smollm2_path).tokenizer
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    text = '{"name": "Zoë", "tags": ["a b", "\\n", "你好"], "n": -1.5e3}'
    ids = tokenizer.encode(text)
    for i, token in enumerate(ids):
        assert token in allowed(grammars, Grammar("json_object"), *ids[:i])
    assert allowed(grammars, Grammar("json_object"), *ids) == list(tokenizer.eos_ids)
