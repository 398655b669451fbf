"""What drafters that only look things up cost beside the target's passes, with a long history.

    python benchmarks/host_cost.py [MODEL] [--prompts FILE.jsonl] [--history 32768] [--context 1024] [--steps 200]
                                   [--remembered 0]

Each sequence has ``--history`` tokens behind it. A step is one ``propose`` and one ``observe`` for all sequences, with
one to four new tokens each; its median and 99th percentile are compared with the median of a real plain step of as many
sequences. That step has ``--context`` tokens a sequence, as the default model ends at 8192: with the whole history it
would take longer, so that the share shown is more than the real one. ``taken in`` is the time of a prompt that appears
at once, as after a hit in the prefix cache (else it comes in chunks of 512 tokens, each beside a pass of 512 rows).
With ``--remembered`` a drafter ``suffix`` remembers answers of together so many tokens, pieces of the same text.
The texts are prompts of ``--prompts`` (Spec-Bench's format; else the built-in ones) one after the other, sentences that
come back with a word changed, and the worst cases: one token, two tokens in turn, random tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from outrider.bench.prompts import QUICK, read_prompts
from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Commit, FinishReason, Span
from outrider.core.types import Sequence as Seq
from outrider.engine.llm import build_engine
from outrider.models.load import LoadedModel, load_model
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.registry import build_proposer, spec_from_mapping

DRAFTERS = ("ngram", "suffix", "lookahead", "combine")
BATCHES = (1, 16)
ANSWER = 128
"""Tokens of a remembered answer."""
BAR = 0.05
"""Of a step, that a drafter may cost."""


@dataclass(frozen=True)
class Cost:
    """Milliseconds of taking in one prompt, and of the drafter's part in a step."""

    taken_in: float
    middle: float
    high: float


def texts(model: LoadedModel, prompts: Path | None, length: int) -> dict[str, list[int]]:
    """Token texts of this length by what they are."""
    rng = random.Random(0)
    words = [model.tokenizer.encode(p.text, specials=False) for p in (read_prompts(prompts) if prompts else QUICK)]
    joined = [token for prompt in words for token in prompt]
    phrases = [[rng.randrange(1000, model.n_tokens) for _ in range(rng.randrange(8, 40))] for _ in range(60)]
    repeats: list[int] = []
    while len(repeats) < length:
        phrase = list(rng.choice(phrases))
        phrase[rng.randrange(len(phrase))] = rng.randrange(1000, model.n_tokens)
        repeats += phrase
    found = {
        "prompts": joined * (length // len(joined) + 1),
        "repeats": repeats,
        "constant": [7] * length,
        "period 2": [7, 8] * (length // 2 + 1),
        "random": [rng.randrange(model.n_tokens) for _ in range(length)],
    }
    return {name: text[:length] for name, text in found.items()}


def cost_of(
    build: Callable[[], Proposer], text: list[int], batch: int, history: int, steps: int, budget: int, remembered: int
) -> Cost:
    """Drives a drafter alone; every sequence goes on with its own text."""
    rng, drafter = random.Random(1), build()
    params, spec = SamplingParams(temperature=0), SpecParams()
    for number in range(remembered // ANSWER):
        first = rng.randrange(max(history - ANSWER, 1))
        seq = Seq(batch + number, text[first : first + ANSWER], 0, params, spec, 0, max_draft=budget)
        drafter.observe([Commit(Span(seq, 0, ANSWER), (), (), 0, finish=FinishReason.LENGTH)])
        drafter.release(seq.id)
    seqs = [Seq(i, text[:history], history, params, spec, i, max_draft=budget) for i in range(batch)]
    taken_in, times = [], []
    for seq in seqs:
        seq.n_computed = history
        start = time.perf_counter()
        drafter.observe([Commit(Span(seq, 0, history), tuple(range(history)), (), 0)])
        taken_in.append((time.perf_counter() - start) * 1e3)
        seq.tokens.append(text[history])
    for _ in range(steps):
        spans = [Span(seq, len(seq) - 1, 1, budget=budget) for seq in seqs]
        start = time.perf_counter()
        drafts = drafter.propose(spans)
        end = time.perf_counter()
        commits = []
        for span, draft in zip(spans, drafts, strict=True):
            span.draft, tokens = draft, span.seq.tokens
            new = text[len(tokens) : len(tokens) + rng.randrange(1, 5)]
            probes = tuple(rng.choice(text) for _ in range(len(draft) - draft.n_verify))
            span.seq.n_computed = len(tokens)
            tokens += new
            span.seq.n_computed = len(tokens) - 1
            commits.append(Commit(span, (0,), tuple(new), len(new) - 1, probe_tokens=probes))
        again = time.perf_counter()
        drafter.observe(commits)
        times.append((end - start + time.perf_counter() - again) * 1e3)
    times.sort()
    return Cost(median(taken_in), median(times), times[len(times) * 99 // 100])


def plain_step(model: LoadedModel, batch: int, text: list[int], context: int, steps: int) -> float:
    """Milliseconds of a plain step of ``batch`` sequences at ``context`` tokens, whose prompt is shared."""
    blocks = batch * (steps // 16 + 4) + context // 16
    engine = build_engine(model, EngineConfig("bench", num_kv_blocks=blocks), SpecConfig("none"))
    params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
    times: list[float] = []
    for i in range(batch):
        engine.add_request([*text[: context - 1], 1000 + i], params, SpecParams())
        while any(len(seq) - seq.n_computed > 1 for seq in engine.sequences):
            engine.step()
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e3)
        if len(engine.sequences) < batch:
            break
    return median(times[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--history", type=int, default=32_768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--remembered", type=int, default=0)
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS)
    options = parser.parse_args()
    model = load_model(options.model, ops="native", threads=2)
    named = texts(model, options.prompts, options.history + 4 * options.steps + 8)
    steps = {batch: plain_step(model, batch, named["prompts"], options.context, 60) for batch in BATCHES}
    for batch, milliseconds in steps.items():
        print(f"plain step, batch {batch:2}, context {options.context}: {milliseconds:.2f} ms")
    print(f"{'drafter':10} {'text':9} {'batch':>5} {'taken in':>9} {'median':>8} {'p99':>8}  ms, share of a step")
    for name in options.drafters:
        memory = {}
        if name == "suffix":
            memory["suffix_decoding_max_cached_requests"] = options.remembered // ANSWER
            memory["suffix_decoding_max_cached_tokens"] = max(options.remembered, ANSWER)
        config = spec_from_mapping({"method": name, **memory})
        for kind, text in named.items():
            for batch in BATCHES:
                cost = cost_of(
                    lambda: build_proposer(config, DraftContext(model, config)),  # noqa: B023
                    text,
                    batch,
                    options.history,
                    options.steps,
                    config.num_speculative_tokens,
                    options.remembered,
                )
                share = cost.middle / steps[batch]
                mark = "" if share < BAR else f"  above {BAR:.0%}"
                print(
                    f"{name:10} {kind:9} {batch:5} {cost.taken_in:9.1f} {cost.middle:8.3f} {cost.high:8.3f}  "
                    f"{share:.1%}{mark}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
