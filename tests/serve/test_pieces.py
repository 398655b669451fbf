"""A piece of text goes between two ready halves: the same bytes as if all of it were made anew."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider import LLM
from outrider.core.types import FinishReason
from outrider.engine.answer import Segment
from outrider.engine.request import Delta
from outrider.serve import chat, completions
from outrider.serve.caller import Caller
from outrider.serve.reply import Reply, Writer
from outrider.serve.schemas import ChatRequest, CompletionRequest
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings
from outrider.serve.stream import Stream
from tests.serve.serving import run, serving

TEXTS = ["a", 'say ""', "", "\\\n\u2028é", "\ud83d", "0"]
NAME = 'it\'s "quoted"" ""'
"""A name that holds what the halves are told apart by."""


def piece(index: int, text: str, finish: FinishReason | None = None) -> Delta:
    return Delta(0, index, (1, 2), (Segment(text, False),) if text else (), None, finish)


def sent(llm: LLM, kind: str, **fields: Any) -> tuple[list[Any], list[Any]]:
    """The choices that a stream of ``TEXTS`` in two answers sends, and those that the writer makes of it; heads too."""
    service = Service.of(llm.engine, ServerSettings(served_model_name=NAME))
    if kind == "chat":
        asked: Any = ChatRequest(messages=[], stream=True, n=2, **fields)
        make: Any = lambda: chat._Writer(service, False, False)  # noqa: E731
    else:
        asked = CompletionRequest(prompt="x", stream=True, n=2, **fields)
        make = lambda: completions._Writer(service, asked, ["x"])  # noqa: E731
    deltas = [piece(i, text) for text in TEXTS for i in range(2)] + [piece(1, "", FinishReason.STOP)]
    writer: Writer = make()
    want = [choice for delta in deltas for choice in writer.pieces(delta)]
    reply = Reply(service, asked, "id", kind, 3)

    async def got() -> list[Any]:
        stream = Stream(2, 2, True, lambda _: None, Caller())
        frames: AsyncIterator[bytes] = reply._frames(stream, make())
        text = b""
        for delta in deltas:
            stream.put([delta], False)
            if delta.text or delta.finish_reason is not None:
                text += await anext(frames)
        return [json.loads(line[6:]) for line in text.decode().split("\n\n") if line]

    chunks = run(got())
    head = {k: v for k, v in reply._head([]).items() if k != "choices"}
    assert all({k: chunk[k] for k in head} == head for chunk in chunks)
    return chunks, want


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_text_in_ready_halves_is_what_the_writer_makes(llm: LLM, kind: str) -> None:
    chunks, want = sent(llm, kind)
    assert [choice for chunk in chunks for choice in chunk["choices"]] == json.loads(
        json.dumps(want, ensure_ascii=False).encode(errors="replace")
    )
    assert {len(chunk["choices"]) for chunk in chunks} == {1}
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_so_far_is_in_every_piece(llm: LLM) -> None:
    chunks, _ = sent(llm, "text", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert counts[-1] == 4 * len(TEXTS) + 2
    none, _ = sent(llm, "text", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in none)


def test_pieces_that_go_straight_have_the_headers_of_the_others(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine, cors_origin=("http://a.example",)) as (client, _):
            headers = {"origin": "http://a.example", "x-request-id": "mine"}
            body = {"prompt": "x", "max_tokens": 3, "stream": True}
            reply = await client.post("/v1/completions", json=body, headers=headers)
            assert reply.headers["x-request-id"] == "mine"
            assert reply.headers["access-control-allow-origin"] == "http://a.example"
            assert reply.text.endswith("data: [DONE]\n\n")

    run(work())
