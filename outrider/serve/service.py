"""What all endpoints share: the engine's loop, the model, and names, ids and prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.models.chat_template import ChatTemplate
from outrider.models.load import LoadedModel
from outrider.models.tokenizer import Tokenizer
from outrider.serve.errors import ApiError, bad_field
from outrider.serve.journal import Journal
from outrider.serve.loop import EngineLoop
from outrider.serve.settings import ServerSettings
from outrider.serve.trace import Tracer

T = TypeVar("T")

_SHORT = 4096
"""Characters that are encoded at once; more of them go to a thread, so that others' streams flow on."""

_THREADS = 2
"""For what may take seconds: long texts and grammars wait for one another, and nothing else waits for them."""


@dataclass(frozen=True)
class Service:
    """One model behind the API."""

    loop: EngineLoop
    settings: ServerSettings
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    _apart: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "outrider-apart"))

    @staticmethod
    def of(engine: Engine, settings: ServerSettings) -> Service:
        name = settings.served_model_name or engine.target.name
        journal = Journal(name, settings.log_requests, Tracer.find())
        loop = EngineLoop(engine, settings.max_queue, settings.request_timeout, journal.note, settings.stream_interval)
        return Service(loop, settings, name)

    @property
    def engine(self) -> Engine:
        """For what never changes; whatever else is asked through ``loop.call``."""
        return self.loop.engine

    @property
    def target(self) -> LoadedModel:
        return self.engine.target

    @property
    def tokenizer(self) -> Tokenizer:
        if self.target.tokenizer is None:
            raise ApiError(400, f"the model {self.name} has no tokenizer; send token ids", code="no_tokenizer")
        return self.target.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        if self.target.chat_template is None:
            said = f"the model {self.name} has no chat template; use /v1/completions"
            raise ApiError(400, said, code="no_chat_template")
        return self.target.chat_template

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return min(self.engine.limits.max_model_len, self.engine.limits.pool_tokens)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError (404) for another model than the one that is served."""
        if model is not None and model != self.name:
            said = f"the model '{model[:200]}' does not exist; served here is '{self.name}'"
            raise ApiError(404, said, param="model", code="model_not_found")

    @cached_property
    def longest_text(self) -> int:
        """Bytes that the context can hold, if every token is the longest there is."""
        return self.context * self.tokenizer.longest_token

    def check_size(self, texts: Iterable[str], param: str) -> None:
        """Raises ApiError for texts of one prompt that together are too long, whatever their tokens may be."""
        texts = list(texts)
        if sum(map(len, texts)) <= _SHORT:
            return
        size = sum(len(text.encode(errors="replace")) for text in texts)
        if size > self.longest_text:
            raise ApiError(
                400,
                f"{param} has {size} bytes, but the context of {self.context} tokens holds {self.longest_text} at most",
                param=param,
                code="context_length_exceeded",
            )

    async def encode(
        self, texts: Sequence[str], add_bos: bool | None = None, param: str = "prompt", specials: bool = True
    ) -> list[list[int]]:
        """Token ids of each text; control tokens in it are read as such, if ``specials``."""
        tokenizer = self.tokenizer

        def work() -> list[list[int]]:
            return [tokenizer.encode(text, specials=specials, add_bos=add_bos) for text in texts]

        try:
            return work() if sum(map(len, texts)) <= _SHORT else await self.apart(work)
        except SettingError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_value") from None

    def close(self) -> None:
        """Nothing more is begun apart."""
        self._apart.shutdown(wait=False, cancel_futures=True)

    async def apart(self, work: Callable[[], T]) -> T:
        """The result of what may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._apart, work)

    async def predicted(self, text: str) -> tuple[int, ...]:
        """A predicted answer's token ids, as far as an answer may go. Control tokens in it are text."""
        (whole,) = await self.encode([text[: self.longest_text]], False, "prediction", specials=False)
        return tuple(whole[: self.context])

    async def prepare(self, params: SamplingParams) -> None:
        """Compiles a request's grammar, which may take long, where it holds nobody up."""
        grammar = params.grammar
        if grammar is None:
            return
        try:
            await self.apart(lambda: self.target.grammars.compile(grammar))
        except SettingError as error:
            raise bad_field(grammar.where, str(error)) from None

    async def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, opens_answer: bool
    ) -> str:
        """A conversation as the model reads it."""
        template = self.chat_template
        try:
            return await asyncio.to_thread(
                template.render, messages, add_generation_prompt=opens_answer, tools=tools or None
            )
        except SettingError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from None
