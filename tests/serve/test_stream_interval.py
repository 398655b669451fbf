"""A stream has news at most so often, and nothing is lost or late by that."""

from __future__ import annotations

from outrider import LLM
from tests.serve.serving import run, until
from tests.serve.test_loop import LONG, PLAIN, SHORT, started


def test_what_comes_within_the_interval_goes_together(llm: LLM) -> None:
    async def work() -> None:
        loop = await started(llm.engine, interval=1e6)
        stream = await loop.submit([[5, 6, 7]], SHORT, PLAIN)
        pieces = [len(delta.token_ids) async for delta in stream.deltas()]
        assert pieces == [1, 4]  # the first at once, the rest with the end
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
