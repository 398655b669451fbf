"""What speculation did, for people (lines of text) and for machines (plain dictionaries)."""

from __future__ import annotations

from typing import Any

from outrider.engine.answer import SpecStats
from outrider.engine.metrics import EngineMetrics
from outrider.engine.request import RequestOutput


def output_json(output: RequestOutput) -> dict[str, Any]:
    """One finished request; with n > 1 the further answers stand under ``choices``."""
    first = output.completions[0]
    stats = output.stats
    result: dict[str, Any] = {
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason.value,
        "usage": output.usage,
        "speculation": {
            "drafter": output.drafter,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "tokens_per_step": round(stats.tokens_per_step, 4),
            "accepted_per_position": stats.accepted_per_position,
        },
        "seconds": {"prefill": round(output.prefill_s, 6), "decode": round(output.decode_s, 6)},
    }
    if first.logprobs is not None:
        result["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in first.logprobs
        ]
    if len(output.completions) > 1:
        result["choices"] = [
            {"text": c.text, "token_ids": list(c.token_ids), "finish_reason": c.finish_reason.value}
            for c in output.completions
        ]
    return result


def stats_lines(stats: SpecStats, drafter: str, prefill_s: float, decode_s: float, metrics: EngineMetrics) -> list[str]:
    """Tokens per step, acceptance by position, draft cost and speed."""
    by_position = " ".join(f"{count / stats.drafts:.2f}" for count in stats.accepted_per_position) or "-"
    tokens_per_step = f"{stats.tokens_per_step:.2f} tokens per step"
    lines = [
        f"drafter {drafter}: {stats.emitted} tokens in {stats.steps} steps, {tokens_per_step}",
        f"drafted {stats.drafted}, accepted {stats.accepted} ({stats.acceptance_rate:.0%}); by position {by_position}",
    ]
    lines += [f"no draft in {count} steps: {reason}" for reason, count in stats.no_draft.items()]
    draft, forward = metrics.seconds["draft"], metrics.seconds["forward"]
    if metrics.steps and forward:
        per_step = draft / metrics.steps * 1e3
        lines.append(f"draft cost {per_step:.2f} ms a step, {draft / forward:.1%} of the target's forward pass")
    after_first = stats.emitted - 1
    rate = f"{after_first / decode_s:.1f} tokens/s" if decode_s > 0 and after_first > 0 else "-"
    lines.append(f"prefill {prefill_s:.3f} s, decode {decode_s:.3f} s: {rate}")
    return lines
