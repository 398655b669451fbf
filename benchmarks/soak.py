"""Mixed load on a server for some minutes: afterwards its blocks are free and its memory is as it was.

    python benchmarks/soak.py [MODEL] [--minutes 60] [--clients 12]

Clients send what comes to mind: streams and whole answers, several choices, grammars, long prompts, bad requests, and
some hang up somewhere in their answer. A greedy question is asked again and again: its answer must never change. The
server is a process of its own; its memory is read after a warm-up, and at the end. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from streaming import fetched, outrider, streamed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BAD: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": 0}',
    b'{"prompt": "x", "temperature": "hot"}',
)
QUESTION = {"prompt": "One two three one two three one", "temperature": 0, "max_tokens": 16}


def posted(port: int, path: str, data: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def resident(pid: int) -> float:
    """MiB; 0 where there is no /proc."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def metric(port: int, name: str) -> float:
    found = re.search(rf"^outrider:{name} (\S+)$", fetched(port, "/metrics"), re.MULTILINE)
    assert found, name
    return float(found[1])


class Soak:
    """The clients, and what they saw."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.answers: set[str] = set()

    async def load(self, clients: int, seconds: float) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(clients)))

    async def _client(self, end: float) -> None:
        while time.perf_counter() < end:
            kind = self.rng.choice(("question", "bad", "whole", "stream", "stream", "abort", "abort"))
            said = await getattr(self, f"_{kind}")()
            self.seen[f"{kind}: {said}"] += 1

    async def _question(self) -> str:
        status, text = await self._post(COMPLETIONS, json.dumps(QUESTION).encode())
        if status == 200:
            self.answers.add(json.loads(text)["choices"][0]["text"])
        return str(status)

    async def _bad(self) -> str:
        status, text = await self._post(COMPLETIONS, self.rng.choice(BAD))
        assert "error" in json.loads(text)
        return str(status)

    async def _whole(self) -> str:
        path, body = self._body()
        status, text = await self._post(path, json.dumps(body).encode())
        return str(status) if status == 200 else f"{status} {json.loads(text)['error'].get('code')}"

    async def _stream(self) -> str:
        path, body = self._body()
        answer = await streamed(self.port, path, body)
        return answer.error[:200] or "200"

    async def _abort(self) -> str:
        path, body = self._body()
        await streamed(self.port, path, body, time.perf_counter() + self.rng.random() ** 2)
        return "gone"

    async def _post(self, path: str, data: bytes) -> tuple[int, str]:
        return await asyncio.to_thread(posted, self.port, path, data)

    def _body(self) -> tuple[str, dict[str, Any]]:
        rng = self.rng
        words = " ".join(
            rng.choice(("the pass", "seven", "of", "boats", "x = 1;")) for _ in range(rng.choice((3, 20, 90)))
        )
        body: dict[str, Any] = {
            "temperature": rng.choice((0, 1)),
            "max_tokens": rng.randint(1, 48),
            "n": rng.choice((1, 1, 1, 3)),
            "speculative": {"enabled": rng.random() < 0.8},
        }
        if rng.random() < 0.2:
            body["guided_regex"] = rng.choice(("[a-z ]{1,20}", "(yes|no)", "[0-9]{3}-[0-9]{2}"))
        if rng.random() < 0.2:
            body["stop"] = ["e"]
        if rng.random() < 0.5:
            return COMPLETIONS, {**body, "prompt": words, "logprobs": rng.choice((None, 2))}
        return CHAT, {**body, "messages": [{"role": "user", "content": words}]}


async def idle(port: int) -> bool:
    """Whether everything has ended within some seconds."""
    for _ in range(200):
        if not metric(port, "num_requests_running") and not metric(port, "num_requests_waiting"):
            return True
        await asyncio.sleep(0.05)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve-flags", default="--kv-cache-mib 64", help="in one text; few blocks, so that they run out"
    )
    parser.add_argument("--growth", type=float, default=48, help="MiB that the server may grow by after the warm-up")
    args = parser.parse_args()
    seconds = 60 * args.minutes
    with outrider(args.model, args.serve_flags.split()) as (port, process):
        soak = Soak(port, args.seed)

        async def work() -> tuple[float, float, bool, float]:
            await soak.load(args.clients, seconds / 4)
            warm = resident(process.pid)
            for quarter in range(3):
                await soak.load(args.clients, seconds / 4)
                done, now = sum(soak.seen.values()), resident(process.pid)
                print(f"{(quarter + 2) / 4:4.0%}: {done} requests, {now:.0f} MiB", file=sys.stderr, flush=True)
            ended = await idle(port)
            return warm, resident(process.pid), ended, metric(port, "kv_cache_usage_perc")

        warm, after, ended, usage = asyncio.run(work())
        preempted = metric(port, "num_preemptions_total")
        health = posted(port, COMPLETIONS, json.dumps(QUESTION).encode())[0]
    for what, times in sorted(soak.seen.items()):
        print(f"{times:7}  {what}")
    print(f"resident {warm:.1f} MiB after the warm-up, {after:.1f} MiB at the end; KV blocks in use {usage:.0%}")
    print(f"{preempted:.0f} preemptions; the question had {len(soak.answers)} answer(s)")
    expected = re.compile(r"(question|whole|stream): 200|bad: 400|abort: gone|\w+: .*\b429\b.*")
    wrong = [what for what in soak.seen if not expected.fullmatch(what)]
    if not ended:
        wrong.append("requests that do not end")
    if usage:
        wrong.append("blocks that are not free")
    if after - warm > args.growth:
        wrong.append(f"memory grew by {after - warm:.0f} MiB")
    if len(soak.answers) > 1:
        wrong.append("a greedy answer changed")
    if health != 200:
        wrong.append("the server does not answer any more")
    print("wrong: " + "; ".join(wrong) if wrong else "all is well")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
