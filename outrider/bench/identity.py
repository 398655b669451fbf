"""Plain against speculative on the same prompts: is the greedy output the same, and where does it first differ?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.bench.prompts import BenchPrompt
from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.llm import LLM
from outrider.engine.request import RequestOutput

NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.125, torch.float16: 0.02}
"""Top-2 logit gaps that matrix products of this precision can turn over when the number of rows changes."""


@dataclass(frozen=True)
class Divergence:
    """Where two greedy outputs part.

    ``margin`` is the gap in log-probability between plain decoding's best two tokens there. ``near_tie`` says that
    these two are the tokens in question and the gap is one that rounding can turn over.
    """

    prompt: int
    kind: str
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways."""

    index: int
    prompt: BenchPrompt
    plain: RequestOutput
    speculative: RequestOutput
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        return self.divergence is None


def compare(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int) -> Iterator[Comparison]:
    """Answers each prompt greedily, plain and with the drafter, and compares token by token.

    Which of the two comes first alternates from prompt to prompt. Without a chat template the prompt is continued.
    Where they differ the plain run is done again, the same way, with log-probabilities.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        ids = encode(llm, prompt)
        outputs = {}
        for enabled in (False, True) if index % 2 == 0 else (True, False):
            outputs[enabled] = llm.generate([ids], greedy, SpecParams(enabled=enabled))[0]
        plain, speculative = outputs[False], outputs[True]
        divergence = None
        if plain.token_ids != speculative.token_ids:
            scored = llm.generate([ids], replace(greedy, logprobs=2), SpecParams(enabled=False))[0]
            decoder = llm.target.decoder
            near = 0.0 if decoder.ops.batch_invariant else NEAR_TIE[decoder.dtype]
            divergence = first_divergence(index, prompt.kind, scored, speculative, near)
        yield Comparison(index, prompt, plain, speculative, divergence)


def encode(llm: LLM, prompt: BenchPrompt) -> list[int]:
    """The prompt's token ids, in the chat template where the model has one."""
    if llm.target.chat_template is None:
        return llm.encode(prompt.text)
    return llm.encode_chat([{"role": "user", "content": prompt.text}])


def first_divergence(
    index: int, kind: str, plain: RequestOutput, speculative: RequestOutput, near: float
) -> Divergence | None:
    """Where ``speculative`` leaves ``plain``, which was run with at least two logprobs; None where it does not."""
    logprobs = plain.completions[0].logprobs
    assert logprobs is not None, "logprobs were asked for"
    for at, (a, b) in enumerate(zip(plain.token_ids, speculative.token_ids, strict=False)):
        if a != b:
            (first, best), (second, next_best) = logprobs[at].top[:2]
            margin = best - next_best
            return Divergence(index, kind, at, a, b, margin, {a, b} == {first, second} and margin <= near)
    return None
