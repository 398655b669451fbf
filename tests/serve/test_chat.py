"""/v1/chat/completions against the offline API, and tokenize and detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpecParams
from outrider.models.detokenizer import Detokenizer
from tests.serve.serving import run, serving
from tests.serve.test_completions import frames

PATH = "/v1/chat/completions"
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "the pass the pass"}]


def post(llm: LLM, body: dict[str, Any], path: str = PATH) -> Any:
    async def work() -> Any:
        async with serving(llm.engine) as (client, _):
            return await client.post(path, json=body)

    return run(work())


def test_an_answer_is_the_offline_one(llm: LLM) -> None:
    want = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=20))[0]
    body = post(llm, {"model": "tiny", "messages": TALK, "temperature": 0, "max_completion_tokens": 20}).json()
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": want.text, "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert {key: body["usage"][key] for key in want.usage} == want.usage


def test_without_a_limit_the_context_is_the_limit(llm: LLM) -> None:
    talk = [{"role": "user", "content": "1" * 900}]
    body = post(llm, {"messages": talk, "temperature": 0, "ignore_eos": True}).json()
    assert body["usage"]["total_tokens"] == 1024
    assert body["choices"][0]["finish_reason"] == "length"


def test_streamed_choices_put_together(llm: LLM) -> None:
    params = SamplingParams(seed=4, n=3, max_tokens=25, logprobs=2, ignore_eos=True)
    want = llm.chat(TALK, params, SpecParams(repeatable=True))[0]
    asked = {"messages": TALK, "seed": 4, "n": 3, "max_tokens": 25, "logprobs": True, "top_logprobs": 2}
    body = {**asked, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = frames(post(llm, body).text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 75
    for completion in want.completions:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == completion.index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        assert "".join(c["delta"].get("content", "") for c in own) == completion.text
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert completion.logprobs is not None
        assert [entry["logprob"] for entry in entries] == [entry.logprob for entry in completion.logprobs]
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 25
        said = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert said.decode(errors="replace") == completion.text


def test_no_chunk_splits_a_character(llm: LLM) -> None:
    """Every token is a byte of a character of four bytes, or almost."""
    text = "😀" * 6
    ids = llm.encode(text)
    assert len(ids) == 24
    bias = {str(token): 100 for token in set(ids)}
    asked = {"messages": TALK, "max_tokens": 40, "seed": 1, "logit_bias": bias, "stream": True}
    contents = [c["choices"][0]["delta"].get("content", "") for c in frames(post(llm, asked).text)]
    whole = post(llm, {**asked, "stream": False}).json()["choices"][0]["message"]["content"]
    assert "".join(contents) == whole
    assert not any("\ud800" <= char <= "\udfff" for content in contents for char in content)


@pytest.fixture
def calling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model that calls two tools: its first tokens are read as another text."""
    calls = '{"name": "f", "arguments": {"x": "é"}}', '{"name": "g", "arguments": {}}'
    text = "Well: " + "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
    pieces = [text[i : i + 5] for i in range(0, len(text), 5)]

    class Scripted(Detokenizer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._rest = iter(pieces)

        def push(self, token_id: int) -> str:
            return next(self._rest, "")

        def flush(self) -> str:
            return ""

    monkeypatch.setattr("outrider.engine.engine.Detokenizer", Scripted)
    return llm


def test_tool_calls_streamed_and_whole(calling: LLM) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    stop = calling.engine.limits.vocab_size - 1
    body = {"messages": TALK, "tools": tools, "temperature": 0, "ignore_eos": True, "max_tokens": 100}
    # The scripted text ends before 40 tokens; then a stop token is forced.
    body |= {"stop_token_ids": [stop], "min_tokens": 40, "logit_bias": {str(stop): 100}}
    choice = post(calling, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well:"
    called = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
    assert called == [("f", '{"x": "é"}'), ("g", "{}")]
    assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2

    chunks = [c["choices"][0] for c in frames(post(calling, {**body, "stream": True}).text)]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == "Well:"
    streamed = [c for chunk in chunks for c in chunk["delta"].get("tool_calls", [])]
    assert [c["index"] for c in streamed] == [0, 1]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in streamed] == called
    assert chunks[-1]["finish_reason"] == "tool_calls"

    single = post(calling, {**body, "parallel_tool_calls": False, "min_tokens": 0, "logit_bias": {}}).json()["choices"][
        0
    ]
    (call,) = single["message"]["tool_calls"]
    assert (call["function"]["name"], single["finish_reason"]) == ("f", "tool_calls")

    said = post(calling, {**body, "tool_choice": "none"}).json()["choices"][0]
    assert said["message"]["content"].startswith("Well: <tool_call>")
    assert said["finish_reason"] == "stop"


def test_tokenize_and_detokenize(llm: LLM) -> None:
    text = "Outrider, 你好"
    plain = post(llm, {"prompt": text, "return_token_strs": True}, "/tokenize").json()
    assert plain["tokens"] == llm.encode(text)
    assert plain["count"] == len(plain["tokens"]) == len(plain["token_strs"])
    assert plain["max_model_len"] == 1024
    assert post(llm, {"tokens": plain["tokens"]}, "/detokenize").json() == {"prompt": text}
    talk = post(llm, {"messages": TALK}, "/tokenize").json()
    assert talk["tokens"] == llm.encode_chat(TALK)
    assert post(llm, {"prompt": "x", "messages": TALK}, "/tokenize").status_code == 400
    assert post(llm, {"tokens": [10**9]}, "/detokenize").json()["error"]["param"] == "tokens"
    assert post(llm, {"tokens": [-1]}, "/detokenize").status_code == 400
