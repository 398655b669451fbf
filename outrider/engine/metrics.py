"""Counters of an engine: raw numbers are stored, rates derived."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from outrider.core.types import StepRecord, StepTimes
from outrider.engine.answer import SpecStats

PHASES = tuple(f.name for f in fields(StepTimes))


@dataclass
class EngineMetrics:
    """Totals since the engine was built; times in seconds by phase. ``spec`` holds one set of counters a drafter."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    prompt_rows: int = 0
    decode_rows: int = 0
    draft_rows: int = 0
    generated_tokens: int = 0
    cached_prompt_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    preemptions: int = 0
    spec: dict[str, SpecStats] = field(default_factory=dict)

    def observe(self, record: StepRecord) -> None:
        """Adds one step."""
        self.steps += 1
        for phase in PHASES:
            self.seconds[phase] += getattr(record.times, phase)
        for name in ("prompt_rows", "decode_rows", "draft_rows"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.preemptions += record.preempted
        for span in record.spans:
            if span.emitted:
                self.generated_tokens += span.emitted
                stats = self.spec.setdefault(span.drafter, SpecStats())
                stats.add_step(span.drafted, span.accepted, span.emitted, span.reason, span.sources)
