"""Grammars as requests state them: what is taken, under which name, and what is refused with the field named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.core.errors import SettingError
from outrider.core.grammar import MAX_GRAMMAR, Grammar, grammar_of
from outrider.core.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


def test_no_grammar() -> None:
    assert grammar_of() is None
    assert grammar_of({"type": "text"}, {"guided_json": None, "guided_regex": None}) is None


def test_every_spelling_of_a_request() -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert grammar_of({"type": "json_object"}) == Grammar("json_object")
    for grammar in (
        grammar_of(named),
        grammar_of(None, {"guided_json": SCHEMA}),
        grammar_of({"type": "text"}, {"guided_json": json.dumps(SCHEMA)}),
    ):
        assert grammar is not None
        assert grammar.kind == "json_schema"
        assert json.loads(grammar.text) == SCHEMA
    assert grammar_of(None, {"guided_regex": "a+"}) == Grammar("regex", "a+")
    assert grammar_of(None, {"guided_grammar": 'start: "a"'}) == Grammar("lark", 'start: "a"')
    chosen = grammar_of(None, {"guided_choice": ["yes", 'n"o']})
    assert chosen is not None
    assert chosen.options == ["yes", 'n"o']


@pytest.mark.parametrize(
    ("response_format", "guided", "message"),
    [
        ("json", {}, "response_format is 'json'; allowed is an object with a type"),
        ({}, {}, "response_format.type is None; allowed is one of text, json_object, json_schema"),
        ({"type": "xml"}, {}, "response_format.type is 'xml'"),
        ({"type": ["text"]}, {}, "response_format.type is"),
        ({"type": "json_schema"}, {}, "response_format.json_schema is None"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {}, "response_format.json_schema.schema is None"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, {}, "response_format.json_schema.schema is '{}'"),
        (None, {"guided_json": 7}, "guided_json is '7'; allowed is a JSON schema"),
        (None, {"guided_json": "{"}, "guided_json is '{'; allowed is valid JSON"),
        (None, {"guided_json": {"a": {1, 2}}}, "guided_json is .* allowed is what JSON can express"),
        (None, {"guided_regex": 7}, "guided_regex is 7; allowed is a text"),
        (None, {"guided_regex": " "}, "guided_regex is ' '; allowed is a text that is not blank"),
        (None, {"guided_regex": "a" * (MAX_GRAMMAR + 1)}, f"guided_regex has .* allowed are {MAX_GRAMMAR}"),
        (None, {"guided_grammar": ""}, "guided_grammar is ''"),
        (None, {"guided_choice": []}, "guided_choice is '\\[\\]'; allowed is a list of texts"),
        (None, {"guided_choice": "yes"}, "guided_choice is"),
        (None, {"guided_choice": ["yes", 1]}, "guided_choice is"),
        (None, {"guided_choice": [""]}, "guided_choice is"),
        (None, {"guided_chioce": ["a"]}, "guided_chioce is unknown; .*did you mean 'guided_choice'"),
        ({"type": "json_object"}, {"guided_regex": "a"}, "guided_regex and response_format; allowed is one of them"),
    ],
)
def test_what_is_refused(response_format: Any, guided: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        grammar_of(response_format, guided)


def test_a_grammar_of_an_unknown_kind() -> None:
    with pytest.raises(SettingError, match=r"grammar has the kind 'rgex'.*did you mean 'regex'"):
        Grammar("rgex", "a")
    with pytest.raises(SettingError, match=r"grammar is '\{\}'; allowed is no text"):
        Grammar("json_object", "{}")


def test_in_sampling_params() -> None:
    params = SamplingParams(grammar=Grammar.choice(["a"]))
    assert params.shapes_logits
    wrong: Any = "a+"
    with pytest.raises(SettingError, match="grammar is 'a\\+'; allowed is a Grammar, or None"):
        SamplingParams(grammar=wrong)
    with pytest.raises(SettingError, match="ignore_eos is true with guided_regex"):
        SamplingParams(grammar=Grammar("regex", "a", "guided_regex"), ignore_eos=True)
