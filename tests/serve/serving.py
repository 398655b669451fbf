"""A small engine behind the API, in this process or behind a real socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx

from outrider import LLM
from outrider.engine.engine import Engine
from outrider.serve.app import create_app
from outrider.serve.run import Server, bind, url_of
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds after which a test has hung."""


def make_llm(folder: str, **settings: Any) -> LLM:
    """fp64, so that batches of any size compute the same."""
    given = {"dtype": "float64", "kv_cache_mib": 16, "max_num_seqs": 8, "num_kv_blocks": 256, **settings}
    return LLM(folder, [{"method": name, "num_speculative_tokens": 4} for name in ("ngram", "prediction")], **given)


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncIterator[tuple[Any, Service]]:
    """A client of the application in this process, and the service behind it."""
    service = Service.of(engine, ServerSettings(**settings))
    app = create_app(service)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as client,
    ):
        yield client, service


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


async def until(holds: Callable[[], bool]) -> None:
    """Waits for something that must come true."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


@contextmanager
def real_server(engine: Engine, files: int | None = None, **settings: Any) -> Iterator[tuple[str, Server]]:
    """A server on a free port of the loopback, on a thread; its URL. Leaving ends it."""
    given = ServerSettings(**{"port": 0, "grace": 5, **settings})
    started = threading.Event()
    with bind(given) as bound:
        server = Server(Service.of(engine, given), started.set, files)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert started.wait(PATIENCE)
            yield url_of(bound), server
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()
