"""``/v1/status``: what the engine is doing now, and how fast it was lately."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from outrider.core.version import __version__
from outrider.engine.answer import SpecStats
from outrider.engine.engine import Engine
from outrider.serve.service import Service
from outrider.serve.status import spec_status

WINDOW = 5.0
"""Seconds of the engine's work that count as lately."""
_APART = 0.25
"""Seconds of work between two samples, however often somebody looks."""


@dataclass(frozen=True)
class Sample:
    """The engine's totals at one time, which is told by the seconds that it has worked."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0  # answers times steps: each that gave an answer at least one token
    drafts: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()  # by position in the draft
    earned: float = 0.0  # seconds of plain decoding, by the controller's estimate; its tokens took ``spent`` seconds
    spent: float = 0.0

    @staticmethod
    def of(engine: Engine) -> Sample:
        metrics = engine.metrics
        spec = SpecStats.total(metrics.spec.values())
        seconds = sum(metrics.seconds.values())
        accepted, told = tuple(spec.accepted_per_position), engine.controller.status
        return Sample(
            seconds,
            metrics.generated_tokens,
            spec.steps,
            spec.drafts,
            spec.drafted,
            accepted,
            told.earned,
            told.spent,
        )


class Live:
    """Keeps samples of an engine's totals, taken when somebody looks; nobody looking costs nothing.

    Time is the engine's own: it stands still while there is nothing to do, and so do the numbers.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque([Sample()])

    def lately(self, engine: Engine) -> dict[str, Any]:
        """Rates since the newest sample that is at least ``WINDOW`` seconds of work old, or the oldest there is.

        ``plain_tokens_per_second`` is what plain decoding would have given in the same time, by the controller's
        estimate; null where it makes none. ``acceptance_by_position[j]`` is the share of drafts whose token j + 1 was
        accepted, short drafts included.
        """
        now, samples = Sample.of(engine), self._samples
        while len(samples) > 1 and now.seconds - samples[1].seconds >= WINDOW:
            samples.popleft()
        then = samples[0]
        if now.seconds - samples[-1].seconds >= _APART:
            samples.append(now)
        seconds, steps, drafts = now.seconds - then.seconds, now.steps - then.steps, now.drafts - then.drafts
        gained = [after - before for after, before in zip_longest(now.accepted, then.accepted, fillvalue=0)]
        tokens, drafted = now.tokens - then.tokens, now.drafted - then.drafted
        spent, earned = now.spent - then.spent, now.earned - then.earned
        plain_seconds = seconds + earned - spent if spent or not drafted else 0.0
        return {
            "seconds": seconds,
            "generated_tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
            "plain_tokens_per_second": tokens / plain_seconds if plain_seconds > 0 else None,
            "tokens_per_step": tokens / steps if steps else 0.0,
            "drafts": drafts,
            "acceptance_rate": sum(gained) / drafted if drafted else 0.0,
            "acceptance_by_position": [count / drafts if drafts else 0.0 for count in gained],
        }


def status(service: Service, live: Live, engine: Engine) -> dict[str, Any]:
    """Read on the engine's thread."""
    spec, blocks = spec_status(engine), engine.blocks
    return {
        "model": service.name,
        "version": __version__,
        "context": service.context,
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "kv_blocks": {"used": blocks.n_blocks - blocks.n_free, "total": blocks.n_blocks, "size": blocks.block_size},
        "speculation": {
            "on": spec.on,
            "reason": spec.reason,
            "drafter": spec.drafter,
            "draft_length": spec.draft_length,
        },
        "lately": live.lately(engine),
    }
