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
    """Where two greedy outputs part: ``margin`` is plain decoding's top-2 gap in log-probability there."""

    prompt: int
    kind: str
    position: int
    plain_token: int | None  # None: that output had ended
    speculative_token: int | None
    margin: float


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
    The margins come from the plain run's log-probabilities, which it reports on a second run where they are needed.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        ids = encode(llm, prompt)
        outputs = {}
        for enabled in (False, True) if index % 2 == 0 else (True, False):
            outputs[enabled] = llm.generate(ids, greedy, SpecParams(enabled=enabled))[0]
        plain, speculative = outputs[False], outputs[True]
        divergence = None
        if plain.token_ids != speculative.token_ids:
            divergence = _first_divergence(llm, index, prompt.kind, ids, plain, speculative, greedy)
        yield Comparison(index, prompt, plain, speculative, divergence)


def encode(llm: LLM, prompt: BenchPrompt) -> list[int]:
    """The prompt's token ids, in the chat template where the model has one."""
    if llm.target.chat_template is None:
        return llm.encode(prompt.text)
    return llm.encode_chat([{"role": "user", "content": prompt.text}])


def _first_divergence(
    llm: LLM,
    index: int,
    kind: str,
    ids: list[int],
    plain: RequestOutput,
    speculative: RequestOutput,
    greedy: SamplingParams,
) -> Divergence:
    a, b = plain.token_ids, speculative.token_ids
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    replay = llm.generate([*ids, *a[:at]], replace(greedy, max_tokens=1, logprobs=2), SpecParams(enabled=False))[0]
    logprobs = replay.completions[0].logprobs
    assert logprobs is not None, "logprobs were asked for"
    best, second = logprobs[0].top
    token = [ids[at] if at < len(ids) else None for ids in (a, b)]
    return Divergence(index, kind, at, token[0], token[1], best[1] - second[1])
