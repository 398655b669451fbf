"""What answers cost by thread, offline and through the server: processor time and context switches, not seconds.

    python benchmarks/serving_cost.py [MODEL] [--clients 1] [--tokens 64] [--drafter '{"method": "ngram"}']

The same answers of one engine in turn from the offline API, from the server whole, and from it streamed. Processor time
hardly depends on who else uses the machine, so that the figures of a noisy one can be compared: microseconds a token of
the event loop's thread and of the client, which share the cores with the passes, and the engine thread's without its
passes. ``switches`` a token are those of the engine's thread: how often it slept, which it also does for the
interpreter's lock or for a helper that lost its core, and how often it was put off its core. ``pieces`` is how many
tokens go together in a piece of a stream. Linux only. The pool's helpers spin and are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


def client(port: int) -> None:
    """Sends what it reads, a list of bodies a line, at once; says its own processor time and the pieces it got."""
    for line in sys.stdin:
        began, pieces = time.process_time(), 0
        with selectors.DefaultSelector() as waiting:
            for body in json.loads(line):
                data = json.dumps(body).encode()
                head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(head.encode() + f"{len(data)}\r\n\r\n".encode() + data)
                waiting.register(connection, selectors.EVENT_READ)
            while waiting.get_map():
                for key, _ in waiting.select():
                    assert isinstance(key.fileobj, socket.socket)
                    part = key.fileobj.recv(1 << 16)
                    pieces += part.count(b"data: {")
                    if not part:
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()
        print(json.dumps([time.process_time() - began, pieces]), flush=True)


class Reading(NamedTuple):
    """Totals so far: microseconds, and context switches of the engine's thread."""

    engine: float
    events: float
    passes: float
    slept: int
    displaced: int


class Row(NamedTuple):
    """Of one way, a token: microseconds and counts."""

    engine: float
    events: float
    client: float
    slept: float
    displaced: float
    piece: float
    seconds: float


class Threads:
    """Reads what the two threads of a server have used."""

    def __init__(self, engine: threading.Thread, events: threading.Thread) -> None:
        self._clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in (engine, events)]
        self._status = Path(f"/proc/self/task/{engine.native_id}/status")
        self._passes = 0.0

    def count(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` with the engine thread's processor time in it taken down."""

        def counted(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return forward(*args)
            finally:
                self._passes += time.thread_time() - began

        return counted

    def read(self) -> Reading:
        engine, events = (1e6 * time.clock_gettime(clock) for clock in self._clocks)
        told = dict(line.split(":\t", 1) for line in self._status.read_text().splitlines())
        slept, displaced = int(told["voluntary_ctxt_switches"]), int(told["nonvoluntary_ctxt_switches"])
        return Reading(engine, events, 1e6 * self._passes, slept, displaced)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interval", type=float, help="the server's stream_interval; default: its own")
    parser.add_argument("--drafter", default='{"method": "none"}', help="as --speculative-config has it")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(args.client)
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    from beside import PROMPT, served

    from outrider import LLM, SamplingParams
    from outrider.serve.settings import ServerSettings

    llm = LLM(args.model, json.loads(args.drafter))
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    settings = ServerSettings(port=0, **({} if args.interval is None else {"stream_interval": args.interval}))
    tokens = args.clients * args.tokens
    with served(llm, settings, __file__) as beside:
        engine = beside.service.loop._thread
        assert engine is not None
        threads = Threads(engine, beside.thread)
        llm.engine.runner.forward = threads.count(llm.engine.runner.forward)  # type: ignore[method-assign]

        def offline() -> tuple[float, int]:
            beside.on_engine(lambda: llm.generate([PROMPT] * args.clients, params))
            return 0.0, 0

        def asked(**fields: Any) -> tuple[float, int]:
            used, pieces = json.loads(beside.ask(json.dumps([{**body, **fields}] * args.clients)))
            return used, pieces

        ways: dict[str, Callable[[], tuple[float, int]]] = {
            "offline": offline,
            "whole": asked,
            "streamed": lambda: asked(stream=True),
        }
        rows: dict[str, list[Row]] = {name: [] for name in ways}
        for turn in range(args.rounds + 1):
            for name in random.sample(list(ways), len(ways)):
                before, began = threads.read(), time.perf_counter()
                used, pieces = ways[name]()
                seconds = time.perf_counter() - began
                gone = Reading(*(b - a for a, b in zip(before, threads.read(), strict=True)))
                each = gone.engine - gone.passes, gone.events, 1e6 * used, gone.slept, gone.displaced
                if turn:  # the first one warms up
                    rows[name].append(Row(*(x / tokens for x in each), tokens / (pieces or tokens), seconds))
    print(f"{args.clients} clients, {args.tokens} tokens; medians, microseconds a token or as named")
    print("           engine  event loop    client   slept   displaced   tokens a piece   seconds")
    for name, taken in rows.items():
        mid = Row(*(median(column) for column in zip(*taken, strict=True)))
        print(
            f"{name:<9} {mid.engine:7.1f} {mid.events:11.1f} {mid.client:9.1f} {mid.slept:7.3f} {mid.displaced:11.3f}"
            f" {mid.piece:16.1f} {mid.seconds:9.3f}"
        )


if __name__ == "__main__":
    main()
