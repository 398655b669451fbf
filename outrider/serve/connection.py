"""A client's connection: how many there may be, and the end of one on which nothing moves any more."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from outrider.serve.errors import unavailable

RESERVE = 64
"""Files that the server has open beside its clients' connections."""
BACKLOG = 2048
"""Clients that wait to be let in at most; as many may come in at once."""
HEAD = 1 << 16
"""Bytes of a request before its body at most; not every protocol has a limit of its own."""
FILES = 1 << 16
"""Open files to ask the system for where it sets no limit of its own."""

if TYPE_CHECKING:
    _Base = asyncio.Protocol
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


class Connection(_Base):
    """Goes before one of uvicorn's protocols (see ``watched``).

    A slow client is waited for, and so is one whose answer is being made. One that for ``patience`` seconds takes
    nothing of what is ready for it, or sends nothing more of its request, is gone for good: its connection is ended,
    and with that the request and its KV blocks.
    """

    patience: float
    most: int | None
    connections: set[Any]  # uvicorn's, all that are open
    cycle: Any  # uvicorn's, the request at hand
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._moved, self._left, self._head = False, 0, 0
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)
        self.transport.set_write_buffer_limits(high=0)  # whatever the system does not take stops the answer
        if self.most is not None and len(self.connections) > self.most:
            self.transport.write(_refusal())
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = True
        super().data_received(data)
        self._head = self._head + len(data) if self._awaits_head() else 0
        if self._head > HEAD:
            self.transport.abort()

    def resume_writing(self) -> None:
        self._moved = True
        super().resume_writing()

    def _look(self) -> None:
        """Ends the connection if nothing has moved since the last look although it is the client's turn."""
        left, before = self.transport.get_write_buffer_size(), self._left
        takes_nothing = 0 < before <= left
        if not self._moved and (takes_nothing or (not left and self._awaits_request())):
            self.transport.abort()
            return
        self._moved, self._left = False, left
        self._timer = asyncio.get_running_loop().call_later(self.patience, self._look)

    def _awaits_request(self) -> bool:
        return self._awaits_head() or bool(self.cycle.more_body)

    def _awaits_head(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)


def watched(kind: type[asyncio.Protocol], patience: float, most: int | None) -> type[asyncio.Protocol]:
    """uvicorn's protocol ``kind`` with such a watch; at most ``most`` connections, more are told to come again."""
    return type("Connection", (Connection, kind), {"patience": patience, "most": most})


def _refusal() -> bytes:
    error = unavailable("the server has as many connections as it can hold; try again")
    body = json.dumps(error.body).encode()
    head = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **error.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{lines}\r\n".encode() + body
