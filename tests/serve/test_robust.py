"""A server that is treated badly: nothing hangs, nothing leaks, and nobody gets another's tokens."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams, SpecParams
from outrider.core.draft import Draft
from outrider.core.types import Span
from outrider.serve.connection import raised_file_limit
from outrider.serve.service import Service
from tests.serve.serving import make_llm, real_server, run, serving, until
from tests.serve.test_completions import frames

PATH = "/v1/completions"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def body_of(i: int) -> dict[str, Any]:
    """The i-th request, unlike any other; its seed makes it repeatable, whatever drafts are cut for want of blocks."""
    body = {"prompt": f"{i} {'the pass ' * (i % 7)}{i * 7}", "temperature": i % 2, "seed": i, "ignore_eos": True}
    return body | {"max_tokens": 6 + i % 9, "n": 1 + (i % 5 == 0), "speculative": {"enabled": i % 4 < 2}}


def wanted(llm: LLM, body: dict[str, Any]) -> list[str]:
    fields = {name: body[name] for name in ("temperature", "seed", "ignore_eos", "max_tokens", "n")}
    spec = SpecParams(enabled=False, repeatable=True)
    return [c.text for c in llm.generate(body["prompt"], SamplingParams(**fields), spec)[0].completions]


def texts(reply: Any, body: dict[str, Any]) -> list[str]:
    """What each choice said, streamed or whole."""
    if not body.get("stream"):
        return [choice["text"] for choice in reply.json()["choices"]]
    said = [""] * body["n"]
    for chunk in frames(reply.text):
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["text"]
    return said


async def nothing_left(service: Service) -> None:
    """All has ended, on the event loop's side and on the engine's."""
    loop = service.loop
    await until(lambda: not loop.answers)
    engine = service.engine
    assert await loop.call(lambda e: (e.has_work, e.blocks.n_free)) == (False, engine.blocks.n_blocks)
    assert not [*loop._streams, *loop._watched]
    await until(lambda: not loop._calls)
    await until(lambda: len(asyncio.all_tasks()) <= 2)  # this one, and that of the test's time limit


def test_what_is_dropped_anywhere_hurts_nobody_else(folder: str) -> None:
    """Every third is dropped at a random point; blocks run out, so that others are pre-empted."""
    llm = make_llm(folder, num_kv_blocks=24, block_size=4, max_model_len=80)
    bodies = [body_of(i) | {"stream": i % 2 == 0} for i in range(90)]
    wants = [wanted(llm, body) for body in bodies]
    rng = random.Random(3)

    async def work() -> int:
        async with serving(llm.engine) as (client, service):
            dropped = 0

            async def one(i: int) -> None:
                nonlocal dropped
                asked = asyncio.ensure_future(client.post(PATH, json=bodies[i]))
                if i % 3 == 0:
                    await asyncio.sleep(rng.random() ** 2)
                    if asked.cancel():
                        dropped += 1
                        return
                reply = await asked
                assert reply.status_code == 200, reply.text
                assert texts(reply, bodies[i]) == wants[i]

            await asyncio.gather(*map(one, range(90)))
            await nothing_left(service)
            return dropped

    assert run(work()) > 5
    assert llm.engine.metrics.preemptions > 0, "the pool was never short: the test is too easy"
    llm.engine.check_integrity()


def test_five_hundred_connections_at_once(llm: LLM) -> None:
    """More than there is room for, every other one a stream: each gets its own answer or is told to come again."""
    files = raised_file_limit()
    if files is not None and files < 1100:
        pytest.skip(f"this process may open {files} files only; both ends of 500 connections need more")
    wants = {i: wanted(llm, body_of(i)) for i in range(40)}
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    async def one(port: int, i: int) -> tuple[int, str]:
        body = body_of(i % 40) | {"stream": i % 2 == 1}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        reply = await reader.read()
        writer.close()
        top, _, content = reply.partition(b"\r\n\r\n")
        head_text = top.decode()
        status = int(head_text.split()[1])
        if status == 429:
            assert "retry-after: " in head_text.lower()
            return status, ""
        if "transfer-encoding: chunked" in head_text.lower():
            content = unchunked(content)
        assert texts(httpx.Response(status, content=content), body) == wants[i % 40]
        return status, ""

    async def work(port: int) -> Counter[int]:
        return Counter(status for status, _ in await asyncio.gather(*(one(port, i) for i in range(500))))

    with real_server(llm.engine, max_queue=60) as (url, server):
        seen = run(work(int(url.rsplit(":", 1)[1])))
        assert not server._service.loop.answers
        assert not server._service.loop._streams
    assert set(seen) == {200, 429}
    assert seen.total() == 500
    assert seen[200] >= 30
    if opened:
        # What the process opens once for all may be among them, such as the ends of a pipe; not one a connection.
        assert len(os.listdir("/proc/self/fd")) <= opened + 20


def unchunked(content: bytes) -> bytes:
    """What chunks of HTTP hold."""
    whole = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        whole, content = whole + content[: int(size, 16)], content[int(size, 16) + 2 :]
    return whole


def test_clients_that_read_nothing_hold_nobody_up(llm: LLM) -> None:
    """Others are served meanwhile, and when it goes all of it is freed."""

    async def work(port: int, service: Service) -> None:
        data = json.dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True, "n": 4}).encode()
        stuck = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            stuck.append(writer)
        await until(lambda: service.loop.answers == 8)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps({"prompt": "y", "max_tokens": 5}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        assert b" 200 " in (await reader.read()).splitlines()[0]
        writer.close()
        for writer in stuck:
            writer.transport.abort()
        await until(lambda: not service.loop.answers)

    with real_server(llm.engine) as (url, server):
        run(work(int(url.rsplit(":", 1)[1]), server._service))
        assert not server._service.loop._watched


@contextmanager
def broken(llm: LLM, name: str, times: int) -> Iterator[list[int]]:
    """The drafter's first calls fail; how many sequences each call had."""
    proposer, asked = llm.engine.proposers[name], []
    propose = proposer.propose

    def faulty(spans: Sequence[Span]) -> list[Draft]:
        asked.append(len(spans))
        if len(asked) <= times:
            raise RuntimeError("a secret")
        return propose(spans)

    proposer.propose = faulty  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        proposer.propose = propose  # type: ignore[method-assign]


def test_a_drafter_that_fails_is_off_for_its_request(llm: LLM) -> None:
    body = {**body_of(0), "prompt": "the pass the pass the pass the", "max_tokens": 24, "n": 1}
    body["speculative"] = {"method": "ngram", "metrics": True}
    want = wanted(llm, body)
    failures = llm.engine.metrics.drafter_failures["ngram"]

    async def work() -> tuple[Any, Any, str]:
        async with serving(llm.engine) as (client, service):
            with broken(llm, "ngram", 1) as asked:
                first = await client.post(PATH, json=body)
                assert asked == [1], "it was asked again"
                second = await client.post(PATH, json=body)
                assert len(asked) > 1
            await nothing_left(service)
            return first, second, (await client.get("/metrics")).text

    first, second, metrics = run(work())
    for reply in (first, second):
        assert reply.status_code == 200
        assert texts(reply, body) == want
        assert "secret" not in reply.text
    assert f'outrider:drafter_failures_total{{drafter="ngram"}} {failures + 1:.1f}' in metrics


def test_a_prompt_without_end_is_refused(llm: LLM) -> None:
    async def work() -> list[int]:
        async with serving(llm.engine, max_body_mib=0.5) as (client, service):
            bodies = [b'{"prompt": "' + b"x " * size + b'"}' for size in (3000, 200_000, 400_000)]
            bodies += [b'{"prompt": [' + b"1," * 5000 + b"1]}", b'{"prompt": "x"', b"\xff\xfe", b"[" * 100_000]
            replies = [await client.post(PATH, content=body) for body in bodies]
            await nothing_left(service)
            assert all("message" in reply.json()["error"] for reply in replies)
            return [reply.status_code for reply in replies]

    assert run(work()) == [400, 400, 413, 400, 400, 400, 400]


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="an installed package has no benchmarks")
def test_ten_seconds_of_everything(folder: str) -> None:
    command = [sys.executable, str(BENCHMARKS / "soak.py"), folder, "--minutes", "0.15", "--clients", "6"]
    flags = "--num-kv-blocks 80 --threads 1"
    done = subprocess.run([*command, "--serve-flags", flags], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
