"""Where the time of an engine step goes, and what it costs beyond the native operations themselves.

    python benchmarks/engine_step.py [MODEL] [--quantization int8] [--context 256] [--steps 60] [--profile]

Engines of several kinds step in turn over one set of weights, at ``--context`` tokens. The time inside the one call
into the extension is the native time. (A second, bare pass after each step would be no better a yardstick: it empties
the caches, and the next step's Python pays for that.) Medians, milliseconds. ``draft 7`` is one sequence with seven
draft tokens, the eight rows of a verification. At the end, an n-gram look-up with 32k tokens of history. ``--profile``
prints where the time of plain steps at batch 1 goes, function by function.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Batch, Span, StepRecord
from outrider.core.types import Sequence as Seq
from outrider.engine.engine import Engine
from outrider.engine.llm import build_engine
from outrider.models.load import LoadedModel, load_model
from outrider.ops import native
from outrider.spec.drafts.ngram import Ngram, NgramSettings
from outrider.spec.drafts.none import NoDraft
from outrider.spec.proposer import Proposer

BURST = 8
"""Steps of one kind in a row, as when it serves; the first of them, after another kind's, does not count."""

PHASES = ("schedule", "draft", "build", "forward", "verify", "commit")


class Guess(Proposer):
    """As many draft tokens as it may, always the same: every row of a verification, whatever is accepted."""

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [Draft.chain([7] * span.budget) for span in spans]


class NativeClock:
    """Stands before the extension and takes the time of its passes: what a step cannot save."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the newest pass
        self._inner = native._native
        native._native = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *args: Any) -> None:
        start = time.perf_counter()
        self._inner.forward(*args)
        self.seconds = time.perf_counter() - start


class Kind:
    """One engine that steps at about ``context`` tokens a sequence; requests start anew when they have grown."""

    def __init__(
        self, model: LoadedModel, drafter: str, batch: int, options: argparse.Namespace, clock: NativeClock
    ) -> None:
        self.name, self.batch, self.context = f"{drafter}, batch {batch}", batch, options.context
        tokens = batch * (options.context + 128)
        config = EngineConfig("bench", num_kv_blocks=tokens // 16 + 64, enable_prefix_caching=False)
        if drafter in ("plain", "draft 7"):
            guess = drafter == "draft 7"
            spec = SpecConfig("none", num_speculative_tokens=7 if guess else 0)
            self.engine = Engine(model, config, {"bench": Guess() if guess else NoDraft()}, spec)
        else:
            self.engine = build_engine(model, config, SpecConfig(drafter))
        self.clock = clock
        self.records: list[dict[str, float]] = []
        self._vocab, self._left, self._seen = model.n_tokens, 0, 0
        runner, metrics = self.engine.runner, self.engine.metrics
        inner, observe = runner.decoder.run, metrics.observe

        def forward(batch: Batch, *args: Any) -> Any:
            self._batch, self._built = batch, time.perf_counter()
            return inner(batch, *args)

        def watch(record: StepRecord) -> None:
            self._record = record
            observe(record)

        runner.decoder = _With(runner.decoder, run=forward)
        self.engine.metrics = _With(metrics, observe=watch)  # type: ignore[assignment]

    def start(self) -> None:
        """New requests, their prompts read. The text repeats itself, so that n-grams are found."""
        for request in list(self.engine._requests):
            self.engine.abort(request)
        rng = random.Random(self._seen)
        self._seen += 1
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        for _ in range(self.batch):
            phrase = [rng.randrange(1000, self._vocab) for _ in range(24)]
            prompt = (phrase * (self.context // 24 + 1))[: self.context - 16]
            self.engine.add_request(prompt, params, SpecParams())
        while any(len(seq) - seq.n_computed > 1 or not seq.n_output for seq in self.engine.sequences):
            self.engine.step()
        self._left = BURST  # steps, so that the context stays about the same even if all is accepted

    def step(self, keep: bool) -> None:
        if not self._left:
            self.start()
        self._left -= 1
        start = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        times = self._record.times
        parts = {name: getattr(times, name) for name in PHASES if name != "build"}
        begin = start + times.schedule + times.draft
        parts["build"] = self._built - begin
        parts["step"] = end - start
        parts["rest"] = parts["step"] - times.total
        parts["rows"] = self._batch.n_rows / 1e3
        parts["native"] = self.clock.seconds
        if keep:
            self.records.append(parts)

    def median(self, name: str) -> float:
        return median(record[name] * 1e3 for record in self.records)


class _With:
    """An object with some of its attributes replaced."""

    def __init__(self, inner: Any, **own: Any) -> None:
        self.__dict__.update(own)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def look_up(history: int) -> tuple[float, float]:
    """Milliseconds of taking in a prompt of this length, and of one look-up with one new token after it."""
    rng = random.Random(0)
    seq = Seq(0, [rng.randrange(5000) for _ in range(history)], history, SamplingParams(), SpecParams(), 0, max_draft=7)
    drafter, times = Ngram(NgramSettings()), []
    for _ in range(200):
        start = time.perf_counter()
        drafter.propose([Span(seq, len(seq) - 1, 1, budget=7)])
        times.append((time.perf_counter() - start) * 1e3)
        seq.tokens.append(rng.randrange(5000))
    return times[0], median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    model = load_model(options.model, quantization=options.quantization, ops="native", threads=options.threads)
    if options.profile:
        profile(Kind(model, "plain", 1, options, NativeClock()), options.steps)
    else:
        compare(model, options, NativeClock())


def compare(model: LoadedModel, options: argparse.Namespace, clock: NativeClock) -> None:
    """Prints the parts of each kind's steps, and the ratios."""
    names = (("plain", 1), ("plain", 8), ("draft 7", 1), ("ngram", 1), ("ngram", 8))
    kinds = [Kind(model, *name, options, clock) for name in names]
    for i in range(-(-options.steps // (BURST - 1)) + 1):
        for kind in kinds:
            for j in range(BURST):
                kind.step(keep=i > 0 and j > 0)
    columns = ("rows", "step", "native", *PHASES, "rest")
    print(f"{model.decoder.ops.describe()}; weights {options.quantization or 'as stored'}, context {options.context}")
    print(f"{'milliseconds':18}" + "".join(f"{name:>9}" for name in columns) + "   step/native")
    for kind in kinds:
        ratio = median(r["step"] / r["native"] for r in kind.records)
        cells = "".join(
            f"{kind.median(name):9.3f}" if name != "rows" else f"{kind.median(name):9.0f}" for name in columns
        )
        print(f"{kind.name:18}{cells}   {ratio:8.3f}")
    one = kinds[0]
    for kind in kinds[1:3]:
        for name in ("step", "native"):
            ratio = median(a[name] / b[name] for a, b in zip(kind.records, one.records, strict=True))
            print(f"{name:6} of 8 rows over 1 row, {kind.name}: {ratio:.2f}")
    print("look-up with 32k tokens of history: {1:.3f} ms a step, {0:.0f} ms to take them in".format(*look_up(32_768)))


def profile(kind: Kind, steps: int) -> None:
    """Prints the functions that take most of the time of a step."""
    kind.start()
    kind.step(keep=False)
    profiler = cProfile.Profile()
    for _ in range(steps):
        kind.start() if not kind._left else None
        kind._left -= 1
        profiler.enable()
        kind.engine.step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
