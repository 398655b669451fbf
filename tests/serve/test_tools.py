"""Tool calls: told to the model, found in its text, in portions of any size."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM
from outrider.models.chat_template import ChatTemplate
from outrider.serve.chat import chat_prompt
from outrider.serve.schemas import Message, Tool
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings
from outrider.serve.tools import Call, ToolParser, parse_calls
from tests.serve.serving import run
from tests.tiny import TEMPLATE

ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
TWO = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
WEATHER = Call("weather", '{"city": "Köln", "days": [1, 2]}')
STOP = Call("stop", "{}")
CASES: list[tuple[str, str, list[Call]]] = [
    ("plain text < with <tool marks", "plain text < with <tool marks", []),
    (ONE, "", [WEATHER]),
    (f"{ONE}\n{TWO}", "", [WEATHER, STOP]),
    (f"Let me see. \n\n{ONE}\n\n{TWO} \n", "Let me see.", [WEATHER, STOP]),
    (f"First {ONE} then {TWO}", "Firstthen", [WEATHER, STOP]),
    (
        "<tool_call>[" + '{"name": "stop", "arguments": {}},' * 2 + '{"name": "a"}]</tool_call>',
        "",
        [STOP, STOP, Call("a", "{}")],
    ),
    ("ends early <tool_call>" + '{"name": "stop", "arguments": {}}', "ends early", [STOP]),
    ("a <tool_call>no JSON</tool_call> b", "a <tool_call>no JSON</tool_call> b", []),
    ('a <tool_call>{"name": 5}</tool_call>', 'a <tool_call>{"name": 5}</tool_call>', []),
    ("cut <tool_call>{", "cut <tool_call>{", []),
    ("space at the end  ", "space at the end  ", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_calls_are_found_whatever_the_portions(text: str, said: str, calls: list[Call]) -> None:
    for size in (1, 2, 3, 5, 7, 8, len(text)):
        for offset in range(min(size, 8)):
            parser = ToolParser()
            events: list[str | Call] = []
            for start in range(-offset, len(text), size):
                events += parser.push(text[max(0, start) : start + size])
            events += parser.flush()
            assert "".join(e for e in events if isinstance(e, str)) == said, (size, offset)
            assert [e for e in events if isinstance(e, Call)] == calls, (size, offset)


def test_text_is_not_held_back_without_need() -> None:
    parser = ToolParser()
    assert parser.push("hello <b> ") == ["hello <b>"]
    assert parser.push("x") == [" x"]
    assert parser.push("<tool") == []
    assert parser.push("box>") == ["<toolbox>"]


NO_JSON = ['{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": [1e999]}}']


@pytest.mark.parametrize(
    "body", ["", "[]", "5", '"x"', '{"name": "f", "arguments": "text"}', "[1]", "[" * 100_000, *NO_JSON]
)
def test_what_is_no_call(body: str) -> None:
    assert parse_calls(body) is None


def rendered(llm: LLM, template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """The prompt's text, read back from its tokens."""
    service = Service.of(llm.engine, ServerSettings())
    target = replace(llm.target, chat_template=ChatTemplate(template, {}))
    whole, llm.engine.target = llm.engine.target, target
    try:
        turns = [Message.model_validate(message) for message in messages]
        ids = run(chat_prompt(service, turns, [Tool.model_validate(tool) for tool in tools], True))
    finally:
        llm.engine.target = whole
    return service.tokenizer.decode(ids, skip_special_tokens=False)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "Paris?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_a_template_that_knows_tools_gets_them_as_objects(llm: LLM) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}|{{ m.content }}|"
        "{% for c in m.tool_calls %}{{ c.function.arguments.city }}{% endfor %}|{{ m.tool_call_id }}]{% endfor %}"
    )
    text = rendered(llm, template, TALK, [TOOL])
    want = "[system|Be brief.||][user|In Paris?||][assistant||Paris|][tool|sunny||c1]"
    assert text == json.dumps([TOOL]) + want


def test_a_template_that_knows_none_is_told_in_words(llm: LLM) -> None:
    text = rendered(llm, TEMPLATE, TALK, [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
