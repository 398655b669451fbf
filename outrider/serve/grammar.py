"""Constrained output: what a request's fields say about the form of its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.core.errors import SettingError, nearest
from outrider.core.grammar import GUIDED, Grammar, grammar_of
from outrider.serve.errors import bad_field
from outrider.serve.schemas import ANY_TOOLS, MUST_CALL, NO_TOOLS, ChatRequest, Sampling, Tool

_STRUCTURED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
"""The keys of vLLM's ``structured_outputs``, which took the place of its ``guided_*`` fields."""


def asked_grammar(request: Sampling) -> Grammar | None:
    """The grammar that the answer must follow; None for free text. Raises ApiError, naming the field."""
    try:
        said = grammar_of(request.response_format, {name: getattr(request, name) for name in GUIDED})
        structured = _structured(request.structured_outputs)
    except SettingError as error:
        raise bad_field(str(error).split()[0], str(error)) from None
    called = _tool_call(request) if isinstance(request, ChatRequest) else None
    given = [grammar for grammar in (said, structured, called) if grammar is not None]
    if len(given) > 1:
        names = " and ".join(grammar.where.partition(".")[0] for grammar in given)
        raise bad_field(given[-1].where, f"the request has {names}; allowed is one of them")
    return given[0] if given else None


def _structured(given: dict[str, Any] | None) -> Grammar | None:
    """Raises SettingError for a key that is not known."""
    for key in given or {}:
        if key not in _STRUCTURED:
            allowed = ", ".join(_STRUCTURED)
            raise SettingError(
                f"structured_outputs.{key} is unknown; allowed is one of {allowed}{nearest(key, _STRUCTURED)}"
            )
    return grammar_of(None, {_STRUCTURED[key]: value for key, value in (given or {}).items()})


def _tool_call(request: ChatRequest) -> Grammar | None:
    """Where ``tool_choice`` demands a call: one call, of one of the tools that are allowed."""
    choice, tools = request.tool_choice, request.tools or []
    if choice in (None, NO_TOOLS, ANY_TOOLS):
        return None
    if choice != MUST_CALL:
        function = choice.get("function") if isinstance(choice, dict) else {"name": choice}
        name = function.get("name") if isinstance(function, dict) else None
        tools = [tool for tool in tools if tool.function.name == name]
    if not tools:
        allowed = "'none', 'auto', 'required' or a function that is among the tools"
        raise bad_field("tool_choice", f"tool_choice is {str(choice)[:80]!r}; allowed is {allowed}")
    return Grammar("lark", _call_grammar(tools), "tool_choice")


def _call_grammar(tools: Sequence[Tool]) -> str:
    """One call in the form that ``serve.tools`` reads."""
    calls = []
    for tool in tools:
        arguments = tool.function.parameters or {"type": "object"}
        properties = {"name": {"const": tool.function.name}, "arguments": arguments}
        schema = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append(json.dumps({**schema, "additionalProperties": False}))
    names = " | ".join(f"call_{i}" for i in range(len(calls)))
    rules = "\n".join(f"call_{i}: %json {schema}" for i, schema in enumerate(calls))
    return f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: {names}\n{rules}\n'
