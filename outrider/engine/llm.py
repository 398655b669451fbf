"""The offline API: ``LLM(model, drafter=...)`` with ``generate``, ``chat`` and streaming."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import OutriderError, SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.settings import from_mapping
from outrider.engine.engine import Engine
from outrider.engine.request import Delta, Request, RequestOutput
from outrider.models.load import LoadedModel, load_model
from outrider.spec.proposer import DraftContext
from outrider.spec.registry import build_proposer, kind_of, spec_from_mapping

logger = logging.getLogger("outrider")

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Drafter = str | Mapping[str, Any] | SpecConfig


class LLM:
    """A target model with a drafter, for use from Python. Not thread-safe.

    ``drafter`` is a drafter's name, a mapping with the keys of ``--speculative-config``, or a ``SpecConfig``; further
    settings are the fields of ``EngineConfig``::

        llm = LLM("smollm2", drafter={"num_speculative_tokens": 5})
        print(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0))[0].text)

    Raises SettingError for a setting that is not allowed, ModelFileError for a model that cannot be loaded.
    """

    def __init__(self, model: str = "smollm2", drafter: Drafter = SpecConfig.method, **settings: Any) -> None:
        config = from_mapping(EngineConfig, {"model": model, **settings}, "LLM")
        spec = spec_of(drafter)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        target = load_model(model, dtype=config.dtype, device=config.device, quantization=config.quantization)
        self.engine = build_engine(target, config, spec)
        for line in self.engine.memory.lines():
            logger.info(line)

    @property
    def target(self) -> LoadedModel:
        """The target model, its tokenizer and chat template."""
        return self.engine.target

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecParams | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt (a text, or token ids), all at once; results are in the order of the prompts.

        ``params`` is one for all, or one a prompt. Raises SettingError if a request is not valid, before any work.
        """
        many = _as_list(prompts)
        return self._run([self.encode(prompt) for prompt in many], params, spec)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecParams | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of ``{"role": ..., "content": ...}``), or several at once."""
        first = next(iter(conversations), None)
        many: Any = [conversations] if first is None or isinstance(first, Mapping) else conversations
        return self._run([self.encode_chat(messages) for messages in many], params, spec)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecParams | None = None
    ) -> Iterator[Delta]:
        """Continues one prompt and yields what each step adds; closing the iterator aborts the request."""
        return self.watch(self.engine.add_request(self.encode(prompt), params, spec))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, spec: SpecParams | None = None
    ) -> Iterator[Delta]:
        """Answers one conversation and yields what each step adds; closing the iterator aborts the request."""
        return self.watch(self.engine.add_request(self.encode_chat(messages), params, spec))

    def watch(self, request: Request) -> Iterator[Delta]:
        """Runs a request that was added to the engine; ``RequestOutput.of`` gives its result afterwards."""
        try:
            while request.finished is None or request.pending:
                if not request.pending:
                    self.engine.step()
                while request.pending:  # several streams may step the same engine
                    yield request.pending.popleft()
            _raise_failure(RequestOutput.of(request))
        finally:
            self.engine.abort(request.id)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; control tokens in the text are parsed."""
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise SettingError("this model has no tokenizer; give the prompt as token ids")
        return tokenizer.encode(prompt)

    def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        template, tokenizer = self.target.chat_template, self.target.tokenizer
        if template is None or tokenizer is None:
            raise SettingError(f"the model {self.target.name} has no chat template; use generate instead of chat")
        return tokenizer.encode(template.render(messages), add_bos=False)

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        spec: SpecParams | None,
    ) -> list[RequestOutput]:
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise SettingError(
                f"params has {len(each)} entries; allowed is one for all, or one a prompt ({len(prompts)})"
            )
        requests: list[Request] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                requests.append(self.engine.add_request(prompt, own, spec))
            while any(request.finished is None for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request.id)
        outputs = [RequestOutput.of(request) for request in requests]
        for output in outputs:
            _raise_failure(output)
        return outputs


def spec_of(drafter: Drafter) -> SpecConfig:
    """Speculation settings from what ``LLM`` accepts."""
    if isinstance(drafter, SpecConfig):
        return spec_from_mapping(
            {
                "method": drafter.method,
                "num_speculative_tokens": drafter.num_speculative_tokens,
                "rejection_sample_method": drafter.rejection_sample_method,
                **drafter.options,
            }
        )
    return spec_from_mapping({"method": drafter} if isinstance(drafter, str) else drafter)


def build_engine(target: LoadedModel, config: EngineConfig, spec: SpecConfig) -> Engine:
    """An engine with the drafter that ``spec`` names."""
    name, _ = kind_of(spec.method)
    return Engine(target, config, {name: build_proposer(spec, DraftContext(target, spec))}, spec)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (a text, or token ids) as a list of one."""
    if isinstance(prompts, str) or all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # told apart by the test above
    return prompts  # type: ignore[return-value]


def _raise_failure(output: RequestOutput) -> None:
    error = next((c.error for c in output.completions if c.error), None)
    if error is not None:
        raise OutriderError(f"the request ended with an error: {error}")
