"""What the server costs beside the offline API, at one client: the same answer of the same engine, timed in turn.

    python benchmarks/server_overhead.py [MODEL] [--tokens 64] [--rounds 40] [--drafter '{"method": "ngram"}']

Offline API and server share one loaded model, as the same weights elsewhere in memory may be some percent faster or
slower; the client is a process of its own, which does little more than read. Prints medians of whole answers, whole and
streamed, and the median over the rounds of what they take longer; the target is less than 5%. Without ``--drafter``
every token is a step and, in a stream, an event: that is where a server costs most.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def client(port: int) -> None:
    """Sends the bodies that it reads, one a line, and says how long each answer took."""
    for line in sys.stdin:
        began = time.perf_counter()
        data = line.strip().encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + data)
            reply = first = connection.recv(1 << 16)
            while part := connection.recv(1 << 16):
                reply += part
        seconds = time.perf_counter() - began
        assert first.startswith(b"HTTP/1.1 200"), reply[:500]
        print(seconds, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
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
    with served(llm, ServerSettings(port=0), __file__) as beside:

        def generated() -> float:
            began = time.perf_counter()
            llm.generate(PROMPT, params)
            return time.perf_counter() - began

        def asked(**fields: Any) -> float:
            return float(beside.ask(json.dumps({**body, **fields})))

        ways: dict[str, Callable[[], float]] = {
            "offline": lambda: beside.on_engine(generated),
            "whole": asked,
            "streamed": lambda: asked(stream=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.rounds + 1):
            for name in random.sample(list(ways), len(ways)):
                taken = ways[name]()
                if turn:  # the first one warms up
                    seconds[name].append(taken)
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        more = [own / base - 1 for own, base in zip(taken, seconds["offline"], strict=True)]
        low, half, high = statistics.quantiles(more, n=4)
        shown = f"{half:+.1%} (quartiles {low:+.1%} to {high:+.1%})"
        print(f"{name:<9} {middle * 1e3:8.1f} ms  {args.tokens / middle:7.1f} tokens/s  {shown}")


if __name__ == "__main__":
    main()
