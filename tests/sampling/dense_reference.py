"""The sampling rules once more, dense and slow, sharing no code with the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.core.params import SamplingParams


def dense_law(
    logits: np.ndarray, p: SamplingParams, eos: tuple[int, ...], prompt: Sequence[int], output: Sequence[int]
) -> tuple[np.ndarray, float]:
    """Probabilities f64[V], and how near (relatively) a threshold was to deciding otherwise in other rounding."""
    z = [float(x) for x in logits]
    size, near = len(z), 1.0
    for i in range(size):
        if (p.allowed_token_ids is not None and i not in p.allowed_token_ids) or i in p.banned_token_ids:
            z[i] = -np.inf
        z[i] += p.logit_bias.get(i, 0.0)
        ends = i in p.stop_token_ids or (i in eos and not p.ignore_eos)
        if ends and len(output) < p.min_tokens:
            z[i] = -np.inf
        if i in prompt or i in output:
            z[i] = z[i] / p.repetition_penalty if z[i] > 0 else z[i] * p.repetition_penalty
        times = list(output).count(i)
        z[i] -= p.frequency_penalty * times + (p.presence_penalty if times else 0.0)
    order = sorted(range(size), key=lambda i: (-z[i], i))  # best first, lower id first on ties
    law = np.zeros(size)
    if p.temperature == 0:
        law[order[0]] = 1.0
        return law, near
    scaled = (np.array(z) - z[order[0]]) / p.temperature
    law = np.exp(scaled) / np.exp(scaled).sum()
    if p.min_p > 0:
        near = min(near, float(np.abs(law / law.max() / p.min_p - 1.0).min()))
        law[law < p.min_p * law.max()] = 0.0
    if p.top_k > 0:
        law[order[p.top_k :]] = 0.0
    law /= law.sum()
    if p.top_p < 1:
        mass = np.cumsum(law[order])
        near = min(near, float(np.abs(mass / p.top_p - 1.0).min()))
        law[order[int((mass < p.top_p).sum()) + 1 :]] = 0.0
        law /= law.sum()
    return law, near
