"""Clients of a real server that speak HTTP by hand."""

from __future__ import annotations

import functools
import socket
import time

import pytest
import uvicorn

from outrider import LLM
from outrider.serve.run import Server
from tests.serve.serving import PATIENCE

LINES = b"".join(b"X-%d: " % i + b"x" * 1000 + b"\r\n" for i in range(64))
"""Headers, nearly as many as are allowed."""
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SHORT = 0.2
"""A client's timeout, so that the tests end."""


def wait_for_idle(llm: LLM, server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while llm.engine.has_work or server._service.loop.answers or server.server_state.connections:
        assert time.monotonic() < deadline, "it never ended"
        time.sleep(0.005)


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE)


def read_to_end(client: socket.socket) -> bytes:
    got = b""
    while piece := client.recv(1 << 16):
        got += piece
    return got


def read_answer(client: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got or len(got.partition(b"\r\n\r\n")[2]) < length_in(got):
        piece = client.recv(1 << 16)
        assert piece, got
        got += piece
    return got


def length_in(answer: bytes) -> int:
    return int(answer.lower().partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])


def use_parser(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The server's next start is with this one of uvicorn's parsers of HTTP."""
    pytest.importorskip(name)
    config = functools.partial(uvicorn.Config, http=name)
    monkeypatch.setattr(uvicorn, "Config", config)


def sent_until_cut_off(client: socket.socket, piece: bytes, pause: float = 0.0) -> int:
    """How many bytes went off, what the system holds among them, before the server would not have more."""
    sent, most, deadline = 0, 1 << 26, time.monotonic() + PATIENCE
    try:
        while sent < most and time.monotonic() < deadline:
            client.sendall(piece)
            sent += len(piece)
            time.sleep(pause)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent
