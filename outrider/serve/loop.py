"""The engine on a thread of its own, and the way to it from the event loop.

Two queues and no lock: callables go to the engine's thread, which runs them between two steps, and what a step gave
goes back by ``call_soon_threadsafe``, one call a step at most. Only the engine's thread touches the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.engine import Engine
from outrider.engine.request import Delta, Request
from outrider.serve.caller import Caller
from outrider.serve.errors import ApiError, bad_field, unavailable
from outrider.serve.stream import Stream

logger = logging.getLogger("outrider")

T = TypeVar("T")
_RETRIES = 1  # steps that fail in a row before the requests at hand are given up
_GIVEN_UP = 3  # times in a row that this may happen, with no good step between; then the engine stops
_STOP_SECONDS = 10.0
_DRAIN_TICK = 0.02


class EngineLoop:
    """Runs an engine for any number of readers. Its methods belong to the event loop that ``start`` was called on."""

    def __init__(
        self,
        engine: Engine,
        max_queue: int,
        timeout: float | None = None,
        on_end: Callable[[Stream], None] | None = None,
        interval: float = 0.0,
    ) -> None:
        """At most ``max_queue`` answers wait beside those that run; ``timeout`` (seconds) ends a request; ``on_end`` is
        shown each stream whose requests have all ended, however they did; a stream has news every ``interval`` seconds
        at most, as telling them takes processor time from the next step."""
        self.engine = engine
        self.capacity = engine.config.max_num_seqs + max_queue
        self.timeout = timeout
        self._interval = interval
        self._on_end = on_end
        self.failure: BaseException | None = None
        self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Any]] = set()  # not answered yet
        self._streams: dict[Stream, asyncio.TimerHandle | None] = {}  # not ended yet, with their time limits
        self._answers = 0  # of those streams
        self._watched: dict[Stream, None] = {}  # the engine thread's own list of them
        self._quiet_until = -math.inf  # until then no stream has news, unless one ends or has its first
        self._failures = 0  # steps in a row
        self._given_up = 0  # times in a row

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        return self.alive and not self.draining

    @property
    def answers(self) -> int:
        """Answers that run or wait."""
        return self._answers

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    async def drain(self, grace: float) -> None:
        """Takes nothing new, gives what runs ``grace`` seconds, then ends it with what there is."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + grace
        while self._streams and self.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_DRAIN_TICK)
        for stream in list(self._streams):
            self._commands.put(lambda stream=stream: self._abort(stream))  # type: ignore[misc]

    async def stop(self) -> None:
        """Ends the thread, after the step it is in."""
        self.draining = True
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)
        self._end(unavailable("the server is shutting down"))

    async def call(self, work: Callable[[Engine], T]) -> T:
        """What ``work`` returns, run between two steps of the engine. Raises what it raises."""
        if not self.alive or self._loop is None:
            raise self._gone()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)

        def run() -> None:
            try:
                result = work(self.engine)
            except Exception as error:
                self._post(_settle, future, None, error)
            else:
                self._post(_settle, future, result, None)

        self._commands.put(run)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        spec: SpecParams,
        live: bool = True,
        caller: Caller | None = None,
    ) -> Stream:
        """Queues all prompts or none. Raises ApiError (full, shutting down, engine dead) or SettingError.

        The stream must be closed when its reader is done.
        """
        answers = len(prompts) * params.n
        if answers > self.capacity:
            raise bad_field("n", f"the request asks for {answers} answers; allowed are {self.capacity} at once")
        if self.draining:
            raise unavailable("the server is shutting down")
        if self._answers + answers > self.capacity:
            raise ApiError(
                429,
                f"the queue is full: {self._answers} answers run or wait, and {self.capacity} are allowed; try again",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        stream = Stream(answers, params.n, live, self._close, caller or Caller())
        self._hold(stream)
        try:
            await self.call(lambda engine: self._add(stream, prompts, params, spec))
        except BaseException:
            stream.close()
            raise
        return stream

    # -- the event loop's side

    def _hold(self, stream: Stream) -> None:
        assert self._loop is not None, "the loop was not started"
        handle = None if self.timeout is None else self._loop.call_later(self.timeout, self._expire, stream)
        self._streams[stream] = handle
        self._answers += stream.answers

    def _release(self, stream: Stream) -> None:
        if stream in self._streams:
            handle = self._streams.pop(stream)
            if handle is not None:
                handle.cancel()
            self._answers -= stream.answers

    def _close(self, stream: Stream) -> None:
        if stream in self._streams:
            self._release(stream)
            self._commands.put(lambda: self._abort(stream))

    def _expire(self, stream: Stream) -> None:
        stream.fail(ApiError(504, f"the request took longer than {self.timeout:g} s", code="timeout"))
        self._close(stream)

    def _deliver(self, news: list[tuple[Stream, list[Delta], bool]]) -> None:
        over: list[Stream] = []
        for stream, deltas, ended in news:
            stream.put(deltas, ended)
            if ended:
                self._release(stream)
                over.append(stream)
        if self._on_end is not None:
            for stream in over:
                self._on_end(stream)

    def _end(self, error: ApiError) -> None:
        """Fails whatever still waits for the engine's thread."""
        for stream in list(self._streams):
            stream.fail(error)
            self._release(stream)
        for future in list(self._calls):
            _settle(future, None, error)

    def _die(self) -> None:
        self._end(self._gone())

    def _gone(self) -> ApiError:
        why = f": {type(self.failure).__name__}" if self.failure is not None else ""
        return unavailable(f"the engine has stopped{why}; the server must be restarted")

    # -- the engine's thread

    def _post(self, work: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work, *args)

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self.engine.has_work:
                    prompts_wait = self.engine.prompts_wait
                    if self._interval and prompts_wait:  # a long step: nothing is held back over it
                        self._hand_out(0.0)
                    self._step()
                    if prompts_wait:  # the first token of an answer goes out at once
                        self._quiet_until = -math.inf
                self._hand_out(self._interval)
            self._hand_out(0.0)
        except BaseException as error:
            logger.critical("the engine has stopped", exc_info=True)
            self.failure = error
            if self._loop is not None and not self._loop.is_closed():
                self._post(self._die)

    def _run_commands(self) -> bool:
        """All that have come, waiting for one if there is nothing else to do; False when asked to stop."""
        while not self._commands.empty() or not (self.engine.has_work or self._watched):
            command = self._commands.get()
            if command is None:
                return False
            command()
            self._quiet_until = -math.inf  # it may have added a stream, or ended one
        return True

    def _step(self) -> None:
        """One step. One that fails is tried again (the engine computes all running KV anew); then its requests fail."""
        try:
            deltas = self.engine.step()
            self._failures = self._given_up = 0
            if not self.engine.has_work or any(delta.finish_reason is not None for delta in deltas):
                self._quiet_until = -math.inf
        except Exception as error:
            self._quiet_until = -math.inf  # who knows what has ended
            self._failures += 1
            logger.error("a step of the engine failed", exc_info=True)
            if self._failures > _RETRIES:
                self._failures = 0
                self._given_up += 1
                if self._given_up > _GIVEN_UP:
                    raise
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        failure = ApiError(500, f"the engine failed on this request: {type(error).__name__}", code="engine_failed")
        for stream in list(self._watched):
            self._post(stream.fail, failure)
            self._abort(stream)

    def _hand_out(self, interval: float) -> None:
        news, now = [], time.perf_counter()
        if interval and now < self._quiet_until:
            return
        for stream in list(self._watched):
            deltas, ended = stream.collect(now, interval)
            if ended:
                del self._watched[stream]
            if deltas or ended:
                news.append((stream, deltas, ended))
        given = [stream.collected for stream in self._watched if stream.collected > -math.inf]
        self._quiet_until = min(given, default=-math.inf) + interval
        if news:
            self._post(self._deliver, news)

    def _add(self, stream: Stream, prompts: Sequence[Sequence[int]], params: SamplingParams, spec: SpecParams) -> None:
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.engine.add_request(prompt, params, spec))
        except Exception:
            for request in requests:
                self.engine.abort(request.id)
            raise
        stream.requests = requests
        self._watched[stream] = None

    def _abort(self, stream: Stream) -> None:
        for request in stream.requests:
            self.engine.abort(request.id)


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():  # its caller has gone
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
