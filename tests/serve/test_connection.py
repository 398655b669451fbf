"""Connections on which nothing moves, too many of them, and clients that are only slow."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from outrider import LLM
from outrider.serve import connection
from outrider.serve.connection import BACKLOG, FILES, HEAD, RESERVE, raised_file_limit, room
from outrider.serve.run import Server
from tests.serve.serving import PATIENCE, real_server
from tests.serve.sockets import (
    GET,
    LINES,
    SHORT,
    connect,
    read_answer,
    read_to_end,
    sent_until_cut_off,
    wait_for_idle,
)

LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0, "logprobs": 5}


@pytest.fixture
def slow_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Its long answers take many times a client's timeout."""
    step = llm.engine.step

    def slowed() -> Any:
        time.sleep(0.003)
        return step()

    monkeypatch.setattr(llm.engine, "step", slowed)
    return llm


@contextmanager
def small_pipe(server: Server, url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a connection that holds few bytes on their way."""
    for listening in server.servers[0].sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        yield client


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_is_gone_for_good_is_given_up(slow_engine: LLM, stream: bool) -> None:
    """In a stream long before the answer is there; a whole answer that nobody takes does not stay either."""
    aborted = slow_engine.engine.metrics.requests_aborted
    body = {**LONG, "stream": stream, "n": 1 if stream else 3, "max_tokens": 900 if stream else 100}
    with real_server(slow_engine.engine, client_timeout=SHORT) as (url, server), small_pipe(server, url, body):
        while not server.server_state.connections:
            time.sleep(0.001)
        wait_for_idle(slow_engine, server)
    assert slow_engine.engine.metrics.requests_aborted - aborted == stream


def test_a_slow_reader_gets_all_of_it(llm: LLM) -> None:
    body = {**LONG, "stream": True, "max_tokens": 200}
    got, slept = b"", 0.0
    settings = {"client_timeout": SHORT, "stream_interval": 0}  # many small pieces
    with real_server(llm.engine, **settings) as (url, server), small_pipe(server, url, body) as client:
        while not got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = client.recv(1024)
            assert piece, got[-200:]
            got += piece
            time.sleep(0.02)
            slept += 0.02
    assert slept > 4 * SHORT, "it was not slow: the test is too easy"
    assert got.count(b'"finish_reason":"length"') == 1


def test_an_answer_that_takes_long_is_waited_for(slow_engine: LLM) -> None:
    """The client has sent all of its request, and there is nothing to read yet."""
    with real_server(slow_engine.engine, client_timeout=SHORT) as (url, _):
        began = time.monotonic()
        reply = httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 250}, timeout=PATIENCE)
        assert time.monotonic() - began > 2 * SHORT, "it was quick: the test is too easy"
    assert reply.json()["usage"]["completion_tokens"] == 250


def test_who_says_nothing_or_half_a_request_is_given_up(llm: LLM) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with real_server(llm.engine, client_timeout=SHORT) as (url, server):
        for sent in (b"", b"POST /v1/comp", head, head + b'{"prompt":', whole, whole + b"GET /he"):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE) as client:
                client.sendall(sent)
                got = b""
                try:
                    while piece := client.recv(4096):
                        got += piece
                except ConnectionResetError:
                    pass
                assert got.startswith(b"HTTP/1.1 200") is sent.startswith(whole)
        wait_for_idle(llm, server)


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def wait_for_work(llm: LLM) -> None:
    deadline = time.monotonic() + PATIENCE
    while not llm.engine.has_work:
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.001)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "head",
    [
        GET + 4 * LINES,
        GET + 2 * LINES + b"\r\n",
        GET + b"X: " + b"x" * (2 * HEAD),
        b"GET /" + b"x" * (2 * HEAD) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["without end", "whole", "one", "path"],
)
def test_too_large_a_head_is_refused(llm: LLM, head: bytes, later: bool) -> None:
    """A large body may come at once with its head, a head of that size may not, of a later request neither."""
    pytest.importorskip("httptools", reason="h11 has a limit of its own, and answers 400")
    fine = post({"prompt": "x", "max_tokens": 1, "user": "x" * (2 * HEAD)})
    with real_server(llm.engine) as (url, server), connect(url) as client:
        if later:
            client.sendall(fine)
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(head)
        got = read_to_end(client)
        client.close()
        wait_for_idle(llm, server)
    assert got.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"\r\nConnection: close\r\n" in got
    error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "headers_too_large"
    assert str(HEAD) in error["message"]


def test_as_large_a_head_as_is_allowed(llm: LLM) -> None:
    with real_server(llm.engine) as (url, _), connect(url) as client:
        for _ in range(3):
            client.sendall(GET + LINES[: 60 * 1007] + b"\r\n\r\n")
            assert read_answer(client).startswith(b"HTTP/1.1 200")


def test_what_is_no_request_gets_the_usual_error(llm: LLM) -> None:
    with real_server(llm.engine) as (url, _), connect(url) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        got = read_to_end(client)
    assert got.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_who_never_stops_sending_is_cut_off(slow_engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a head; in what follows a body in chunks; in the head behind a request that runs; in a refused body."""
    monkeypatch.setattr(connection, "DRAIN", 1 << 20)
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    refused = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    with real_server(slow_engine.engine, max_body_mib=0.01) as (url, server):
        for first in (GET, chunked, post(LONG), refused):
            with connect(url) as client:
                client.sendall(first)
                if first == post(LONG):
                    wait_for_work(slow_engine)
                    client.sendall(GET)
                assert sent_until_cut_off(client, LINES) < 1 << 25
            wait_for_idle(slow_engine, server)


def test_a_body_in_small_pieces_is_no_head(llm: LLM) -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 1, "user": "x" * (HEAD // 2)}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in data)
    with real_server(llm.engine) as (url, _), connect(url) as client:
        client.sendall(head + pieces + b"0\r\nX-Check: 1\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200")


def test_a_reader_that_only_sends_is_given_up(slow_engine: LLM) -> None:
    body = {**LONG, "stream": True}
    aborted = slow_engine.engine.metrics.requests_aborted
    with (
        real_server(slow_engine.engine, client_timeout=SHORT) as (url, server),
        small_pipe(server, url, body) as client,
    ):
        wait_for_work(slow_engine)
        assert sent_until_cut_off(client, b"\r\n", SHORT / 4) < 500
        wait_for_idle(slow_engine, server)
    assert slow_engine.engine.metrics.requests_aborted == aborted + 1


def test_a_request_that_waits_behind_another_is_not_silent(slow_engine: LLM) -> None:
    """The server itself reads no more of it while it answers the first."""
    first, second = post({**LONG, "max_tokens": 250}), post({"prompt": "x", "max_tokens": 1})
    with real_server(slow_engine.engine, client_timeout=SHORT) as (url, _), connect(url) as client:
        client.sendall(first)
        wait_for_work(slow_engine)
        began = time.monotonic()
        head, end, rest = second.partition(b"\r\n\r\n")
        client.sendall(head + end)
        time.sleep(SHORT / 2)
        client.sendall(rest)
        got = b""
        while got.count(b'"usage"') < 2:
            piece = client.recv(1 << 16)
            assert piece, got[-200:]
            got += piece
        assert time.monotonic() - began > 3 * SHORT, "it was quick: the test is too easy"
    assert got.count(b"HTTP/1.1 200") == 2


def test_more_connections_than_there_are_files(llm: LLM) -> None:
    """The next one is told to come again; when another has ended there is room."""
    files = 4 * (RESERVE + 2) // 3
    most = room(files)[1]
    assert most is not None
    with real_server(llm.engine, files=files) as (url, server):
        port = int(url.rpartition(":")[2])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(most)]
        while len(server.server_state.connections) < most:
            time.sleep(0.001)
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
            got = b""
            while piece := client.recv(4096):
                got += piece
        assert got.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: " in got
        assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
        for each in held:
            each.close()
        while server.server_state.connections:
            time.sleep(0.001)
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(
    ("soft", "hard", "works", "asked", "have"),
    [
        (256, 4096, True, 4096, 4096),
        (256, resource.RLIM_INFINITY, True, FILES, FILES),
        (256, resource.RLIM_INFINITY, False, FILES, 256),
        (4096, 4096, True, None, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, None, None),
    ],
)
def test_as_many_files_as_the_system_lets_us(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, works: bool, asked: int | None, have: int | None
) -> None:
    seen: list[tuple[int, int]] = []

    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        seen.append(limits)
        if not works:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert raised_file_limit() == have
    assert seen == ([] if asked is None else [(asked, hard)])
    backlog, most = room(have)
    assert backlog <= BACKLOG
    assert (most is None) is (have is None)
    if have is not None and most is not None:
        assert most + backlog + RESERVE <= have
