"""The exact law of a toy target's first tokens, apart from the engine's sampler, and a chi-square test of it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.stats import chi2

from outrider.core.params import SamplingParams
from outrider.models.load import LoadedModel
from tests.toy import full_logits

History = tuple[int, ...]
Law = dict[History, float]
RawLogits = Callable[[History], np.ndarray]


def next_token_law(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], p: SamplingParams) -> np.ndarray:
    """The rules of a request, written the slow and obvious way: probabilities [V] of the next token."""
    z = [float(x) for x in logits]
    for token in range(len(z)):
        if token in p.banned_token_ids or (p.allowed_token_ids is not None and token not in p.allowed_token_ids):
            z[token] = -np.inf
        z[token] += p.logit_bias.get(token, 0.0)
        if token in p.stop_token_ids and len(output) < p.min_tokens:
            z[token] = -np.inf
        if token in prompt or token in output:
            z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
        z[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    for processor in p.processors:
        z = list(processor(prompt, output, np.array(z)))
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    weights = {token: np.exp((z[token] - z[order[0]]) / p.temperature) for token in order}
    kept = [token for token in order if weights[token] >= p.min_p and weights[token] > 0]
    kept = kept[: p.top_k] if p.top_k else kept
    total, nucleus = sum(weights[token] for token in kept), 0.0
    law = np.zeros(len(z))
    for token in kept:
        if nucleus < p.top_p * total:
            law[token] = weights[token]
        nucleus += weights[token]
    return law / law.sum()


def raw_logits(model: LoadedModel, prompt: Sequence[int], n_tokens: int | None = None) -> RawLogits:
    """Logits after ``prompt`` and a history, without a cache; ids from ``n_tokens`` on are cut off."""

    @functools.cache
    def after(history: History) -> np.ndarray:
        return full_logits(model.decoder, [*prompt, *history])[-1].numpy()[:n_tokens]

    return after


def joint_law(after: RawLogits, prompt: Sequence[int], params: SamplingParams, length: int = 3) -> Law:
    """The law of the first ``length`` tokens; a stop token ends a history."""
    laws: Law = {(): 1.0}
    for _ in range(length):
        grown: Law = {}
        for history, weight in laws.items():
            if history and history[-1] in params.stop_token_ids:
                grown[history] = weight
                continue
            law = next_token_law(after(history), list(prompt), list(history), params)
            grown |= {(*history, token): weight * law[token] for token in np.flatnonzero(law).tolist()}
        laws = grown
    return laws


def p_value(drawn: Iterable[History], law: Law) -> float:
    """Chi-square goodness of fit; outcomes expected fewer than 8 times share a cell. 0 for an impossible outcome."""
    counts = Counter(drawn)
    if any(history not in law for history in counts):
        return 0.0
    total = counts.total()
    cells: list[tuple[float, float]] = []
    rest = (0.0, 0.0)
    for history, weight in law.items():
        cell = (counts[history], weight * total)
        if cell[1] >= 8:
            cells.append(cell)
        else:
            rest = (rest[0] + cell[0], rest[1] + cell[1])
    if rest[1] > 0:
        cells.append(rest)
    if len(cells) == 1:
        return 1.0
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
