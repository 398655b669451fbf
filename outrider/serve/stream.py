"""A request as the event loop sees it: what the engine has given so far, at the reader's own pace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from outrider.core.types import FinishReason
from outrider.engine.request import Delta, Request, RequestOutput
from outrider.serve.caller import Caller
from outrider.serve.errors import ApiError, bad_field


class Stream:
    """Prompts that were sent together, each with its answers; answer k of prompt i is choice ``i * n + k``.

    The engine's thread fills ``requests`` once and calls ``collect``; everything else belongs to the event loop. A slow
    reader costs nothing: what comes while it is busy is one delta a choice when it looks again. With ``live`` False
    nothing comes before the end, for those who want the whole answer only.
    """

    def __init__(self, answers: int, n: int, live: bool, on_close: Callable[[Stream], None], caller: Caller) -> None:
        self.answers, self.live, self.caller = answers, live, caller
        self.requests: list[Request] = []
        self.ended = False
        self.closed = False
        self._n = n
        self._on_close = on_close
        self._error: ApiError | None = None
        self._inbox: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None  # set while it waits
        self.collected = -math.inf  # when there was something new, if it is live; the engine thread's clock

    def collect(self, now: float, interval: float) -> tuple[list[Delta], bool]:
        """On the engine's thread: what is new, and whether all has ended.

        Nothing is new for ``interval`` seconds after something was: that stays where it is, unless all has ended.
        """
        ended = None not in [request.finished for request in self.requests]
        if not ended and now - self.collected < interval:
            return [], False
        deltas: list[Delta] = []
        for place, request in enumerate(self.requests):
            if self.live and not place:
                deltas += request.pending
            elif self.live:
                deltas += [replace(delta, index=place * self._n + delta.index) for delta in request.pending]
            request.pending.clear()
        if deltas or not self.live:
            self.collected = now
        return deltas, ended

    def put(self, deltas: Iterable[Delta], ended: bool) -> None:
        self._inbox += deltas
        self.ended = self.ended or ended
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends the stream with an error, for whoever reads it now or later."""
        if not self.ended:
            self._error, self.ended = error, True
            self._wake()

    def close(self) -> None:
        """The reader is done: a request that still runs is aborted. Doing it twice is harmless."""
        if not self.closed:
            self.closed = True
            self._on_close(self)

    async def news(self) -> list[Delta]:
        """What each choice gained since the last look, as soon as one did; nothing once all have ended.

        Raises ApiError.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self.ended:
                return []
            await self._change()
        deltas, self._inbox = merged(self._inbox), []
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise self._failure()
        return deltas

    async def deltas(self) -> AsyncIterator[Delta]:
        """The same one by one, until all have ended. Raises ApiError."""
        while deltas := await self.news():
            for delta in deltas:
                yield delta

    async def outputs(self) -> list[RequestOutput]:
        """The finished requests, in the order of their prompts. Raises ApiError."""
        while not self.ended:
            await self._change()
        if self._error is not None:
            raise self._error
        outputs = self.results()
        if any(c.finish_reason is FinishReason.ERROR for output in outputs for c in output.completions):
            raise self._failure()
        return outputs

    def results(self) -> list[RequestOutput]:
        """The same, once all have ended."""
        return [RequestOutput.of(request) for request in self.requests]

    async def _change(self) -> None:
        """Waits for ``put`` or ``fail``; of the one reader there is."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _failure(self) -> ApiError:
        failed = next((a for request in self.requests for a in request.answers if a.error), None)
        said = f"the request ended with an error: {failed.error if failed else 'unknown'}"
        if failed is not None and failed.fault is not None:
            return bad_field(failed.fault, said)
        return ApiError(500, said, code="request_failed")


def merged(deltas: list[Delta]) -> list[Delta]:
    """One delta a choice, in the order in which the choices first come."""
    if len(deltas) == 1:
        return deltas
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_joined(parts) for parts in by_index.values()]


def _joined(parts: list[Delta]) -> Delta:
    last = parts[-1]
    logprobs = last.logprobs
    if logprobs is not None:
        logprobs = tuple([entry for part in parts for entry in part.logprobs or ()])
    tokens = tuple([token for part in parts for token in part.token_ids])
    segments = tuple([segment for part in parts for segment in part.segments])
    return Delta(last.request_id, last.index, tokens, segments, logprobs, last.finish_reason)
