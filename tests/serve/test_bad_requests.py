"""What is wrong with a request is said, with its field; nothing reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from outrider import LLM
from outrider.models.tokenizer import Tokenizer
from outrider.serve.schemas import CompletionRequest
from tests.serve.serving import run, serving

COMPLETION: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["x", ""]}, "prompt[1]"),
    ({"prompt": [1, "x"]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [[1], [10**30]]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[0]"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["x"] * 1000}, "prompt"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"stream_options": []}, "stream_options"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-4": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 101}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"suffix": "end"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"temprature": 1}, "temprature"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "other", "content": "x"}}, "prediction.type"),
    ({"speculative": {"method": "no-such-drafter"}}, "speculative.method"),
    ({"speculative": {"method": "model"}}, "speculative.method"),
    ({"speculative": {"max_draft": -1}}, "speculative.max_draft"),
    ({"speculative": {"enabled": "no"}}, "speculative.enabled"),
    ({"speculative": {"gamma": 3}}, "speculative.gamma"),
]
HELLO = [{"role": "user", "content": "hi"}]
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]},
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name"),
    ({"tools": {}}, "tools"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"echo": True}, "echo"),
]


def test_every_bad_field_is_named(llm: LLM) -> None:
    async def work() -> list[tuple[dict[str, Any], str | None, Any]]:
        seen = []
        async with serving(llm.engine, max_queue=100) as (client, _):
            for path, usual, cases in (
                ("/v1/completions", {"prompt": "x"}, COMPLETION),
                ("/v1/chat/completions", {"messages": HELLO}, CHAT),
            ):
                for change, param in cases:
                    for stream in (False, True):
                        body = json.dumps({"stream": stream, **usual, **change})
                        seen.append((change, param, await client.post(path, content=body)))
        return seen

    for change, param, reply in run(work()):
        assert reply.status_code == 400, (change, reply.text)
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, (change, error)
        assert error["type"] == "invalid_request_error"
        assert (param or "").split(".")[0].split("[")[0] in error["message"], error
        assert len(error["message"]) < 600


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "x", "seed": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"} trailing',
    ],
)
def test_what_is_no_json_object(llm: LLM, body: bytes) -> None:
    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            return await client.post("/v1/completions", content=body)

    reply = run(work())
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_a_body_that_is_too_large(llm: LLM) -> None:
    async def parts() -> Any:
        for _ in range(40):
            yield b" " * 100

    async def work() -> list[Any]:
        async with serving(llm.engine, max_body_mib=0.001) as (client, _):
            return [
                await client.post("/v1/completions", content=b" " * 2000),
                await client.post("/v1/completions", content=parts()),  # its length is not announced
            ]

    for reply in run(work()):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "too_large"


def test_what_is_harmless_is_taken(llm: LLM) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "temperature": None,
        "suffix": None,
        "logprobs": None,
        "best_of": 1,
        "top_k": -1,
        "seed": -1,
        "response_format": {"type": "text"},
    }

    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            return await client.post("/v1/completions", json=body)

    assert run(work()).status_code == 200


def test_a_prompt_longer_than_the_context(llm: LLM) -> None:
    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            return await client.post("/v1/completions", json={"prompt": [5] * 1100})

    error = run(work()).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]
    assert "1101" in error["message"]


def test_a_text_that_no_tokens_could_make_fit_is_not_tokenised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    read: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **how: Any) -> list[int]:
        read.append(len(text))
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    most = 1024 * tokenizer.longest_token

    async def work() -> list[Any]:
        async with serving(llm.engine) as (client, _):
            replies = []
            for text in ("é" * (most // 2), "é" * (most // 2) + "aa"):
                for path, body in (
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/completions", {"prompt": ["x", text]}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ):
                    replies.append(await client.post(path, json=body))
                replies.append(await client.post("/tokenize", json={"prompt": text}))
            replies.append(await client.post("/detokenize", json={"tokens": [5] * 1024}))
            replies.append(await client.post("/detokenize", json={"tokens": [5] * 1025}))
            return replies

    *replies, fits, too_many = run(work())
    assert (fits.status_code, too_many.status_code) == (200, 400)
    assert too_many.json()["error"]["param"] == "tokens"
    assert replies.pop(3).json()["count"] > 1024, "whoever asks for the count gets it"
    for i, reply in enumerate(replies):
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "1024" in error["message"]
        assert (f"{most} at most" in error["message"]) is (i >= 2), "a chat has some more around it"
    assert set(read) == {1, most // 2}
    assert replies[4].json()["error"]["param"] == "prompt[1]"


def test_another_model_is_not_found(llm: LLM) -> None:
    async def work() -> list[Any]:
        async with serving(llm.engine, served_model_name="mine") as (client, _):
            return [
                await client.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"}),
                await client.get("/v1/models/gpt-9"),
                await client.get("/v1/models/mine"),
                await client.get("/v1/models"),
                await client.get("/v1/nothing"),
                await client.get("/v1/completions"),
                await client.options("/v1/completions"),
                await client.head("/health"),
            ]

    wrong, unknown, known, listed, nothing, get, options, head = run(work())
    for reply in (wrong, unknown):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"
    assert known.json()["id"] == listed.json()["data"][0]["id"] == "mine"
    assert (nothing.status_code, get.status_code) == (404, 405)
    assert "error" in nothing.json()
    assert (options.status_code, head.status_code) == (204, 200)


@pytest.mark.parametrize("prompt", [[1.5] * 1000, [[1.5]] * 1000, [{}] * 1000])
def test_one_wrong_entry_is_enough(prompt: list[Any]) -> None:
    """A complaint about each of a million would take gigabytes, while nobody else is served."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": prompt})
    assert caught.value.error_count() < 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [7], "banned_token_ids": [7]}, "allowed_token_ids"),
        ({}, "banned_token_ids"),  # all there are
        ({"logit_bias": {"5": 1.7e308}, "repetition_penalty": 0.1}, "logit_bias"),
        ({"repetition_penalty": 1e-310}, "repetition_penalty"),
    ],
)
def test_rules_that_leave_nothing_to_draw_are_the_clients_fault(
    llm: LLM, fields: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out only as the answer is made."""
    if param == "banned_token_ids":
        fields = {param: list(range(llm.engine.target.n_tokens))}

    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            return await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2, **fields})

    reply = run(work())
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
