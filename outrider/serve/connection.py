"""A client's connection: how many there may be, and the end of one on which nothing moves any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from outrider.serve.errors import ApiError, unavailable

RESERVE = 64
"""Files that the server has open beside its clients' connections."""
BACKLOG = 2048
"""Clients that wait to be let in at most; as many may come in at once."""
HEAD = 1 << 16
"""Bytes of a request before its body at most, and after it."""
DRAIN = 1 << 26
"""Bytes that are taken, and thrown away, of a request that has its answer, so that its client comes to read that."""
FILES = 1 << 16
"""Open files to ask the system for where it sets no limit of its own."""

if TYPE_CHECKING:

    class _Base(asyncio.Protocol):
        url: bytes
        headers: list[tuple[bytes, bytes]]

        def on_headers_complete(self) -> None: ...
        def on_response_complete(self) -> None: ...
        def on_body(self, body: bytes) -> None: ...
else:
    _Base = object


def raised_file_limit() -> int | None:
    """How many files this process may open, once as many are allowed as the system lets it; None where that is unknown.

    Each connection is one, and the usual limit of some systems is 256.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError):  # the system has a lower limit than it says
            pass
    return None if soft == resource.RLIM_INFINITY else soft


def room(files: int | None) -> tuple[int, int | None]:
    """The backlog, and how many connections there may be, for a process that may open so many files.

    A whole backlog can come in before the first of its connections is looked at.
    """
    if files is None:
        return BACKLOG, None
    backlog = max(1, min(BACKLOG, files // 4))
    return backlog, max(1, files - backlog - RESERVE)


class _Line:
    """A transport that asks before it is closed: ``hangs_up`` says whether that is seen to."""

    def __init__(self, transport: asyncio.Transport, hangs_up: Callable[[], bool]) -> None:
        self._transport, self._hangs_up, self._closing = transport, hangs_up, False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        if self._hangs_up():
            self._closing = True
        else:
            self._transport.close()


class Connection(_Base):
    """Goes before one of uvicorn's protocols (see ``watched``).

    A slow client is waited for, and so is one whose answer is being made. One that for ``patience`` seconds takes
    nothing of what is ready for it, or sends nothing more of its request, is gone for good: its connection is ended,
    and with that the request and its KV blocks.
    """

    patience: float
    most: int | None
    connections: set[Any]  # uvicorn's, all that are open
    cycle: Any  # uvicorn's, the latest request
    flow: Any  # uvicorn's
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent = self._took = self._hung_up = False
        self._left = self._wasted = 0
        self._answered: Any = None  # the latest request whose answer is out, as uvicorn knows it
        super().connection_made(cast(asyncio.Transport, _Line(cast(asyncio.Transport, transport), self._close)))
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)
        self.transport.set_write_buffer_limits(high=0)  # whatever the system does not take stops the answer
        if self.most is not None and len(self.connections) > self.most:
            self.transport.write(_response(unavailable("the server has as many connections as it can hold; try again")))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._sent = True
        if not self._hung_up:
            super().data_received(data)
        self._wasted = self._wasted + len(data) if self._hung_up or self._awaits_head() else 0
        if self._wasted > DRAIN:
            self.transport.abort()

    def resume_writing(self) -> None:
        self._took = True
        super().resume_writing()

    def refuse(self, error: ApiError) -> None:
        """Answers what is no request, and ends the connection once the client has seen that or had time to."""
        if self._hung_up:
            return
        if not self._awaits_head():  # it would be taken for the answer that is still to come
            self.transport.abort()
            return
        self.transport.write(_response(error))
        self._hang_up()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in the shape of the others."""
        self.refuse(ApiError(400, msg))

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:  # else it is the next one already, which waits
            self._answered = self.cycle
        super().on_response_complete()

    def _close(self) -> bool:
        """Before uvicorn closes the connection: whether it is hung up instead, as the client is not done sending.

        Where a connection is closed with bytes that nobody took, the system takes back an answer that was not read yet.
        """
        if self._hung_up or self.transport.is_closing() or self.cycle is None or self.cycle is self._answered:
            return False
        early = bool(self.cycle.more_body)
        if early:
            self._hang_up()
        return early

    def _hang_up(self) -> None:
        """Says no more, and takes what comes, for so long and so much as is allowed, until the client hangs up too."""
        self._hung_up = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self.patience, self.transport.abort)

    def _look(self) -> None:
        """Ends the connection if nothing has moved since the last look although it is the client's turn."""
        left, before = self.transport.get_write_buffer_size(), self._left
        takes_nothing = not self._took and 0 < before <= left
        says_nothing = not self._sent and not left and self._awaits_request()
        if takes_nothing or says_nothing:
            self.transport.abort()
            return
        self._sent, self._took, self._left = False, False, left
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)

    def _awaits_request(self) -> bool:
        return not self.flow.read_paused and (self._awaits_head() or bool(self.cycle.more_body))

    def _awaits_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)


class HeadLimit(Connection):
    """For a protocol whose parser (httptools) takes a head of any size."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head, self._too_large, self._ended = 0, False, False
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Counts what is neither body nor a head that has ended: a head, or what follows a body in chunks."""
        self._ended = False
        super().data_received(data)
        self._head = 0 if self._ended else self._head + len(data)
        if self._head > HEAD:
            self._too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            self._too_large = True
            raise ValueError("the parser gives up, and uvicorn calls send_400_response")
        self._ended = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._ended = True
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            allowed = f"the request's line and headers have more than {HEAD} bytes, which is what is allowed"
            self.refuse(ApiError(431, allowed, code="headers_too_large"))
        else:
            super().send_400_response(msg)


def watched(kind: type[asyncio.Protocol], patience: float, most: int | None) -> type[asyncio.Protocol]:
    """uvicorn's protocol ``kind`` with such a watch; at most ``most`` connections, more are told to come again."""
    watch = HeadLimit if hasattr(kind, "on_headers_complete") else Connection  # h11 has a limit of its own
    return type("Connection", (watch, kind), {"patience": patience, "most": most})


def _response(error: ApiError) -> bytes:
    body = json.dumps(error.body).encode()
    head = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **error.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n".encode() + body
