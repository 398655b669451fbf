"""Tool calls as text: how tools are told to the model, and how calls are found in what it writes.

The form is the one that Hermes and Qwen models are trained on: ``{"name": ..., "arguments": {...}}`` between
``<tool_call>`` and ``</tool_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.models.chat_template import ChatTemplate
from outrider.serve.errors import bad_field
from outrider.serve.params import text_of
from outrider.serve.schemas import Message, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TOLD = """You may call functions to help with the user's query. The functions, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with a JSON object with its name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Call:
    """A call that the model made; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class ToolParser:
    """Splits growing text into what is said and what is called, in any portions, with the same outcome.

    A call is given when it is complete. What looks like a call and is none is text. White space around calls is not
    part of the text.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._held = ""
        self._inside = False
        self._space = ""  # that stood before the call which is open
        self._after_call = False

    def push(self, text: str) -> list[str | Call]:
        """What became certain with more ``text``."""
        self._held += text
        out: list[str | Call] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            at = self._held.find(mark)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            out += self._closed(before, CLOSE) if self._inside else self._opened(before)
        if not self._inside:
            sure = len(self._held) - _undecided(self._held)
            out += self._text(self._held[:sure])
            self._held = self._held[sure:]
        return out

    def flush(self) -> list[str | Call]:
        """The end of the text; a call that only lacks its closing mark counts."""
        held, self._held = self._held, ""
        return self._closed(held, "") if self._inside else self._text(held)

    def _opened(self, before: str) -> list[str | Call]:
        said = before.rstrip()
        self._inside, self._space = True, before[len(said) :]
        return self._text(said)

    def _closed(self, body: str, close: str) -> list[str | Call]:
        self._inside = False
        calls = parse_calls(body)
        if calls is None:
            return self._text(f"{self._space}{OPEN}{body}{close}")
        self.calls += len(calls)
        self._after_call = True
        return list(calls)

    def _text(self, text: str) -> list[str | Call]:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []


def _undecided(text: str) -> int:
    """Characters at the end that may belong to the opening of a call, white space before it included."""
    part = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
    rest = text[: len(text) - part]
    return part + len(rest) - len(rest.rstrip())


def parse_calls(body: str) -> list[Call] | None:
    """The call, or the list of calls, that stands between the marks; None if it is neither."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    calls = []
    for one in data if isinstance(data, list) else [data]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return None
        arguments = one.get("arguments", one.get("parameters", {}))
        if not isinstance(arguments, dict):
            return None
        try:
            calls.append(Call(one["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
        except ValueError:  # Python reads NaN and numbers beyond all bounds, which are no JSON
            return None
    return calls or None


def takes_tools(template: ChatTemplate) -> bool:
    """Whether a model's chat template writes tools itself."""
    return re.search(r"\btools\b", template.source) is not None


def conversation(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text contents, arguments of calls as objects. Raises ApiError."""
    return [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _turn(message: Message, where: str) -> dict[str, Any]:
    turn: dict[str, Any] = {k: v for k, v in (message.model_extra or {}).items() if v is not None}
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = text_of(message.content)
    if message.content is None and not message.tool_calls:
        raise bad_field(f"{where}.content", f"{where}.content is missing; allowed is a text or a list of text parts")
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls[{i}].function.arguments"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_field(where, f"{where} is no JSON object as a text")
    return value


def tool_objects(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def told_in_words(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with tools for a template that knows none: they stand in the system message, calls in the text."""
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_plain_turn(turn) for turn in turns]
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
    parts = [turn["content"], *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]
    return {"role": turn["role"], "content": "\n".join(part for part in parts if part)}
