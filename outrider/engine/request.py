"""A request inside the engine, what it hands out on the way, and what it gives at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import FinishReason, Sequence
from outrider.engine.answer import Answer, Segment, SpecStats
from outrider.models.load import LoadedModel
from outrider.sampling.logprobs import TokenLogprob
from outrider.sampling.sampler import check_token_ids


@dataclass(frozen=True)
class Limits:
    """What an engine can serve, in tokens."""

    max_model_len: int
    pool_tokens: int
    vocab_size: int  # ids that can be drawn, padding excluded


@dataclass(eq=False)
class Request:
    """One prompt with its n answers; times are ``time.perf_counter()`` seconds. ``drafter`` is empty until it has one.

    ``pending`` is a mailbox: every delta of the request is put there too, for a caller that does not step the engine
    itself, or not alone.
    """

    id: int
    prompt_ids: tuple[int, ...]
    drafter: str
    answers: list[Answer]
    arrived: float
    pending: deque[Delta] = field(default_factory=deque)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    drafter_failed: bool = False  # so that it is not asked any more

    @property
    def sequences(self) -> list[Sequence]:
        return [answer.seq for answer in self.answers]


@dataclass(slots=True)  # not frozen: that takes several times as long to make, and each step makes one a sequence
class Delta:
    """What one step added to one answer: all of it final."""

    request_id: int
    index: int
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join([segment.text for segment in self.segments])


@dataclass(frozen=True)
class Completion:
    """One finished answer; ``token_ids``, ``logprobs`` and ``drafted`` have one entry a token."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    drafted: tuple[bool, ...]
    stats: SpecStats
    error: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. ``prefill_s`` runs from its first rows to the first token, ``decode_s`` from there on."""

    request_id: int
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    drafter: str
    cached_tokens: int
    prefill_s: float
    decode_s: float
    stats: SpecStats = field(default_factory=SpecStats)

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.completions[0].token_ids

    @property
    def usage(self) -> dict[str, int]:
        completion = sum(len(c.token_ids) for c in self.completions)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt_ids) + completion,
        }

    @staticmethod
    def of(request: Request) -> RequestOutput:
        """The result of a request whose answers have all ended."""
        completions = []
        for index, answer in enumerate(request.answers):
            assert answer.finish is not None, "the request is still running"
            logprobs = None if answer.seq.params.logprobs is None else tuple(answer.logprobs)
            completions.append(
                Completion(
                    index,
                    answer.text,
                    tuple(answer.seq.output_ids),
                    answer.finish,
                    logprobs,
                    tuple(answer.drafted),
                    answer.stats,
                    answer.error,
                )
            )
        finished = request.finished or request.arrived
        first = request.first_token or finished
        return RequestOutput(
            request.id,
            request.prompt_ids,
            tuple(completions),
            request.drafter,
            request.answers[0].seq.n_cached,
            first - (request.started or first),
            finished - first,
            SpecStats.total(c.stats for c in completions),
        )


def check_request(prompt_ids: Seq[int], params: SamplingParams, limits: Limits) -> None:
    """Raises SettingError if the engine can never serve this request as asked."""
    n = len(prompt_ids)
    if n == 0:
        raise SettingError("the prompt is empty; it must hold at least one token")
    if n >= limits.max_model_len:
        raise SettingError(
            f"the prompt has {n} tokens; allowed is at most {limits.max_model_len - 1}, one less than the context "
            f"(max_model_len {limits.max_model_len})"
        )
    if n >= limits.pool_tokens:
        raise SettingError(
            f"the prompt has {n} tokens; the KV cache holds {limits.pool_tokens} (raise num_kv_blocks or kv_cache_mib)"
        )
    for token in prompt_ids:
        if not 0 <= token < limits.vocab_size:
            raise SettingError(f"the prompt holds token id {token}; allowed is 0 to {limits.vocab_size - 1}")
    most = min(limits.max_model_len, limits.pool_tokens) - n
    if params.min_tokens > most:
        raise SettingError(
            f"min_tokens is {params.min_tokens}; after a prompt of {n} tokens the context and the KV cache leave room "
            f"for {most}",
            "min_tokens",
        )
    check_token_ids(params, limits.vocab_size)


def with_prediction(spec: SpecParams, target: LoadedModel) -> SpecParams:
    """The same settings with the predicted answer as token ids. Raises SettingError if the model lacks one of them."""
    tokens = spec.prediction
    if isinstance(tokens, str):
        if tokens and target.tokenizer is None:
            raise SettingError("prediction is a text, but this model was loaded without a tokenizer; give token ids")
        # Control tokens cannot be predicted: the answer would have ended.
        tokens = tuple(target.tokenizer.encode(tokens, specials=False, add_bos=False)) if target.tokenizer else ()
    for token in tokens:
        if token >= target.n_tokens:
            raise SettingError(f"prediction holds token id {token}; allowed is 0 to {target.n_tokens - 1}")
    return replace(spec, prediction=tokens)
