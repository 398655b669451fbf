"""From a request's fields to the engine's settings."""

from __future__ import annotations

from typing import Any

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.serve.errors import ApiError, bad_field
from outrider.serve.grammar import asked_grammar
from outrider.serve.schemas import MAX_STOPS, ChatRequest, Sampling, TextPart
from outrider.serve.service import Service
from outrider.spec.registry import kind_of

_SAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "banned_token_ids",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
_MAX_TOP_LOGPROBS = 20


def sampling_of(request: Sampling, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """How to sample. Raises SettingError or ApiError, naming the field."""
    values: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise bad_field("stop", f"stop has {len(request.stop)} texts; allowed are {MAX_STOPS}")
    return SamplingParams(
        **values,
        grammar=asked_grammar(request),
        top_k=0 if request.top_k == -1 else request.top_k,  # -1 is vLLM's "off"
        logit_bias=_logit_bias(request.logit_bias),
        seed=_seed(request.seed),
        max_tokens=max_tokens,
        logprobs=logprobs,
    )


async def spec_of(request: Sampling, service: Service, tenant: str) -> SpecParams:
    """Whether and how to speculate. A prediction is a hint: where no drafter follows one, it changes nothing."""
    engine = service.engine
    asked = request.speculative
    if asked.segments and not request.stream:
        raise bad_field("speculative.segments", "speculative.segments needs stream to be true")
    method = None
    if asked.method is not None:
        method = next((name for name in engine.proposers if name == _drafter_name(asked.method)), None)
        if method is None:
            known = ", ".join(engine.proposers)
            raise bad_field("speculative.method", f"speculative.method is {asked.method!r}; loaded here are {known}")
    used = [method] if method is not None else list(engine.proposers)
    predicted: tuple[int, ...] = ()
    if request.prediction is not None and any(engine.proposers[name].needs.prediction for name in used):
        predicted = await service.predicted(text_of(request.prediction.content))
    try:
        return SpecParams(
            enabled=asked.enabled,
            drafter=method,
            max_draft=asked.max_draft,
            prediction=predicted,
            tenant=tenant,
            repeatable=request.seed is not None,
        )
    except SettingError as error:
        raise bad_field(f"speculative.{error.setting}", f"speculative.{error}") from None


def chat_logprobs(request: ChatRequest) -> int | None:
    """How many log-probabilities a token; None for none at all."""
    top = request.top_logprobs
    if top is None:
        return 0 if request.logprobs else None
    if not request.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true")
    if not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise bad_field("top_logprobs", f"top_logprobs is {top}; allowed is a number from 0 to {_MAX_TOP_LOGPROBS}")
    return top


def longest_answer(wanted: int | None, param: str, usual: int | None, prompt: int, context: int) -> int:
    """Tokens that the answer may have. ``usual`` is the default, None for what the context leaves.

    Raises ApiError if prompt and answer do not fit into ``context`` tokens.
    """
    if wanted is not None and wanted < 1:
        raise bad_field(param, f"{param} is {wanted}; allowed is a whole number >= 1")
    room = context - prompt
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and {wanted} of the answer ({param})" if wanted is not None else ""
        raise ApiError(
            400,
            f"the context has {context} tokens, but the request asks for {prompt + (wanted or 1)} or more: {prompt} of "
            f"the prompt{asked}",
            param=param if room >= 1 else None,
            code="context_length_exceeded",
        )
    return min(wanted or usual or room, room)


def text_of(content: str | list[TextPart] | None) -> str:
    """The text of a message or a prediction."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _drafter_name(method: str) -> str | None:
    """A drafter's own name; other engines call some of them differently."""
    try:
        return kind_of(method)[0]
    except SettingError:
        return None


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise bad_field("logit_bias", "logit_bias has a key that is no number; allowed are token ids") from None


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed 64-bit numbers, the engine's have 63 bits."""
    if seed is None:
        return None
    if not -(2**63) <= seed < 2**63:
        raise bad_field("seed", f"seed is {seed}; allowed is a whole number of 64 bits")
    return seed % 2**63
