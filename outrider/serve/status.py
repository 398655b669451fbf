"""What a server says about itself."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from outrider.core.config import SpecConfig
from outrider.engine.answer import SpecStats
from outrider.engine.engine import Engine
from outrider.serve.service import Service
from outrider.spec.controller import SpecStatus
from outrider.spec.registry import PLAIN

NO_DRAFTER = "the server was started without a drafter"


def models(service: Service) -> dict[str, Any]:
    """``/v1/models``."""
    return {"object": "list", "data": [model(service)]}


def model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "outrider",
        "root": service.target.name,
        "parent": None,
        "max_model_len": service.context,
    }


def speculation(engine: Engine) -> dict[str, Any]:
    """``/v1/speculation``: what is on, with what, and why; read on the engine's thread."""
    default, spec = next(iter(engine.proposers)), engine.spec
    why_not = _why_not(default, spec)
    total = SpecStats.total(engine.metrics.spec.values())
    return {
        "enabled": not why_not,
        "reason": why_not or f"drafter {default}, up to {spec.num_speculative_tokens} draft tokens a step",
        "drafter": default,
        "drafters": list(engine.proposers),
        "num_speculative_tokens": spec.num_speculative_tokens,
        "rejection_sample_method": spec.rejection_sample_method,
        "controller": {"kind": type(engine.controller).__name__, **_shown(spec_status(engine))},
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "totals": _counters(total),
        "by_drafter": {name: _counters(stats) for name, stats in engine.metrics.spec.items()},
    }


def spec_status(engine: Engine) -> SpecStatus:
    """What the controller is doing; where there is nothing to draft with, that."""
    default = next(iter(engine.proposers))
    if default == PLAIN:
        return SpecStatus(False, NO_DRAFTER, PLAIN, 0.0)
    status = engine.controller.status
    return replace(status, drafter=status.drafter or default)


def _shown(status: SpecStatus) -> dict[str, Any]:
    since = None if status.changed is None else time.perf_counter() - status.changed
    return {name: value for name, value in asdict(status).items() if name != "changed"} | {"changed_seconds_ago": since}


def _why_not(default: str, spec: SpecConfig) -> str:
    """Why no request without wishes of its own gets drafts; "" where it may."""
    if default == PLAIN:
        return NO_DRAFTER
    if spec.speculation == "off":
        return "speculation is off"
    return "" if spec.num_speculative_tokens else "num_speculative_tokens is 0"


def _counters(stats: SpecStats) -> dict[str, Any]:
    return {
        "steps": stats.steps,
        "drafts": stats.drafts,
        "draft_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "generated_tokens": stats.emitted,
        "accepted_per_position": list(stats.accepted_per_position),
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "no_draft": dict(stats.no_draft),
    }
