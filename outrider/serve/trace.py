"""A span for each request, where OpenTelemetry is installed; who gets them is OpenTelemetry's own configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.core.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

NAME = "outrider.request"
_NAMES = {
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "queue": "outrider.time_in_queue",
    "ttft": "outrider.time_to_first_token",
    "tpot": "outrider.time_per_output_token",
}


class Tracer:
    """Makes the span of a request when it has ended, so that tracing costs nothing while it runs."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """``provider`` None is the one of the process. Needs the package opentelemetry-api."""
        from opentelemetry import trace

        self._tracer = trace.get_tracer("outrider", __version__, tracer_provider=provider)

    @staticmethod
    def find() -> Tracer | None:
        """A tracer if the package is installed."""
        try:
            return Tracer()
        except ImportError:
            return None

    def record(self, model: str, values: Mapping[str, Any], trace: Mapping[str, str]) -> None:
        """``values`` are a ``RequestRecord``'s; ``trace`` are the headers that name the span above this one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self._tracer.start_span(
            NAME,
            context=TraceContextTextMapPropagator().extract(dict(trace)),
            kind=SpanKind.SERVER,
            start_time=end - round(values["total"] * 1e9),
            attributes=attributes(model, values),
        )
        span.end(end)


def attributes(model: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The record under the names of OpenTelemetry's conventions where there are such."""
    out: dict[str, Any] = {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": model}
    for name, value in values.items():
        if name == "finish_reason":
            out["gen_ai.response.finish_reasons"] = (value,)
        elif name != "total" and value is not None:
            out[_NAMES.get(name, f"outrider.{name}")] = value
    return out
