"""What speculation did, for people (lines of text) and for machines (plain dictionaries)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.llm import LLM
from outrider.engine.metrics import EngineMetrics
from outrider.engine.request import Completion, RequestOutput


def model_line(llm: LLM) -> str:
    """The model, its size and what computes it."""
    decoder = llm.target.decoder
    return (
        f"{llm.target.name}: {decoder.weight_bytes / 1e6:.0f} MB of weights on {decoder.device}, "
        f"{decoder.ops.describe()}"
    )


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
    if stats.by_source:
        counts = {source: {"drafted": d, "accepted": a} for source, (d, a) in stats.by_source.items()}
        result["speculation"]["by_source"] = counts
    if first.logprobs is not None:
        result["logprobs"] = _logprobs(first)
    if len(output.completions) > 1:
        result["choices"] = [
            {"text": c.text, "token_ids": list(c.token_ids), "finish_reason": c.finish_reason.value}
            | ({} if c.logprobs is None else {"logprobs": _logprobs(c)})
            for c in output.completions
        ]
    return result


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    entries = completion.logprobs or ()
    return [{"token": e.token, "logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in entries]


def stats_lines(
    output: RequestOutput, metrics: EngineMetrics, seconds_before: Mapping[str, float], steps_before: int
) -> list[str]:
    """Tokens per step, acceptance by position, draft cost and speed of one request, alone on the engine since
    ``metrics`` stood at ``seconds_before`` and ``steps_before``."""
    stats = output.stats
    by_position = " ".join(f"{count / stats.drafts:.2f}" for count in stats.accepted_per_position) or "-"
    tokens_per_step = f"{stats.tokens_per_step:.2f} tokens per step"
    lines = [
        f"drafter {output.drafter}: {stats.emitted} tokens in {stats.steps} steps, {tokens_per_step}",
        f"drafted {stats.drafted}, accepted {stats.accepted} ({stats.acceptance_rate:.0%}); by position {by_position}",
    ]
    lines += [f"{source}: drafted {drafted}, accepted {kept}" for source, (drafted, kept) in stats.by_source.items()]
    lines += [f"no draft in {count} steps: {reason}" for reason, count in stats.no_draft.items()]
    draft, forward = (metrics.seconds[phase] - seconds_before[phase] for phase in ("draft", "forward"))
    if forward > 0:
        per_step = draft / (metrics.steps - steps_before) * 1e3
        lines.append(f"draft cost {per_step:.2f} ms a step, {draft / forward:.1%} of the target's forward pass")
    after_first = stats.emitted - 1
    rate = f"{after_first / output.decode_s:.1f} tokens/s" if output.decode_s > 0 and after_first > 0 else "-"
    lines.append(f"prefill {output.prefill_s:.3f} s, decode {output.decode_s:.3f} s: {rate}")
    return lines
