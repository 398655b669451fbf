"""HTTP pieces: JSON and event-stream responses, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import as_api_error
from outrider.serve.stream import Stream

logger = logging.getLogger("outrider")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class ClientGoneError(Exception):
    """The client closed the connection before its answer was there."""


def dumps(value: object) -> bytes:
    """Compact JSON; half of a surrogate pair, which UTF-8 cannot say, becomes a question mark."""
    return _JSON.encode(value).encode(errors="replace")


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return dumps(content)


def error_response(error: Exception) -> Response:
    """Any exception as OpenAI's clients expect it; one that is the server's own fault goes to the log."""
    shown = as_api_error(error)
    if shown.status == 500:
        logger.error("a request failed", exc_info=error)
    return Json(shown.body, shown.status, shown.headers)


class Faults:
    """Makes a response of whatever nobody foresaw, behind all that adds headers to responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await error_response(error)(scope, receive, send)


class EventStream(Response):
    """Server-sent events. A client that goes away, at any point, closes the stream behind it at once."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, frames: AsyncIterator[bytes]) -> None:
        self._stream, self._frames = stream, frames
        self.status_code, self.background = 200, None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send, scope.get("straight", send)))
        except ClientGoneError:
            pass
        finally:
            self._stream.close()

    async def _send(self, send: Send, straight: Send) -> None:
        """Sends the frames, all but the start ``straight``; an error in their midst is the last one."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for frames in self._frames:
                await straight({"type": "http.response.body", "body": frames, "more_body": True})
            end = DONE
        except Exception as error:
            shown = as_api_error(error)
            if shown is not error:
                logger.error("a stream broke off", exc_info=True)
            end = b"data: " + dumps(shown.body) + b"\n\n" + DONE
        await straight({"type": "http.response.body", "body": end, "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client closes the connection. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
