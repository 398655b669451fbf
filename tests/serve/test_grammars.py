"""Answers of a demanded form over HTTP; the tiny model has random weights, so only the grammar makes them so."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from outrider import LLM
from tests.serve.test_chat import post

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is not installed")

TALK = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "properties": {"n": {"const": n}}}}}
    for name, n in (("first", 1), ("second", 2))
]


def answer(llm: LLM, **fields: Any) -> Any:
    reply = post(llm, {"messages": TALK, "temperature": 0, "max_tokens": 200, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_schema_is_obeyed(llm: LLM, fields: dict[str, Any], enabled: bool) -> None:
    choice = answer(llm, **fields, speculative={"enabled": enabled})
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"])["n"] in (1, 22)


def test_expressions_and_choices_are_obeyed(llm: LLM) -> None:
    assert re.fullmatch("[ab]{3}c", answer(llm, guided_regex="[ab]{3}c")["message"]["content"])
    assert answer(llm, guided_choice=["yes", "no"])["message"]["content"] in ("yes", "no")
    assert answer(llm, structured_outputs={"grammar": 'start: "x" /[0-9]/'})["message"]["content"][0] == "x"


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [("required", {"first", "second"}), ({"type": "function", "function": {"name": "second"}}, {"second"})],
)
def test_a_demanded_call_is_made(llm: LLM, choice: Any, allowed: set[str]) -> None:
    reply = answer(llm, tools=TOOLS, tool_choice=choice)
    assert reply["finish_reason"] == "tool_calls"
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] in allowed
    assert json.loads(call["function"]["arguments"]) == {"n": 1 if call["function"]["name"] == "first" else 2}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": 'say "é"', "parameters": parameters}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "parameters",
    [
        {"$defs": {"In": SCHEMA}, "properties": {"v": {"$ref": "#/$defs/In"}}, "required": ["v"]},
        {"$defs": {"In": SCHEMA}, "$ref": "#/$defs/In"},
        {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
        {"type": ["object", "null"], "properties": {"n": {"enum": [1]}}, "additionalProperties": False},
        {},
    ],
)
def test_a_demanded_call_is_made_whatever_the_schema(llm: LLM, parameters: dict[str, Any], seed: int) -> None:
    """Schemas refer to their own parts, and arguments are an object even where a schema allows more."""
    fields = {"temperature": 1, "seed": seed, "max_tokens": 100, "tools": [tool(parameters)], "tool_choice": "required"}
    reply = answer(llm, **fields)
    if reply["finish_reason"] == "length":  # random weights may go on for ever
        said = reply["message"]["content"].removeprefix("<tool_call>")
        assert said.strip().startswith('{"name": "say \\"\\u00e9\\"", "arguments": {')
    else:
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["name"] == 'say "é"'
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool({"type": "integer"})], "tool_choice": "required"}, "tools"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "third"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, fields: dict[str, Any], param: str) -> None:
    reply = post(llm, {"messages": TALK, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert param.split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("choice", [{"function": "x"}, {"function": None}, {"type": "function"}, {}, 7])
def test_a_malformed_tool_choice_is_refused(llm: LLM, choice: Any) -> None:
    reply = post(llm, {"messages": TALK, "tools": TOOLS, "tool_choice": choice})
    assert reply.status_code == 400
    assert "tool_choice" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_complex_is_the_clients_fault(
    llm: LLM, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only its own request ends, and the log keeps quiet."""
    rules = range(1200)
    lines = ['start: "x" big', "big: " + " | ".join(f"r{i}" for i in rules)]
    lines += [f'r{i}: "7" r{(i * 7 + 1) % len(rules)} | "8" "{i}"' for i in rules]
    reply = post(llm, {"messages": TALK, "guided_grammar": "\n".join(lines), "stream": stream})
    if stream:
        (said,) = [line for line in reply.text.splitlines() if '"error"' in line]
        error = json.loads(said.removeprefix("data: "))["error"]
    else:
        assert reply.status_code == 400
        error = reply.json()["error"]
    assert (error["param"], error["type"]) == ("guided_grammar", "invalid_request_error")
    assert "guided_grammar cannot be followed any further" in error["message"]
    assert "<state>" not in error["message"]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert answer(llm, guided_regex="[ab]{3}c")["finish_reason"] == "stop"
