"""A server beside the offline API, on one engine in one process, and a client in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from outrider import LLM
from outrider.serve.run import Server, bind
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings

T = TypeVar("T")

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


@dataclass(frozen=True)
class Beside:
    service: Service
    thread: threading.Thread  # of the event loop
    _to_client: IO[str]
    _from_client: IO[str]

    def on_engine(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on the engine's thread: nobody else may touch the engine."""
        events = self.service.loop._loop
        assert events is not None
        return asyncio.run_coroutine_threadsafe(self.service.loop.call(lambda _: work()), events).result()

    def ask(self, line: str) -> str:
        """What the client has to say of ``line``."""
        print(line, file=self._to_client, flush=True)
        return self._from_client.readline()


@contextmanager
def served(llm: LLM, settings: ServerSettings, script: str) -> Iterator[Beside]:
    """The server, until the block ends; ``script --client PORT`` is the client, which answers each line with one."""
    started = threading.Event()
    with bind(settings) as bound:
        service = Service.of(llm.engine, settings)
        server = Server(service, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        started.wait()
        command = [sys.executable, script, "--client", str(bound.getsockname()[1])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            yield Beside(service, thread, client.stdin, client.stdout)
            client.stdin.close()
        server.should_exit = True
        thread.join()
