"""What the server's benchmarks share: a client that costs little, and server processes that end with the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 300


@dataclass
class Answer:
    """One streamed request, times in seconds; ``error`` is empty if it came to its end."""

    began: float
    first: float = 0.0  # the first piece of text
    last: float = 0.0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.began

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None if there is no second."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


async def streamed(port: int, path: str, body: Mapping[str, Any], until: float | None = None) -> Answer:
    """Sends a request to an OpenAI-compatible server on the loopback and reads its events; drops it at ``until``.

    A socket and a search for what matters in each line: the client shares its cores with the server.
    """
    answer = Answer(time.perf_counter())
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
        status = await reader.readline()
        if b" 200 " not in status:
            answer.error = status.decode(errors="replace").strip() or "no reply"
        previous = b""
        while not answer.error:
            line = await reader.readline()
            if not line:
                answer.error = "cut off"
            elif line.startswith(b"data: [DONE]"):
                break
            elif line.startswith(b"data: "):
                if b'"error"' in line[:20]:
                    answer.error = line.decode(errors="replace").strip()
                previous = line
                if b'"usage":{' not in line:
                    answer.last = time.perf_counter()
                    if not answer.first and _has_text(line):
                        answer.first = answer.last
            if until is not None and time.perf_counter() > until:
                break
        if not answer.error and until is None:
            answer.tokens = json.loads(previous[6:])["usage"]["completion_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return answer


def _has_text(line: bytes) -> bool:
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool(choices[0].get("text") or choices[0].get("delta", {}).get("content"))


def fetched(port: int, path: str) -> str:
    """A small document of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
        return str(reply.read().decode())


def _read_away(lines: Iterable[str]) -> None:
    with contextlib.suppress(ValueError):  # closed
        for _ in lines:
            pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def outrider(model: str, flags: Sequence[str] = ()) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """``outrider serve`` on a free port; the port and the process, which ends on leaving."""
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", "--no-log-requests", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if " is served at " in line:
                    break
            else:
                raise SystemExit("the server did not start:\n" + "".join(said[-20:]))
            # What else it says must be read, or it would wait for somebody to do so.
            threading.Thread(target=_read_away, args=(process.stderr,), daemon=True).start()
            yield int(said[-1].split(" is served at ")[1].split("/v1")[0].rsplit(":", 1)[1]), process
        finally:
            process.terminate()


@contextlib.contextmanager
def llamacpp(
    folder: Path, model: Path, clients: int, context: int, threads: int
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """llama.cpp's server with a slot of ``context`` tokens a client."""
    port = free_port()
    command = [str(folder / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-t", str(threads), "-tb", str(threads), "-np", str(clients), "-c", str(clients * context)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while True:
                with contextlib.suppress(OSError):
                    fetched(port, "/health")
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"llama-server did not start: {' '.join(command)}")
                time.sleep(0.2)
            yield port, process
        finally:
            process.terminate()
