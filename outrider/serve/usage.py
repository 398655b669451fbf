"""What a request used, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from outrider.engine.answer import SpecStats
from outrider.engine.request import RequestOutput


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's ``usage``. Draft tokens that are in the answers are accepted; all the others that were drafted,
    those cut at a stop among them, are rejected: together they are what was drafted."""
    stats = SpecStats.total(output.stats for output in outputs)
    prompt = sum(len(output.prompt_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.completions)
    return counts(prompt, completion) | {
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }


def counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """``metrics.speculative_decoding``, under vLLM's names. A *spec step* is a step with at least one draft token;
    entry j of the histogram is how many of them accepted exactly j."""
    stats = SpecStats.total(output.stats for output in outputs)
    reached = [stats.drafts, *stats.accepted_per_position, 0]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": [here - further for here, further in pairwise(reached)],
            "num_spec_steps": stats.drafts,
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
        }
    }
