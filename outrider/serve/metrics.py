"""``/metrics``: what an engine counts, in Prometheus' text format. docs/serving.md defines each number."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.core.types import FinishReason
from outrider.engine.answer import SpecStats
from outrider.engine.engine import Engine
from outrider.engine.metrics import EngineMetrics, Histogram
from outrider.serve.loop import EngineLoop
from outrider.serve.status import spec_status
from outrider.spec.controller import SpecStatus

TEXT_FORMAT = "text/plain; version=0.0.4"
DRAFTER = ["drafter"]


@dataclass(frozen=True)
class Snapshot(Collector):
    """All numbers of an engine at one moment, between two steps; as a collector, its metric families."""

    metrics: EngineMetrics
    status: SpecStatus
    drafters: tuple[str, ...]
    longest: int  # draft tokens a step at most: positions that are always shown
    running: int
    waiting: int
    kv_usage: float
    ready: bool

    @staticmethod
    def of(engine: Engine, ready: bool = True) -> Snapshot:
        """On the engine's thread, or when that has ended."""
        return Snapshot(
            copy.deepcopy(engine.metrics),
            spec_status(engine),
            tuple(dict.fromkeys((*engine.proposers, *engine.metrics.spec))),
            engine.spec.num_speculative_tokens,
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            1 - engine.blocks.n_free / engine.blocks.n_blocks,
            ready,
        )

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._controller()
        yield from self._sources()
        yield from self._load()
        yield from self._tokens()
        yield from self._times()

    def _speculation(self) -> Iterator[Metric]:
        each = [(name, self.metrics.spec.get(name, SpecStats())) for name in self.drafters]
        drafts = _counter("spec_decode_num_drafts", "Steps with at least one draft token.", DRAFTER)
        drafted = _counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", DRAFTER)
        accepted = _counter("spec_decode_num_accepted_tokens", "Draft tokens that are in an answer.", DRAFTER)
        position = _counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that are in an answer, by their place in the draft, the first being 0.",
            ["drafter", "position"],
        )
        steps = _counter("spec_decode_num_steps", "Steps that gave an answer at least one token.", DRAFTER)
        length = _gauge("spec_decode_mean_acceptance_length", "1 + accepted tokens / drafts since the start.", DRAFTER)
        rate = _gauge("spec_decode_acceptance_rate", "Accepted / draft tokens since the start.", DRAFTER)
        failures = _counter("drafter_failures", "Calls of a drafter that failed.", DRAFTER)
        for name, stats in each:
            drafts.add_metric([name], stats.drafts)
            drafted.add_metric([name], stats.drafted)
            accepted.add_metric([name], stats.accepted)
            by_position = stats.accepted_per_position
            for i in range(max(self.longest, len(by_position))):
                position.add_metric([name, str(i)], by_position[i] if i < len(by_position) else 0)
            steps.add_metric([name], stats.steps)
            length.add_metric([name], stats.mean_acceptance_length)
            rate.add_metric([name], stats.acceptance_rate)
            failures.add_metric([name], self.metrics.drafter_failures[name])
        yield from (drafts, drafted, accepted, position, steps, length, rate, failures)

    def _controller(self) -> Iterator[Metric]:
        status = self.status
        yield _gauge("speculation_on", "1 while drafts are made, else 0.", value=status.on)
        info = _gauge("speculation_info", "1; why there is speculation or none.", ["drafter", "reason"])
        # The reason for drafting may hold numbers: each would be a series of its own.
        info.add_metric([status.drafter, "drafts pay" if status.on and status.survival else status.reason], 1)
        yield info
        yield _gauge("spec_decode_draft_length", "Draft tokens asked for a step, lately.", value=status.draft_length)
        yield _gauge(
            "spec_decode_estimated_speedup",
            "Estimated speed over that of plain decoding; 1 where nothing is estimated.",
            value=status.speedup,
        )

    def _sources(self) -> Iterator[Metric]:
        labels = ["drafter", "source"]
        drafted = _counter("spec_decode_num_draft_tokens_by_source", "Draft tokens, by the part they are of.", labels)
        accepted = _counter("spec_decode_num_accepted_tokens_by_source", "Those that are in an answer.", labels)
        for name, stats in self.metrics.spec.items():
            for source, counts in stats.by_source.items():
                drafted.add_metric([name, source], counts[0])
                accepted.add_metric([name, source], counts[1])
        yield from (drafted, accepted)

    def _load(self) -> Iterator[Metric]:
        yield _gauge("engine_ready", "1 while requests are taken, else 0.", value=self.ready)
        yield _gauge("num_requests_running", "Answers that have a seat.", value=self.running)
        yield _gauge("num_requests_waiting", "Answers that wait for one.", value=self.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", value=self.kv_usage)
        yield _counter("num_preemptions", "Answers that lost their KV to older ones.", value=self.metrics.preemptions)
        finished = _counter("requests_finished", "Requests that ended, by how.", ["finish_reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], self.metrics.finished[reason])
        yield finished

    def _tokens(self) -> Iterator[Metric]:
        m = self.metrics
        yield _counter("generation_tokens", "Tokens handed out.", value=m.generated_tokens)
        yield _counter("prompt_tokens", "Prompt tokens of the requests that began.", value=m.prompt_tokens)
        said = "Prompt tokens of the answers that began."
        yield _counter("prefix_cache_queries", said, value=m.answer_prompt_tokens)
        yield _counter("prefix_cache_hits", "Those that were in the KV cache.", value=m.cached_prompt_tokens)
        rows = _counter("step_rows", "Rows of forward passes.", ["kind"])
        for kind, n in (("prompt", m.prompt_rows), ("decode", m.decode_rows), ("draft", m.draft_rows)):
            rows.add_metric([kind], n)
        yield rows

    def _times(self) -> Iterator[Metric]:
        m = self.metrics
        for name, said, histogram in (
            ("time_to_first_token_seconds", "A request's, from its arrival.", m.first_token_time),
            ("time_per_output_token_seconds", "Every further token's; k of one step share its time.", m.token_time),
            ("e2e_request_latency_seconds", "Of requests that came to their end.", m.request_time),
            ("request_queue_time_seconds", "A request's, until its first rows.", m.queue_time),
        ):
            family = HistogramMetricFamily(f"outrider:{name}", said)
            family.add_metric([], *_buckets(histogram))
            yield family
        phases = HistogramMetricFamily("outrider:step_phase_seconds", "A step's, by phase.", labels=["phase"])
        for phase, histogram in m.phases.items():
            phases.add_metric([phase], *_buckets(histogram))
        yield phases


async def exposition(loop: EngineLoop) -> bytes:
    """The page. It can be read when the engine has stopped, too: then it says so."""
    if loop.alive:
        ready = loop.accepting
        return generate_latest(await loop.call(lambda engine: Snapshot.of(engine, ready)))
    return generate_latest(Snapshot.of(loop.engine, ready=False))


def _counter(
    name: str, said: str, labels: Iterable[str] | None = None, value: float | None = None
) -> CounterMetricFamily:
    return CounterMetricFamily(f"outrider:{name}", said, value, None if labels is None else list(labels))


def _gauge(name: str, said: str, labels: Iterable[str] | None = None, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider:{name}", said, value, None if labels is None else list(labels))


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """As Prometheus has them: each with all samples up to its bound."""
    out, so_far = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        so_far += count
        out.append((bound, float(so_far)))
    return out, histogram.total
