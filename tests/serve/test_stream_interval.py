"""A stream has news at most so often, and nothing is lost or late by that."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.core.types import FinishReason
from outrider.engine.request import Delta
from outrider.serve.loop import EngineLoop
from outrider.serve.stream import Stream
from tests.serve.serving import make_llm, run, until
from tests.serve.test_loop import LONG, PLAIN, SHORT, started


def handed_out(loop: EngineLoop) -> dict[Stream, list[int]]:
    """Tokens of each piece of news, as the engine's thread gave it, however late its reader looks."""
    given: dict[Stream, list[int]] = defaultdict(list)
    deliver = loop._deliver

    def noted(news: list[tuple[Stream, list[Delta], bool]]) -> None:
        for stream, deltas, _ in news:
            given[stream].append(sum(len(delta.token_ids) for delta in deltas))
        deliver(news)

    loop._deliver = noted  # type: ignore[method-assign]
    return given


def test_what_comes_within_the_interval_goes_together(llm: LLM) -> None:
    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        given = handed_out(loop)
        stream = await loop.submit([[5, 6, 7]], SHORT, PLAIN)
        assert sum([len(delta.token_ids) async for delta in stream.deltas()]) == 5
        assert given[stream] == [1, 4]  # the first at once, the rest with the end
        stream.close()
        await loop.stop()

    run(work())


def test_nothing_is_held_back_over_the_step_of_a_prompt(llm: LLM) -> None:
    """A prompt that comes meanwhile may take long: what the others have gained is told before."""

    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        first = await loop.submit([[5, 6, 7]], LONG, PLAIN)
        given = first.deltas()
        got = len((await given.__anext__()).token_ids)
        await until(lambda: len(first.requests[0].pending) > 2)
        second = await loop.submit([[8, 9]], SHORT, PLAIN)
        got += len((await given.__anext__()).token_ids)
        assert 3 < got < 900
        first.close()
        second.close()
        await loop.stop()

    run(work())


def test_who_waits_for_a_seat_lets_the_others_news_go_together(folder: str) -> None:
    engine = make_llm(folder, max_num_seqs=1).engine

    async def work() -> None:
        loop = await started(engine, interval=1e6)
        given = handed_out(loop)
        first, second = await asyncio.gather(*(loop.submit([[5, 6, 7 + i]], SHORT, PLAIN) for i in range(2)))
        for stream in (first, second):
            assert sum([len(delta.token_ids) async for delta in stream.deltas()]) == 5
            assert given[stream] == [1, 4]
            stream.close()
        await loop.stop()

    run(work())


def test_what_is_held_back_goes_out_when_the_loop_is_stopped(llm: LLM) -> None:
    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        stream = await loop.submit([[5, 6, 7]], LONG, PLAIN)
        await until(lambda: bool(stream.requests) and len(stream.requests[0].pending) > 2)
        loop._commands.put(None)
        await until(lambda: not loop.alive)
        await asyncio.sleep(0)
        assert sum(len(delta.token_ids) for delta in stream._inbox) > 2
        stream.close()
        await loop.stop()
        llm.engine.abort(stream.requests[0].id)

    run(work())


def test_an_answer_that_is_aborted_within_a_step_ends_its_stream_at_once(llm: LLM) -> None:
    ids: list[int] = []

    def spoil(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(output) == 3:
            llm.engine.abort(ids[0])
        return logits

    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        await loop.call(lambda engine: ids.append(engine._next_request))
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True, processors=(spoil,))
        stream = await loop.submit([[5, 6, 7]], params, PLAIN)
        deltas = [delta async for delta in stream.deltas()]
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        stream.close()
        await loop.stop()

    run(work())


def test_nobody_looks_at_streams_that_can_have_no_news(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after every step: also while one waits for a seat."""
    looks: list[Stream] = []
    collect = Stream.collect
    monkeypatch.setattr(Stream, "collect", lambda self, *args: looks.append(self) or collect(self, *args))
    engine = make_llm(folder, max_num_seqs=1).engine

    async def work() -> None:
        loop = await started(engine, interval=1e6)
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        first, second = [await loop.submit([[5, 6, 7 + i]], params, PLAIN) for i in range(2)]
        for stream in (first, second):
            assert sum([len(delta.token_ids) async for delta in stream.deltas()]) == 200
            stream.close()
        assert engine.metrics.steps >= 400
        assert len(looks) < 40
        await loop.stop()

    run(work())


def test_who_wants_the_whole_answer_is_told_of_its_end_at_once(llm: LLM) -> None:
    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        other = await loop.submit([[8, 9]], LONG, PLAIN)
        stream = await loop.submit([[5, 6, 7]], SHORT, PLAIN, live=False)
        (output,) = await stream.outputs()
        assert len(output.token_ids) == 5
        assert not other.ended
        for each in (stream, other):
            each.close()
        await loop.stop()

    run(work())
