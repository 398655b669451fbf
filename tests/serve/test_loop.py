"""The engine on its thread: nothing hangs, leaks or goes to the wrong reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from outrider.core.params import SpecParams
from outrider.core.types import FinishReason
from outrider.engine.engine import Engine
from outrider.models.tokenizer import Tokenizer
from outrider.serve.loop import EngineLoop
from outrider.serve.run import bind, serve, url_of
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings
from outrider.serve.web import EventStream
from tests.serve.serving import make_llm, run, serving, until
from tests.serve.test_completions import frames

LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PLAIN = SpecParams()


async def started(
    engine: Engine, max_queue: int = 64, timeout: float | None = None, interval: float = 0.0
) -> EngineLoop:
    loop = EngineLoop(engine, max_queue, timeout, interval=interval)
    loop.start()
    return loop


def test_closing_a_stream_frees_its_blocks_within_a_step(llm: LLM) -> None:
    engine = llm.engine

    async def work() -> None:
        loop = await started(engine)
        stream = await loop.submit([[5, 6, 7]], LONG, PLAIN)
        async for _ in stream.deltas():
            break
        steps = engine.metrics.steps
        stream.close()
        stream.close()
        free, after = await loop.call(lambda e: (e.blocks.n_free, e.metrics.steps))  # behind the abort in the queue
        assert free == engine.blocks.n_blocks
        assert after - steps <= 2
        assert loop.answers == 0
        await loop.stop()

    run(work())


def test_a_slow_reader_holds_nothing_up(llm: LLM) -> None:
    """While one reader sleeps the engine runs on; what came meanwhile is one delta."""
    want = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]

    async def work() -> None:
        loop = await started(llm.engine)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        slow = await loop.submit([[5, 6, 7]], params, PLAIN)
        fast = await loop.submit([[5, 6, 7]], params, PLAIN)
        outputs = await fast.outputs()
        assert outputs[0].token_ids == want.token_ids
        await until(lambda: slow.ended)
        deltas = [delta async for delta in slow.deltas()]
        assert len(deltas) == 1
        assert deltas[0].token_ids == want.token_ids
        assert deltas[0].text == want.text
        assert deltas[0].finish_reason is FinishReason.LENGTH
        await loop.stop()

    run(work())


def test_a_client_that_does_not_read_holds_nothing_up(llm: LLM) -> None:
    """Its connection takes no more bytes: others get their answers, and when it goes its request ends."""

    async def work() -> None:
        async with serving(llm.engine) as (client, service):
            stuck, gone = asyncio.Event(), asyncio.Event()

            async def receive() -> dict[str, Any]:
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if message.get("body"):
                    stuck.set()
                    await asyncio.Event().wait()

            stream = await service.loop.submit([[5]], LONG, PLAIN)

            async def texts() -> AsyncIterator[bytes]:
                async for delta in stream.deltas():
                    yield delta.text.encode()

            response = EventStream(stream, texts())
            unread = asyncio.ensure_future(response({}, receive, send))
            await stuck.wait()
            reply = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
            assert reply.status_code == 200
            assert service.loop.answers == 1
            gone.set()
            await unread
            assert not await service.loop.call(lambda engine: engine.has_work)

    run(work())


def test_a_full_queue_is_429(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine, max_queue=2) as (client, service):
            held = [await service.loop.submit([[5]], LONG, PLAIN) for _ in range(10)]
            reply = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["type"] == "rate_limit_error"
            held.pop().close()
            reply = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "n": 2})
            assert reply.status_code == 429  # two do not fit where one does
            for stream in held:
                stream.close()
            reply = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200

    run(work())


def test_several_prompts_are_queued_all_or_none(llm: LLM) -> None:
    async def work() -> None:
        loop = await started(llm.engine)
        with pytest.raises(ValueError, match="token id"):
            await loop.submit([[5], [6], [10**6]], LONG, PLAIN)
        assert not await loop.call(lambda engine: engine.has_work)
        assert loop.answers == 0
        await loop.stop()

    run(work())


def test_a_submit_that_is_cancelled_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def work() -> None:
        loop = await started(llm.engine)
        blocked = asyncio.ensure_future(loop.call(lambda engine: gate.wait(10)))
        submit = asyncio.ensure_future(loop.submit([[5]], LONG, PLAIN))
        await asyncio.sleep(0.05)
        submit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submit
        gate.set()
        await blocked
        assert not await loop.call(lambda engine: engine.has_work)
        await loop.stop()

    run(work())


def test_a_request_that_takes_too_long_is_ended(llm: LLM) -> None:
    async def work() -> Any:
        async with serving(llm.engine, request_timeout=0.05) as (client, service):
            body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
            whole = await client.post("/v1/completions", json=body)
            streamed = await client.post("/v1/completions", json={**body, "stream": True})
            await until(lambda: not service.loop.answers)
            return whole, streamed

    whole, streamed = run(work())
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "timeout"
    assert streamed.status_code == 200
    *_, error, done, end = streamed.text.split("\n\n")
    assert '"code":"timeout"' in error
    assert (done, end) == ("data: [DONE]", "")


def test_a_drain_finishes_what_runs(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, service):
            stream = await service.loop.submit([[5]], SHORT, PLAIN)
            draining = asyncio.ensure_future(service.loop.drain(grace=20))
            await asyncio.sleep(0)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            output = (await stream.outputs())[0]
            assert output.completions[0].finish_reason is FinishReason.LENGTH
            await draining

    run(work())


def test_after_the_grace_period_what_there_is_is_returned(llm: LLM) -> None:
    async def work() -> Any:
        async with serving(llm.engine) as (client, service):
            body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": stream}))
                for stream in (False, True)
            ]
            await until(lambda: service.engine.metrics.generated_tokens > before + 20)
            await service.loop.drain(grace=0.01)
            return [await each for each in asked]

    before = llm.engine.metrics.generated_tokens
    whole, streamed = run(work())
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["text"]
    assert 0 < whole.json()["usage"]["completion_tokens"] < 900
    assert '"finish_reason":"abort"' in streamed.text


def failing(llm: LLM, monkeypatch: pytest.MonkeyPatch, failures: list[bool]) -> None:
    """The engine's next steps fail where ``failures`` says so."""
    step = llm.engine.step

    def faulty() -> Any:
        if failures and failures.pop(0):
            raise RuntimeError("a secret")
        return step()

    monkeypatch.setattr(llm.engine, "step", faulty)


def test_one_failed_step_costs_nobody_anything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = llm.generate([[5]], SHORT)[0].text
    failing(llm, monkeypatch, [False, True, False, True])

    async def work() -> str:
        loop = await started(llm.engine)
        outputs = await (await loop.submit([[5]], SHORT, PLAIN)).outputs()
        await loop.stop()
        return outputs[0].text

    assert run(work()) == want


def test_a_request_that_breaks_the_engine_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(llm, monkeypatch, [False, True, True, True])  # the last one is the next request's, and costs nothing

    async def work() -> list[Any]:
        async with serving(llm.engine) as (client, _):
            body = {"prompt": "x", "max_tokens": 5}
            return [
                await client.post("/v1/completions", json=body),
                await client.post("/v1/completions", json=body),
                await client.get("/health"),
            ]

    broken, fine, health = run(work())
    assert broken.status_code == 500
    assert "secret" not in broken.text
    assert broken.json()["error"]["code"] == "engine_failed"
    assert (fine.status_code, health.status_code) == (200, 200)


def test_what_nobody_foresaw_is_an_answer_like_any_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its id, and readable for a page that may call."""

    def fails(_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("outrider.serve.status.models", fails)

    async def work() -> Any:
        async with serving(llm.engine, cors_origin=("https://page.example",)) as (client, _):
            return await client.get("/v1/models", headers={"Origin": "https://page.example", "X-Request-Id": "mine"})

    reply = run(work())
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"
    assert reply.headers["x-request-id"] == "mine"
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize("length", [1, 5000])
def test_nothing_is_tokenised_on_the_engines_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Neither prompt nor prediction, short or long: everybody waits for that thread."""
    seen: dict[str, list[str]] = {}
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **how: Any) -> list[int]:
        seen.setdefault(text, []).append(threading.current_thread().name)
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    guess = "y" * length

    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            body = {"prompt": "x", "max_tokens": 3, "prediction": {"type": "content", "content": guess}}
            return await client.post("/v1/completions", json=body)

    assert run(work()).status_code == 200
    assert set(seen) == {"x", guess}
    names = [name for each in seen.values() for name in each]
    assert "outrider-engine" not in names
    assert (threading.current_thread().name in seen[guess]) is (length == 1), "a long one holds up the event loop"


@pytest.mark.parametrize("error", [RuntimeError("again and again"), SystemExit("killed")])
def test_a_dead_engine_fails_everything_at_once(
    folder: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    engine = make_llm(folder, num_kv_blocks=80).engine
    step = engine.step
    dead = threading.Event()

    def faulty() -> Any:
        if dead.is_set():
            raise error
        return step()

    monkeypatch.setattr(engine, "step", faulty)

    async def work() -> None:
        async with serving(engine) as (client, service):
            body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json={**body, "stream": stream}))
                for stream in (False, True, False)
            ]
            await until(lambda: engine.metrics.generated_tokens > 5)
            dead.set()
            whole, streamed, _ = [await each for each in asked]
            assert whole.status_code in (500, 503)
            assert '"error":' in streamed.text
            while service.loop.alive:
                again = await client.post("/v1/completions", json=body)
                assert again.status_code in (500, 503)
            for path in ("/health", "/ready", "/v1/speculation"):
                assert (await client.get(path)).status_code == 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503

    run(work())


def test_answers_of_fifty_at_once_are_each_ones_own(llm: LLM) -> None:
    prompts = [f"{i} {'the pass ' * (i % 5)}{i * 7}" for i in range(50)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=8 + i % 9, ignore_eos=True) for i in range(50)]
    wants = [
        llm.generate(prompt, own, SpecParams(repeatable=True))[0].text
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert len(set(wants)) > 40

    async def work() -> list[str]:
        async with serving(llm.engine) as (client, _):

            async def one(i: int) -> str:
                p = params[i]
                body = {"prompt": prompts[i], "temperature": p.temperature, "seed": i, "max_tokens": p.max_tokens}
                body |= {"ignore_eos": True, "stream": i % 3 == 0}
                reply = await client.post("/v1/completions", json=body)
                if not body["stream"]:
                    return str(reply.json()["choices"][0]["text"])
                return "".join(chunk["choices"][0]["text"] for chunk in frames(reply.text))

            return await asyncio.gather(*map(one, range(50)))

    assert run(work()) == wants


def test_a_dead_engine_ends_the_server(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open is answered; then whoever watches over the process sees that it failed."""
    engine = make_llm(folder, num_kv_blocks=80).engine

    def dies() -> Any:
        raise SystemExit("killed")

    monkeypatch.setattr(engine, "step", dies)
    replies: list[int] = []
    asked: list[threading.Thread] = []
    settings = ServerSettings(port=0, grace=5)
    with bind(settings) as bound:

        def ask() -> None:
            replies.append(httpx.post(f"{url_of(bound)}/v1/completions", json={"prompt": "x"}).status_code)

        asked.append(threading.Thread(target=ask))
        assert serve(Service.of(engine, settings), bound, on_start=asked[0].start) is False
    asked[0].join(60)
    assert replies == [503]
