"""``/v1/chat/completions``: a conversation in, the assistant's next turn out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from outrider.engine.request import Completion, Delta, RequestOutput
from outrider.sampling.logprobs import TokenLogprob
from outrider.serve.caller import Caller, new_id
from outrider.serve.errors import bad_field
from outrider.serve.logprobs import chat_entries
from outrider.serve.params import chat_logprobs, longest_answer, sampling_of, spec_of, text_of
from outrider.serve.reply import Choice, Reply, finish_name
from outrider.serve.schemas import NO_TOOLS, ChatRequest, Message, Tool
from outrider.serve.service import Service
from outrider.serve.tools import CLOSE, Call, ToolParser, conversation, takes_tools, told_in_words, tool_objects


async def answer(service: Service, request: ChatRequest, caller: Caller) -> Response:
    """Answers one request. Raises ApiError or SettingError before anything is sent."""
    tools = [] if request.tool_choice == NO_TOOLS else request.tools
    wanted, param = request.max_completion_tokens, "max_completion_tokens"
    if wanted is None:
        wanted, param = request.max_tokens, "max_tokens"
    if wanted is not None and wanted < 1:
        raise bad_field(param, f"{param} is {wanted}; allowed is a whole number >= 1")
    logprobs = chat_logprobs(request)
    prompt = await chat_prompt(service, request.messages, tools, request.add_generation_prompt)
    params = sampling_of(request, longest_answer(wanted, param, None, len(prompt), service.context), logprobs)
    if tools and not request.parallel_tool_calls:
        params = replace(params, stop=(*params.stop, CLOSE))  # one call at most: the answer ends with the first
    spec = await spec_of(request, service, caller.tenant)
    await service.prepare(params)
    stream = await service.loop.submit([prompt], params, spec, live=request.stream, caller=caller)
    writer = _Writer(service, bool(tools), logprobs is not None)
    if request.stream:
        reply = Reply(service, request, caller.id("chatcmpl"), "chat.completion.chunk", len(prompt))
        return reply.stream(stream, writer)
    reply = Reply(service, request, caller.id("chatcmpl"), "chat.completion", len(prompt))
    return await reply.whole(stream, writer)


async def chat_prompt(
    service: Service, messages: Sequence[Message], tools: Sequence[Tool], opens_answer: bool, add_bos: bool = False
) -> list[int]:
    """A conversation's token ids, up to where the assistant's answer begins. Raises ApiError if no context has them."""
    if not messages:
        raise bad_field("messages", "messages is an empty list; allowed is at least one message")
    service.check_size((text_of(message.content) for message in messages), "messages")
    turns, told = conversation(messages), tool_objects(tools)
    called = any("tool_calls" in turn or turn["role"] == "tool" for turn in turns)
    if (told or called) and not takes_tools(service.chat_template):
        turns, told = told_in_words(turns, told), []
    text = await service.render(turns, told, opens_answer)
    service.check_size([text], "messages")
    (prompt,) = await service.encode([text], add_bos, param="messages")
    return prompt


class _Writer:
    """Choices in this endpoint's form."""

    def __init__(self, service: Service, with_tools: bool, with_logprobs: bool) -> None:
        self._tokenizer = service.tokenizer
        self._with_tools, self._with_logprobs = with_tools, with_logprobs
        self._parsers: dict[int, ToolParser] = {}
        self._begun: set[int] = set()

    def choices(self, outputs: Sequence[RequestOutput]) -> list[Choice]:
        return [self._choice(completion) for output in outputs for completion in output.completions]

    def _choice(self, completion: Completion) -> Choice:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        reason = finish_name(completion.finish_reason)
        if self._with_tools:
            parser = ToolParser()
            events = [*parser.push(completion.text), *parser.flush()]
            calls = [event for event in events if isinstance(event, Call)]
            if calls:
                said = "".join(event for event in events if isinstance(event, str))
                message["content"] = said or None
                message["tool_calls"] = [_call(call) for call in calls]
                reason = _with_calls(reason)
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": reason,
        }

    def pieces(self, delta: Delta) -> list[Choice]:
        index, reason = delta.index, finish_name(delta.finish_reason)
        sent: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            sent.append({"role": "assistant", "content": ""})
        if self._with_tools:
            parser = self._parsers.setdefault(index, ToolParser())
            calls_before = parser.calls
            events = parser.push(delta.text) + (parser.flush() if reason is not None else [])
            sent += _event_deltas(events, calls_before)
            reason = _with_calls(reason) if parser.calls else reason
        elif delta.text:
            sent.append({"content": delta.text})
        pieces = [_piece(index, fields) for fields in sent]
        if reason is not None:
            pieces.append(_piece(index, {}, reason))
        if delta.logprobs:
            if not pieces:
                pieces.append(self.blank(index))
            with_text = next((p for p in pieces if p["delta"].get("content") or "tool_calls" in p["delta"]), pieces[0])
            with_text["logprobs"] = self._logprobs(delta.logprobs)
        return pieces

    def is_text(self, delta: Delta) -> bool:
        plain = delta.finish_reason is None and not self._with_logprobs and not self._with_tools
        return plain and delta.index in self._begun

    def blank(self, index: int) -> Choice:
        return _piece(index, {"content": ""})

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": chat_entries(entries or (), self._tokenizer), "refusal": None}


def _piece(index: int, delta: dict[str, Any], reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _event_deltas(events: Sequence[str | Call], index: int) -> list[dict[str, Any]]:
    """Text and calls, the first of which is number ``index``, as ``delta`` objects."""
    deltas: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Call):
            deltas.append({"tool_calls": [{"index": index, **_call(event)}]})
            index += 1
        else:
            deltas.append({"content": event})
    return deltas


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _with_calls(reason: str | None) -> str | None:
    """How an answer that calls tools ends; one that was cut short says so."""
    return "tool_calls" if reason == "stop" else reason
