"""Constrained output: what a request's fields say about the form of its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.core.errors import SettingError, nearest
from outrider.core.grammar import GUIDED, Grammar, grammar_of, stated, the_only
from outrider.serve.errors import bad_field
from outrider.serve.schemas import ANY_TOOLS, MUST_CALL, NO_TOOLS, ChatRequest, Sampling, Tool

_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""The keys of vLLM's ``structured_outputs``, which took the place of ``guided_*``, and the kinds they hold."""


def asked_grammar(request: Sampling) -> Grammar | None:
    """The grammar that the answer must follow; None for free text. Raises SettingError or ApiError for a bad field."""
    said = grammar_of(request.response_format, {name: getattr(request, name) for name in GUIDED})
    called = _tool_call(request) if isinstance(request, ChatRequest) else None
    return the_only([said, *_structured(request.structured_outputs or {}), called])


def _structured(given: dict[str, Any]) -> list[Grammar | None]:
    grammars = []
    for key, value in given.items():
        where = f"structured_outputs.{key}"
        if key not in _STRUCTURED:
            allowed = f"one of {', '.join(_STRUCTURED)}{nearest(key, _STRUCTURED)}"
            raise SettingError(f"{where} is unknown; allowed is {allowed}", where)
        grammars.append(stated(_STRUCTURED[key], value, where))
    return grammars


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
    """One call in the form that ``serve.tools`` reads. Each schema stands alone, as it may refer to its own parts."""
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    rules = [f'start: "<tool_call>\\n" ({names}) "\\n</tool_call>"']
    for i, tool in enumerate(tools):
        begin = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        schema = json.dumps(_arguments(tool))
        rules.append(f'call_{i}: {begin} arguments_{i} "}}"\narguments_{i}: %json {schema}')
    return "\n".join(rules) + "\n"


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even where it does not say so."""
    schema = tool.function.parameters or {}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        name, shown = tool.function.name[:80], str(kind)[:80]
        raise bad_field("tools", f"tools has {name!r} with parameters of type {shown!r}; allowed is 'object'")
    return {**schema, "type": "object"}
