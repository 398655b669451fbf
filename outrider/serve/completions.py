"""``/v1/completions``: prompts in, their continuations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from outrider.engine.request import Delta, RequestOutput
from outrider.serve.caller import Caller
from outrider.serve.errors import bad_field
from outrider.serve.logprobs import CompletionLogprobs
from outrider.serve.params import longest_answer, sampling_of, spec_of
from outrider.serve.reply import Choice, Reply, finish_name
from outrider.serve.schemas import CompletionRequest
from outrider.serve.service import Service

USUAL_TOKENS = 16
"""OpenAI's default of ``max_tokens`` here."""


async def complete(service: Service, request: CompletionRequest, caller: Caller) -> Response:
    """Answers one request. Raises ApiError or SettingError before anything is sent."""
    _check(request)
    prompts = await _prompts(service, request)
    longest = max(
        longest_answer(request.max_tokens, "max_tokens", USUAL_TOKENS, len(prompt), service.context)
        for prompt in prompts
    )
    params = sampling_of(request, longest, request.logprobs)
    spec = await spec_of(request, service, caller.tenant)
    await service.prepare(params)
    stream = await service.loop.submit(prompts, params, spec, live=request.stream, caller=caller)
    reply = Reply(service, request, caller.id("cmpl"), "text_completion", sum(map(len, prompts)))
    writer = _Writer(service, request, _echoes(service, request, prompts))
    if request.stream:
        return reply.stream(stream, writer)
    return await reply.whole(stream, writer)


def _check(request: CompletionRequest) -> None:
    if request.best_of not in (None, request.n):
        raise bad_field("best_of", f"best_of is {request.best_of}; it is not supported beyond n ({request.n})")
    if request.echo and request.logprobs is not None:
        raise bad_field("echo", "echo with logprobs is not supported: log-probabilities of a prompt are not computed")


async def _prompts(service: Service, request: CompletionRequest) -> list[list[int]]:
    """The token ids of every prompt."""
    given: Any = request.prompt
    many: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not many:
        raise bad_field("prompt", "prompt is an empty list; allowed is at least one prompt")
    answers = len(many) * request.n
    if answers > service.loop.capacity:
        param = "n" if len(many) == 1 else "prompt"
        said = f"{param} asks for {answers} answers; allowed are {service.loop.capacity} at once"
        raise bad_field(param, said)
    add_bos = None if request.add_special_tokens else False
    if isinstance(many[0], str):
        for i, prompt in enumerate(many):
            service.check_size([prompt], "prompt" if len(many) == 1 else f"prompt[{i}]")
        prompts = await service.encode(many, add_bos)
    else:
        prompts = many
    highest = service.engine.limits.vocab_size - 1
    for i, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if not prompt:
            raise bad_field(where, f"{where} is empty; allowed is at least one token")
        if not 0 <= min(prompt) <= max(prompt) <= highest:
            raise bad_field(where, f"{where} holds a token id that is not allowed; allowed is 0 to {highest}")
    return prompts


def _echoes(service: Service, request: CompletionRequest, prompts: Sequence[list[int]]) -> list[str]:
    """What stands before each prompt's answers."""
    if not request.echo:
        return [""] * len(prompts)
    given: Any = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if isinstance(given[0], str):
        return list(given)
    return [service.tokenizer.decode(prompt, skip_special_tokens=request.skip_special_tokens) for prompt in prompts]


class _Writer:
    """Choices in this endpoint's form."""

    def __init__(self, service: Service, request: CompletionRequest, echoes: Sequence[str]) -> None:
        self._top, self._skip = request.logprobs, request.skip_special_tokens
        self._tokenizer = service.tokenizer if self._top is not None else None
        self._echo = {i: echoes[i // request.n] for i in range(len(echoes) * request.n)}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def choices(self, outputs: Sequence[RequestOutput]) -> list[Choice]:
        completions = [completion for output in outputs for completion in output.completions]
        return [
            self._choice(i, self._echo[i] + c.text, finish_name(c.finish_reason), c.logprobs)
            for i, c in enumerate(completions)
        ]

    def pieces(self, delta: Delta) -> list[Choice]:
        text = self._echo.pop(delta.index, "") + delta.text
        reason = finish_name(delta.finish_reason)
        if not text and reason is None and not delta.logprobs:
            return []
        return [self._choice(delta.index, text, reason, delta.logprobs)]

    def is_text(self, delta: Delta) -> bool:
        return delta.finish_reason is None and self._top is None and delta.index not in self._echo

    def blank(self, index: int) -> Choice:
        return self._choice(index, "", None, None)

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> Choice:
        shown = None
        if self._tokenizer is not None and self._top is not None:
            if index not in self._logprobs:
                self._logprobs[index] = CompletionLogprobs(self._tokenizer, self._skip)
            shown = self._logprobs[index].entries(logprobs or (), self._top)
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}
