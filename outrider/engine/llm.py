"""The offline API: ``LLM(model, drafter=...)`` with ``generate``, ``chat`` and streaming."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from outrider.core.config import MAX_AUTO_DRAFT, EngineConfig, SpecConfig
from outrider.core.errors import OutriderError, SettingError, nearest
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.settings import from_mapping
from outrider.engine.engine import Engine
from outrider.engine.request import Delta, Request, RequestOutput
from outrider.models.load import LoadedModel, Progress, load_model
from outrider.spec.auto import AutoLength
from outrider.spec.costs import Costs
from outrider.spec.proposer import DraftContext
from outrider.spec.registry import build_proposer, kind_of, spec_from_mapping, spec_keys
from outrider.spec.warmup import cost_table

logger = logging.getLogger("outrider")

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Drafter = str | Mapping[str, Any] | SpecConfig


class LLM:
    """A target model with a drafter, for use from Python. Not thread-safe.

    ``drafter`` is a drafter's name, a mapping with the keys of ``--speculative-config``, or a ``SpecConfig``; or a list
    of these, one of which each request picks by ``SpecParams(drafter=...)`` (see ``build_engine``). Further settings
    are the fields of ``EngineConfig``::

        llm = LLM("smollm2", drafter={"num_speculative_tokens": 5})
        print(llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0))[0].text)

    Raises SettingError for a setting that is not allowed, ModelFileError for a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str = "smollm2",
        drafter: Drafter | Sequence[Drafter] = SpecConfig.method,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """``speculative_config`` is another name for a mapping given as ``drafter``; ``progress`` hears of loading."""
        for key in settings:
            if key in spec_keys():
                raise SettingError(f"{key} is a setting of speculation: give it in drafter={{'{key}': ...}}")
        known = [f.name for f in fields(EngineConfig)]
        for key in (key for key in settings if key not in known):
            hint = nearest(key, (*known, "drafter"))
            raise SettingError(f"LLM has no setting '{key}'{hint}; known are drafter, {', '.join(known)}")
        config = from_mapping(EngineConfig, {"model": model, **settings}, "LLM")
        specs = _specs_of(drafter if speculative_config is None else speculative_config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        target = load_model(
            model,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            ops=config.ops,
            threads=config.threads,
            progress=progress,
        )
        self.engine = build_engine(target, config, *specs, progress=progress)
        for line in self.engine.memory.lines():
            logger.info(line)

    @property
    def target(self) -> LoadedModel:
        """The target model, its tokenizer and chat template."""
        return self.engine.target

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        spec: SpecParams | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt (a text, or token ids), all at once; results are in the order of the prompts.

        ``sampling_params`` is one for all, or one a prompt. Raises SettingError if a request is not valid, before any
        work.
        """
        return self._run([self.encode(prompt) for prompt in _as_list(prompts)], sampling_params, spec)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        spec: SpecParams | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of ``{"role": ..., "content": ...}``), or several at once."""
        first = next(iter(messages), None)
        many: Any = [messages] if first is None or isinstance(first, Mapping) else messages
        return self._run([self.encode_chat(conversation) for conversation in many], sampling_params, spec)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, spec: SpecParams | None = None
    ) -> DeltaStream:
        """Continues one prompt and yields what each step adds; closing or dropping the stream aborts the request."""
        return self.watch(self.engine.add_request(self.encode(prompt), sampling_params, spec))

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, spec: SpecParams | None = None
    ) -> DeltaStream:
        """Answers one conversation and yields what each step adds; otherwise like ``stream``."""
        return self.watch(self.engine.add_request(self.encode_chat(messages), sampling_params, spec))

    def watch(self, request: Request) -> DeltaStream:
        """Runs a request that was added to the engine; ``RequestOutput.of`` gives its result afterwards."""
        return DeltaStream(self.engine, request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; control tokens in the text are parsed."""
        if not isinstance(prompt, str):
            return _token_ids(prompt)
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
        self, prompts: Sequence[list[int]], sampling_params: Params, spec: SpecParams | None
    ) -> list[RequestOutput]:
        one = sampling_params is None or isinstance(sampling_params, SamplingParams)
        each: list[Any] = [sampling_params] * len(prompts) if one else list(sampling_params)  # type: ignore[arg-type]
        if not all(own is None or isinstance(own, SamplingParams) for own in each):
            raise SettingError(f"sampling_params is {sampling_params!r}; allowed is a SamplingParams, or one a prompt")
        if len(each) != len(prompts):
            raise SettingError(
                f"sampling_params has {len(each)} entries; allowed is one for all, or one a prompt ({len(prompts)})"
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


class DeltaStream(Iterator[Delta]):
    """The deltas of one request. Several streams may share an engine: whoever is asked steps it for all."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request

    def __next__(self) -> Delta:
        while not self.request.pending:
            if self.request.finished is not None:
                _raise_failure(RequestOutput.of(self.request))
                raise StopIteration
            try:
                self._engine.step()
            except BaseException:
                self.close()
                raise
        return self.request.pending.popleft()

    def close(self) -> None:
        """Aborts the request if it still runs."""
        self._engine.abort(self.request.id)

    def __del__(self) -> None:
        self.close()


def spec_of(drafter: Drafter) -> SpecConfig:
    """Speculation settings from what ``LLM`` accepts."""
    if not isinstance(drafter, (str, Mapping, SpecConfig)):
        raise SettingError(f"drafter is {drafter!r}; allowed is a drafter's name, a mapping or a SpecConfig")
    if isinstance(drafter, SpecConfig):
        values = {f.name: getattr(drafter, f.name) for f in fields(SpecConfig) if f.name != "options"}
        if drafter.speculation == "auto" and drafter.num_speculative_tokens == SpecConfig.num_speculative_tokens:
            del values["num_speculative_tokens"]  # it was left at its default, which is meant for a fixed length
        return spec_from_mapping({**values, **drafter.options})
    return spec_from_mapping({"method": drafter} if isinstance(drafter, str) else drafter)


def _specs_of(drafter: Drafter | Sequence[Drafter]) -> list[SpecConfig]:
    """The same for one drafter or a list of them, which all verify by the same rule."""
    one = isinstance(drafter, (str, Mapping, SpecConfig)) or not isinstance(drafter, Sequence)
    many: Any = [drafter] if one else drafter
    specs = [spec_of(each) for each in many]
    if not specs:
        raise SettingError("drafter is an empty list; allowed is one drafter at least")
    names = [spec.method for spec in specs]
    if len(set(names)) < len(names):
        raise SettingError(f"drafter names {', '.join(names)}; allowed is each drafter once")
    if len({spec.rejection_sample_method for spec in specs}) > 1:
        raise SettingError("the drafters differ in rejection_sample_method; allowed is one rule for all of them")
    if len({spec.speculation.partition(":")[0] for spec in specs}) > 1:
        raise SettingError("the drafters differ in speculation; allowed is one way for all of them")
    return specs


def build_engine(
    target: LoadedModel, config: EngineConfig, *specs: SpecConfig, progress: Progress | None = None
) -> Engine:
    """An engine with the drafters that ``specs`` name; the first one serves requests that name none.

    With several, the longest ``num_speculative_tokens`` holds for all; ``SpecParams.max_draft`` shortens it. With
    ``speculation`` auto the controller picks the drafter of a request that names none.
    """
    contexts = [(spec, DraftContext(target, spec, config.kv_cache_dtype, progress)) for spec in specs]
    proposers = {kind_of(spec.method)[0]: build_proposer(spec, context) for spec, context in contexts}
    longest = max(spec.num_speculative_tokens for spec in specs)
    speculation = specs[0].speculation.partition(":")[0]
    engine = Engine(
        target, config, proposers, replace(specs[0], num_speculative_tokens=longest, speculation=speculation)
    )
    if speculation == "auto":
        engine.controller = auto_controller(engine, longest, progress)
    return engine


def auto_controller(engine: Engine, longest: int = MAX_AUTO_DRAFT, progress: Progress | None = None) -> AutoLength:
    """A controller for this engine that drafts as much as pays; costs are measured unless they are known.

    Measuring writes into the KV pool: it is for an engine that has no requests yet.
    """
    table = cost_table(engine.target, engine.runner, engine.memory.tokens, progress)
    return AutoLength(Costs(table), longest)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (a text, or token ids) as a list of one."""
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise SettingError(f"the prompt is {prompts!r}; allowed is a text, token ids, or a list of either")
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = list(prompts)
    return [many] if many and not any(isinstance(item, Iterable) for item in many) else many


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as Python's own whole numbers, whatever library's they were."""
    if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise SettingError(f"the prompt is {prompt!r}; allowed is a text or token ids")
    if any(isinstance(token, bool) or not isinstance(token, numbers.Integral) for token in prompt):
        raise SettingError(f"the prompt is {prompt!r}; allowed is a text or token ids (whole numbers)")
    return [int(token) for token in prompt]


def _raise_failure(output: RequestOutput) -> None:
    error = next((c.error for c in output.completions if c.error), None)
    if error is not None:
        raise OutriderError(f"the request ended with an error: {error}")
