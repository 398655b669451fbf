"""What is noted of each request that has ended: a log line of numbers, and a span where traces are kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from outrider.engine.answer import SpecStats
from outrider.engine.metrics import SEVERITY
from outrider.engine.request import Request
from outrider.serve.stream import Stream
from outrider.serve.trace import Tracer

logger = logging.getLogger("outrider")


@dataclass(frozen=True)
class RequestRecord:
    """One prompt and its answers; times in seconds, None where it did not come to that.

    ``sequences`` are what the engine's own log lines call the answers. ``cached_tokens`` of the prompt were in the KV
    cache already. ``ttft`` runs from arrival to the first token, and ``tpot`` is the mean time of the answers' further
    tokens.
    """

    id: str
    sequences: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue: float | None
    ttft: float | None
    tpot: float | None
    total: float
    drafter: str
    draft_tokens: int
    accepted_tokens: int
    acceptance: float
    mean_acceptance_length: float
    finish_reason: str

    @staticmethod
    def of(request: Request, id: str) -> RequestRecord:
        """Of a request that has ended."""
        assert request.finished is not None, "the request is still running"
        stats = SpecStats.total(answer.stats for answer in request.answers)
        begun = [answer for answer in request.answers if answer.first_token is not None]
        further = sum(answer.seq.n_output - 1 for answer in begun)
        seconds = sum(answer.last_token - (answer.first_token or 0.0) for answer in begun)
        reasons = {answer.finish for answer in request.answers}

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - request.arrived

        return RequestRecord(
            id=id,
            sequences=",".join(str(answer.seq.id) for answer in request.answers),
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.answers[0].seq.n_cached,
            output_tokens=sum(answer.seq.n_output for answer in request.answers),
            queue=since_arrival(request.started),
            ttft=since_arrival(request.first_token),
            tpot=seconds / further if further else None,
            total=request.finished - request.arrived,
            drafter=request.drafter,
            draft_tokens=stats.drafted,
            accepted_tokens=stats.accepted,
            acceptance=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            finish_reason=next(reason for reason in SEVERITY if reason in reasons).value,
        )


class Journal:
    """Notes requests when they have ended; ``model`` is the name they were served under."""

    def __init__(self, model: str, log: bool, tracer: Tracer | None) -> None:
        self._model, self._log, self._tracer = model, log, tracer

    def note(self, stream: Stream) -> None:
        caller = stream.caller
        for i, request in enumerate(stream.requests):
            id = caller.request_id if len(stream.requests) == 1 else f"{caller.request_id}-{i}"
            record = RequestRecord.of(request, id)
            values = {**vars(record)}
            if self._log and logger.isEnabledFor(logging.INFO):
                logger.info("request %s", in_words(values), extra={"event": "request", "values": values})
            if self._tracer is not None:
                self._tracer.record(self._model, values, caller.trace)


def in_words(values: dict[str, Any]) -> str:
    """``name=value`` for each, with four digits; ``-`` where there is none."""
    shown = {name: "-" if value in (None, "") else value for name, value in values.items()}
    return " ".join(f"{name}={v:.4g}" if isinstance(v, float) else f"{name}={v}" for name, v in shown.items())
