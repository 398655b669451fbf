"""Answers that are out before the client has sent its request, and connections that end with them."""

from __future__ import annotations

import time

import pytest

from outrider import LLM
from outrider.serve import connection
from tests.serve.serving import PATIENCE, real_server
from tests.serve.sockets import (
    GET,
    LINES,
    SHORT,
    connect,
    length_in,
    read_answer,
    read_to_end,
    sent_until_cut_off,
    use_parser,
    wait_for_idle,
)


def large_request(path: str, key: str, chunked: bool, *more: str) -> tuple[bytes, bytes]:
    """Head and body of a request with 16 MiB, more than the servers here take."""
    size = 1 << 24
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    lines = (f"POST /v1/{path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}", *more, length)
    body = b"x" * size
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode(), b"%x\r\n%b\r\n0\r\n\r\n" % (
        size,
        body,
    ) if chunked else body


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "key", "status"), [("completions", "k", 413), ("completions", "", 401), ("x", "k", 404)]
)
def test_an_answer_before_the_end_of_the_body_is_seen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, key: str, status: int, chunked: bool, parser: str
) -> None:
    """By a client that reads when all is sent, and whose connection serves it further."""
    use_parser(monkeypatch, parser)
    head, body = large_request(path, key, chunked)
    with real_server(llm.engine, api_key=("k",), max_body_mib=1) as (url, server), connect(url) as client:
        client.sendall(head + body)
        assert read_answer(client).startswith(b"HTTP/1.1 %d " % status)
        client.sendall(GET + b"\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        client.close()
        wait_for_idle(llm, server)


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("key", "status"), [("k", 413), ("", 401)])
def test_an_early_answer_is_seen_though_the_connection_is_to_end(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, parser: str, chunked: bool, key: str, status: int
) -> None:
    """The client sends all of it before it reads, and has had its answer by when the connection is closed."""
    use_parser(monkeypatch, parser)
    head, body = large_request("completions", key, chunked, "Connection: close")
    with real_server(llm.engine, api_key=("k",), max_body_mib=1) as (url, server), connect(url) as client:
        client.sendall(head)
        time.sleep(0.05)  # the answer is out: whatever comes now finds the connection hung up
        client.sendall(body)
        got = read_to_end(client)
        client.close()
        wait_for_idle(llm, server)
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in got.lower()
    assert len(got.partition(b"\r\n\r\n")[2]) == length_in(got)


@pytest.mark.parametrize("parser", ["httptools", "h11"])
@pytest.mark.parametrize(("much", "finished"), [(False, True), (True, True), (True, False)])
def test_a_hung_up_client_that_goes_on_is_cut_off(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, parser: str, much: bool, finished: bool
) -> None:
    """After so many bytes, or so long a time, though a little always comes; also if its answer was never finished."""
    use_parser(monkeypatch, parser)
    if not finished:
        monkeypatch.setattr(connection.Connection, "_awaits_head", lambda self: False)
    if much:
        monkeypatch.setattr(connection, "DRAIN", 1 << 20)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000000000\r\n\r\n"
    )
    with (
        real_server(llm.engine, max_body_mib=0.01, client_timeout=PATIENCE if much else SHORT) as (url, server),
        connect(url) as client,
    ):
        client.sendall(head)
        assert read_to_end(client).startswith(b"HTTP/1.1 413 "), "the end is to be seen while the client still sends"
        assert sent_until_cut_off(client, LINES if much else b"x", 0.0 if much else SHORT / 10) < 1 << 25
        wait_for_idle(llm, server)


def test_a_hung_up_client_does_not_hold_up_the_end_of_the_server(llm: LLM) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000000000\r\n\r\n"
    )
    with real_server(llm.engine, max_body_mib=0.01) as (url, server), connect(url) as client:
        client.sendall(head)
        assert read_to_end(client).startswith(b"HTTP/1.1 413 ")
        assert server.server_state.connections
        server.should_exit = True
        began = time.monotonic()
        sent_until_cut_off(client, b"x", 0.02)
        assert time.monotonic() - began < PATIENCE / 2
