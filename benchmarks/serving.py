"""Closed-loop load on an OpenAI-compatible server: tokens a second, time to first token, time per output token.

    python benchmarks/serving.py --outrider smollm2 --prompts spec_bench.jsonl --clients 1,2,4,8,16,32 [--rounds 3]
    python benchmarks/serving.py --outrider smollm2 --llamacpp BUILD/bin --llamacpp-model smollm2.gguf
    python benchmarks/serving.py --url http://127.0.0.1:8000 --model NAME
    python benchmarks/serving.py --outrider smollm2 --shift

Every client sends a request, reads its stream to the end and sends the next. At each load the arms take turns, in
another order each round: ``auto`` and ``plain`` are one Outrider server, the latter with ``speculative.enabled``
false in the request; ``llama.cpp`` is its server, with a slot a client. The first arm of a round runs for
``--seconds``; the others then get just as many of the same prompts, so that all do the same work. Prompts are mixed
(one of each kind in turn), answers greedy and ``--max-tokens`` long at most; neither server may reuse the KV of an
earlier prompt.

``--shift`` is one client whose text goes from copies of a paragraph to noise and back: when the controller switches
speculation off and on, as ``/v1/speculation`` tells it ten times a second. Then what that costs on noise: the same
requests with and without speculation, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from streaming import Answer, fetched, llamacpp, outrider, streamed

from outrider.bench.prompts import QUICK, BenchPrompt, read_prompts

CHAT = "/v1/chat/completions"
PARAGRAPH = (
    "The harbour opens at six. Boats that carry fish go to the north quay, boats that carry timber to the south quay, "
    "and every skipper signs the book in the small office by the crane before anything is unloaded.\n"
)


@dataclass(frozen=True)
class Arm:
    """Where requests go, with what is theirs alone."""

    name: str
    port: int
    extra: Mapping[str, Any]


@dataclass
class Load:
    """What one arm did at one number of clients, over all rounds."""

    answers: list[Answer] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens a second, by round

    def row(self) -> dict[str, Any]:
        good = [answer for answer in self.answers if not answer.error]
        return {
            "requests": len(self.answers),
            "errors": len(self.answers) - len(good),
            "tokens": sum(answer.tokens for answer in good),
            "tokens_per_s": median(self.speeds),
            "rounds": self.speeds,
            "ttft_ms": percentiles([1e3 * answer.ttft for answer in good]),
            "tpot_ms": percentiles([1e3 * answer.tpot for answer in good if answer.tpot is not None]),
        }


def percentiles(values: Sequence[float]) -> list[float]:
    """The 50th, 95th and 99th, by nearest rank."""
    ordered = sorted(values)
    return [ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in (50, 95, 99)] if ordered else []


def mixed(prompts: Sequence[BenchPrompt]) -> list[str]:
    """One of each kind in turn."""
    by_kind: dict[str, list[str]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt.text)
    turns = itertools.zip_longest(*by_kind.values())
    return [text for turn in turns for text in turn if text is not None]


async def closed_loop(
    arm: Arm, prompts: Sequence[str], start: int, clients: int, max_tokens: int, seconds: float, requests: int | None
) -> tuple[list[Answer], float]:
    """``requests`` of them, or as many as ``seconds`` allow; the answers, and the seconds until the last one's end."""
    began, answers, numbers = time.perf_counter(), [], itertools.count()

    async def client() -> None:
        while True:
            number = next(numbers)
            over = time.perf_counter() - began >= seconds if requests is None else number >= requests
            if over:
                return
            text = prompts[(start + number) % len(prompts)]
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
            answers.append(await streamed(arm.port, CHAT, {**body, **arm.extra}))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - began


def measure(arms: Sequence[Arm], prompts: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By load and arm."""
    for arm in arms:  # what is done once: page faults, compiled templates, the first estimates
        asyncio.run(closed_loop(arm, prompts, 0, max(args.clients), args.max_tokens, 0, max(args.clients)))
    results: dict[str, dict[str, Any]] = {}
    start = 0
    for clients in args.clients:
        loads = {arm.name: Load() for arm in arms}
        for turn in range(args.rounds):
            requests = None
            for arm in (*arms[turn % len(arms) :], *arms[: turn % len(arms)]):
                answers, seconds = asyncio.run(
                    closed_loop(arm, prompts, start, clients, args.max_tokens, args.seconds, requests)
                )
                requests = requests or len(answers)
                load = loads[arm.name]
                load.answers += answers
                load.speeds.append(sum(answer.tokens for answer in answers) / seconds)
            start += requests or 0
        results[str(clients)] = {name: load.row() for name, load in loads.items()}
        for name, row in results[str(clients)].items():
            print(line(clients, name, row), flush=True)
        for error in dict.fromkeys(answer.error for load in loads.values() for answer in load.answers if answer.error):
            print(f"        error: {error[:200]}", flush=True)
        print(compared(loads), flush=True)
    return results


def line(clients: int, name: str, row: Mapping[str, Any]) -> str:
    times = "  ".join(
        f"{what} {' / '.join(f'{value:.1f}' for value in row[key])} ms"
        for what, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
    )
    return (
        f"{clients:3} clients  {name:<10} {row['requests']:4} requests  {row['errors']} errors  "
        f"{row['tokens_per_s']:7.1f} tokens/s  {times}"
    )


def compared(loads: Mapping[str, Load]) -> str:
    """The first arm over each other, round by round."""
    (name, first), *others = loads.items()
    said = []
    for other, load in others:
        ratios = [mine / theirs for mine, theirs in zip(first.speeds, load.speeds, strict=True) if theirs]
        if ratios:
            said.append(f"{name} / {other} {median(ratios):.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})")
    return "             " + "; ".join(said)


@dataclass
class Watch:
    """What the controller said, and when; seconds are those of ``perf_counter``."""

    seen: list[tuple[float, bool]] = field(default_factory=list)

    async def run(self, port: int) -> None:
        while True:
            told = json.loads(await asyncio.to_thread(fetched, port, "/v1/speculation"))
            self.seen.append((time.perf_counter(), told["controller"]["on"]))
            await asyncio.sleep(0.1)

    def first(self, state: bool, begin: float, end: float) -> tuple[float | None, float]:
        """Seconds from ``begin`` until it is ``state``, and how much of the time from then to ``end`` it is so."""
        own = [(at, on) for at, on in self.seen if begin <= at < end]
        when = next((at for at, on in own if on is state), None)
        later = [on is state for at, on in own if when is not None and at >= when]
        return (None, 0.0) if when is None else (when - begin, sum(later) / len(later))


async def totals(port: int) -> dict[str, int]:
    told = json.loads(await asyncio.to_thread(fetched, port, "/v1/speculation"))["totals"]
    return {name: told[name] for name in ("steps", "draft_tokens", "accepted_tokens")}


async def shift(port: int, seconds: float, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Copies, noise, copies, noise, copies: each for ``seconds``."""
    watch, rng, phases = Watch(), random.Random(1), []

    def noise() -> dict[str, Any]:
        words = " ".join(f"{rng.getrandbits(40):x}" for _ in range(20))
        return {"prompt": words, "temperature": 1.5, "max_tokens": 100, "ignore_eos": True, "seed": 1, **extra}

    copying = {"prompt": PARAGRAPH * 3, "temperature": 0, "max_tokens": 250, "ignore_eos": True, **extra}
    watching = asyncio.ensure_future(watch.run(port))
    for kind in ("copies", "noise", "copies", "noise", "copies"):
        before = await totals(port)
        begin, tokens = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            answer = await streamed(port, "/v1/completions", copying if kind == "copies" else noise())
            tokens += answer.tokens
            if answer.error:
                raise SystemExit(f"a request failed: {answer.error}")
        end = time.perf_counter()
        phases.append({"text": kind, "begin": begin, "end": end, "tokens_per_s": tokens / (end - begin)})
        phases[-1] |= {name: value - before[name] for name, value in (await totals(port)).items()}
    watching.cancel()
    for phase in phases:
        wanted = phase["text"] == "copies"
        phase["seconds"], phase["share"] = watch.first(wanted, phase.pop("begin"), phase.pop("end"))
        state = "on" if wanted else "off"
        when = (
            "never" if phase["seconds"] is None else f"after {phase['seconds']:.2f} s, then {phase['share']:.0%} of it"
        )
        drafts = f"{phase['draft_tokens']} drafted and {phase['accepted_tokens']} accepted in {phase['steps']} steps"
        print(f"{phase['text']:<7} {phase['tokens_per_s']:7.1f} tokens/s; {state} {when}; {drafts}", flush=True)
    plain, ratios, begin = {"speculative": {"enabled": False}}, [], time.perf_counter()
    while time.perf_counter() - begin < 4 * seconds:
        body, took = noise(), {}
        for name in ("auto", "plain") if len(ratios) % 2 else ("plain", "auto"):
            begun = time.perf_counter()
            answer = await streamed(port, "/v1/completions", {**body, **(plain if name == "plain" else {})})
            took[name] = (time.perf_counter() - begun) / max(1, answer.tokens)
        ratios.append(took["plain"] / took["auto"])
    phases.append({"text": "noise", "auto_over_plain": ratios})
    print(f"noise   auto / plain {median(ratios):.3f} (median of {len(ratios)} requests)", flush=True)
    return phases


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outrider", metavar="MODEL", help="start an Outrider server with this model")
    parser.add_argument("--serve-flags", default="", help="more flags of 'outrider serve', in one text")
    parser.add_argument("--llamacpp", type=Path, metavar="BIN", help="llama.cpp's folder with llama-server")
    parser.add_argument("--llamacpp-model", type=Path, metavar="GGUF")
    parser.add_argument("--url", help="a server on the loopback that runs already")
    parser.add_argument("--model", help="the model's name there")
    parser.add_argument("--clients", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompts", type=Path, help="JSON Lines with 'category' and 'turns'; default: six of our own")
    parser.add_argument("--limit", type=int, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot of llama.cpp")
    parser.add_argument("--shift", action="store_true", help="from copies to noise and back, instead")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    prompts = mixed(read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK))
    with contextlib.ExitStack() as servers:
        arms = []
        if args.outrider:
            flags = ["--max-num-seqs", str(max(16, *args.clients)), "--no-enable-prefix-caching"]
            port, _ = servers.enter_context(outrider(args.outrider, [*flags, *args.serve_flags.split()]))
            arms = [Arm("auto", port, {}), Arm("plain", port, {"speculative": {"enabled": False}})]
        if args.llamacpp:
            theirs = llamacpp(args.llamacpp, args.llamacpp_model, max(args.clients), args.context, args.threads)
            arms.append(Arm("llama.cpp", servers.enter_context(theirs)[0], {"cache_prompt": False}))
        if args.url:
            port = int(args.url.rstrip("/").rsplit(":", 1)[1])
            arms.append(Arm("given", port, {"model": args.model} if args.model else {}))
        if not arms:
            parser.error("give --outrider MODEL, --llamacpp BIN or --url URL")
        results: Any
        if args.shift:
            results = asyncio.run(shift(arms[0].port, args.seconds, arms[0].extra))
        else:
            results = measure(arms, prompts, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
