"""Who asks, and under which id: of interest to logs, traces and drafters that remember."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
TRACE_HEADERS = ("traceparent", "tracestate")
_GIVEN = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""What a client may call its request: nothing that could pass for another field of a log line."""


@dataclass(frozen=True)
class Caller:
    """``tenant`` keeps what drafters remember apart; ``trace`` are the headers that name the caller's own trace."""

    tenant: str = ""
    request_id: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(request: HTTPConnection) -> Caller:
        """Behind ``RequestIds`` and ``KeyGuard``."""
        trace = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        return Caller(request.scope["tenant"], request.scope["request_id"], trace)

    def id(self, prefix: str) -> str:
        """The response's id."""
        return f"{prefix}-{self.request_id}"


class RequestIds:
    """Gives every request an id, the client's own (``X-Request-Id``) or a new one, and every response the same.

    Outermost of all, it also notes the way straight to the client, for the pieces of a stream: what stands between has
    to do with the start of a response only.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["straight"] = send
        given = Headers(scope=scope).get(HEADER, "")
        request_id = scope["request_id"] = given if _GIVEN.fullmatch(given) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def tenant_of(key: str) -> str:
    """Keeps what drafters remember apart by API key, without keeping the key."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:16] if key else ""
