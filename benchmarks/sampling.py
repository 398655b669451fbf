"""Time of the sampler: from a row of logits to the distribution that is drawn from, and of a draw and a residual.

    python benchmarks/sampling.py [--vocab 49152,128256,151936] [--history 8192] [--seconds 0.5]

Medians, microseconds a row, one thread. ``flat`` logits are a hundred times flatter than a model's: the worst case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.sampling.history import History
from outrider.sampling.rows import NodeRows
from outrider.sampling.sampler import Sampler
from outrider.spec.draws import draws_for
from outrider.spec.verify import verify

SETTINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "temperature, flat": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-p 0.9, flat": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "repetition, greedy": SamplingParams(temperature=0, repetition_penalty=1.1),
    "repetition, top-p 0.9": SamplingParams(repetition_penalty=1.1, top_p=0.9),
    "frequency and presence, top-p 0.9": SamplingParams(frequency_penalty=0.3, presence_penalty=0.3, top_p=0.9),
    "logit_bias, top-p 0.9": SamplingParams(logit_bias={5: 1.0, 900: -2.0}, top_p=0.9),
    "banned, top-p 0.9": SamplingParams(banned_token_ids=(5, 900), top_p=0.9),
    "allowed 1000, temperature": SamplingParams(allowed_token_ids=tuple(range(0, 10_000, 10))),
}


def timed(fn: Callable[[], object], seconds: float) -> float:
    """Median microseconds of one call."""
    fn()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 2000):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def figures(vocab: int, history: int, seconds: float) -> dict[str, float]:
    """Median microseconds of each figure."""
    rng = np.random.default_rng(0)
    peaked = (rng.gumbel(size=(5, vocab)) * 2.0).astype(np.float32)  # some hundreds of tokens hold most of the mass
    flat = peaked * np.float32(0.01)
    past = History(rng.integers(0, vocab, history).tolist(), history // 2)
    chain = Draft.chain(rng.integers(0, vocab, 4).tolist())
    found: dict[str, float] = {}

    def note(name: str, fn: Callable[[], object]) -> None:
        found[name] = timed(fn, seconds)

    for name, params in SETTINGS.items():
        sampler, logits = Sampler(params, vocab), flat if "flat" in name else peaked
        note(name, lambda s=sampler, z=logits: NodeRows(s, z, past, Draft())[0])  # type: ignore[misc]
    greedy = Sampler(SETTINGS["greedy"], vocab)
    note(
        "4 greedy draft tokens, all verified",
        lambda: verify(chain, NodeRows(greedy, peaked, past, chain), draws_for("standard", 1, 9), "standard"),
    )
    for name in ("temperature", "temperature, flat", "top-p 0.9"):
        logits = flat if "flat" in name else peaked
        p, q = (Sampler(SETTINGS[name], vocab).dist(row, [], []) for row in logits[:2])
        note(f"{name}: draw", lambda p=p: p.sample(0.3))  # type: ignore[misc]
        note(f"{name}: coupled draw", lambda p=p: p.gumbel_max(1, 7))  # type: ignore[misc]
        note(f"{name}: residual", lambda p=p, q=q: p.residual(q))  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default="49152,128256,151936")
    parser.add_argument("--history", type=int, default=8192, help="tokens of prompt and output together")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    sizes = [int(size) for size in options.vocab.split(",")]
    columns = [figures(size, options.history, options.seconds) for size in sizes]
    print(f"{'us a row':38}" + "".join(f"{size:>10}" for size in sizes))
    for name in columns[0]:
        print(f"{name:38}" + "".join(f"{column[name]:10.0f}" for column in columns))


if __name__ == "__main__":
    main()
