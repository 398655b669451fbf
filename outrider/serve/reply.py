"""What the responses of both completion endpoints have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from outrider.core.types import FinishReason
from outrider.engine.request import Delta, RequestOutput
from outrider.serve.schemas import Sampling
from outrider.serve.service import Service
from outrider.serve.stream import Stream
from outrider.serve.usage import counts, speculation, usage
from outrider.serve.web import EventStream, Json, dumps

Choice = dict[str, Any]


class Writer(Protocol):
    """Puts the answers of one request into an endpoint's form."""

    def choices(self, outputs: Sequence[RequestOutput]) -> list[Choice]:
        """Of all that have ended."""

    def pieces(self, delta: Delta) -> list[Choice]:
        """Of what is new in one, for a frame each."""

    def is_text(self, delta: Delta) -> bool:
        """Whether that is ``blank`` with the delta's text in it, if it has one, and nothing else."""

    def blank(self, index: int) -> Choice:
        """The piece of an answer that is a text and nothing else; here an empty one."""


class Reply:
    """One response: its head, and how choices become a body or an event stream."""

    def __init__(self, service: Service, request: Sampling, id: str, kind: str, prompt_tokens: int) -> None:
        self.id = id
        self.created = int(time.time())
        self._name, self._kind = service.name, kind
        self._prompt_tokens = prompt_tokens
        options = request.stream_options
        self._usage = request.usage_in_stream
        self._running_usage = options is not None and options.continuous_usage_stats
        self._segments = request.speculative.segments
        self._waiting: dict[int, list[dict[str, Any]]] = {}  # segments of a choice that were not sent yet
        self._metrics = request.speculative.metrics or service.settings.per_request_spec_decode_metrics

    async def whole(self, stream: Stream, writer: Writer) -> Json:
        """The response in one piece, when all has ended."""
        try:
            outputs = await stream.outputs()
        finally:
            stream.close()
        body = self._head(writer.choices(outputs)) | {"usage": usage(outputs)} | self._measured(outputs)
        return Json(body)

    def stream(self, stream: Stream, writer: Writer) -> EventStream:
        """The response piece by piece."""
        return EventStream(stream, self._frames(stream, writer))

    async def _frames(self, stream: Stream, writer: Writer) -> AsyncIterator[bytes]:
        """What is new, in one piece. Only what differs is made anew: a token's time is the server's time too."""
        head, _, end = dumps(self._head([])).rpartition(b"[]")
        before, after = b"data: " + head + b"[", b"]" + end + b"\n\n"
        if self._usage:
            after = b"]" + end[:-1] + b',"usage":null}\n\n'
        around: dict[int, list[bytes]] = {}  # the text of a choice
        generated = 0
        while deltas := await stream.news():
            frames: list[bytes] = []
            for delta in deltas:
                if self._running_usage:
                    generated += len(delta.token_ids)
                    after = b"]" + end[:-1] + b',"usage":' + dumps(counts(self._prompt_tokens, generated)) + b"}\n\n"
                if self._segments or not writer.is_text(delta):
                    pieces = self._traced(delta, writer.pieces(delta)) if self._segments else writer.pieces(delta)
                    frames += [before + dumps(piece) + after for piece in pieces]
                elif text := delta.text:
                    if delta.index not in around:
                        around[delta.index] = dumps(writer.blank(delta.index)).split(b'""')
                    opening, closing = around[delta.index]
                    frames.append(before + opening + dumps(text) + closing + after)
            if frames:
                yield b"".join(frames)
        if self._usage or self._metrics:
            outputs = stream.results()
            yield frame(self._head([]) | {"usage": usage(outputs)} | self._measured(outputs))

    def _traced(self, delta: Delta, pieces: list[Choice]) -> list[Choice]:
        """The same pieces, with what is new in segments at the one that has the text, or the first."""
        waiting = self._waiting.setdefault(delta.index, [])
        waiting += ({"text": segment.text, "drafted": segment.drafted} for segment in delta.segments)
        if waiting and pieces:
            told = next((p for p in pieces if p.get("text") or p.get("delta", {}).get("content")), pieces[0])
            told["segments"] = self._waiting.pop(delta.index)
        return pieces

    def _head(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self._kind,
            "created": self.created,
            "model": self._name,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _measured(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"metrics": speculation(outputs)} if self._metrics else {}


def frame(chunk: object) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(chunk) + b"\n\n"


def finish_name(reason: FinishReason | None) -> str | None:
    """``abort`` is how an answer ends that the server cut short when it was shut down."""
    return None if reason is None else reason.value
