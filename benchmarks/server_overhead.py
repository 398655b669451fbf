"""What the server costs beside the offline API, at one client: the same answer, timed in turn.

    python benchmarks/server_overhead.py [MODEL] [--tokens 128] [--rounds 9]

The server runs in a process of its own and is idle while the offline API computes. Prints medians of whole answers,
whole and streamed, from the client's side; the target is less than 5%.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

from outrider import LLM, SamplingParams

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    llm = LLM(args.model)
    command = [sys.executable, "-m", "outrider", "serve", args.model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = next(line for line in server.stderr if " is served at " in line).split(" at ")[1].split("/v1")[0]
            with httpx.Client(base_url=url, timeout=600) as client:

                def whole() -> None:
                    client.post("/v1/completions", json=body).raise_for_status()

                def streamed() -> None:
                    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                        assert sum(1 for _ in reply.iter_lines()) > 1

                ways: dict[str, Callable[[], object]] = {
                    "offline": lambda: llm.generate(PROMPT, params),
                    "whole": whole,
                    "streamed": streamed,
                }
                seconds: dict[str, list[float]] = {name: [] for name in ways}
                for turn in range(args.rounds + 1):
                    for name, way in ways.items():
                        began = time.perf_counter()
                        way()
                        if turn:  # the first one warms up
                            seconds[name].append(time.perf_counter() - began)
        finally:
            server.terminate()
    plain = statistics.median(seconds["offline"])
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"{name:<9} {middle * 1e3:8.1f} ms  {args.tokens / middle:7.1f} tokens/s  {middle / plain - 1:+.1%}")


if __name__ == "__main__":
    main()
