"""LangChain's ChatOpenAI, as it comes, against a server on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.serve.serving import PATIENCE, real_server

pytest.importorskip("langchain_openai")

TALK = [("system", "Be kind."), ("user", "the pass the pass the")]
SENT = [{"role": role, "content": content} for role, content in TALK]
SCHEMA = {
    "title": "Count",
    "description": "A number.",
    "type": "object",
    "properties": {"n": {"enum": [1, 22]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture
def url(llm: LLM) -> Iterator[str]:
    with real_server(llm.engine) as (served, _):
        yield f"{served}/v1"


def chat(url: str, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    given = {"temperature": 0, "max_tokens": 16, "timeout": PATIENCE, "max_retries": 0, **fields}
    return ChatOpenAI(base_url=url, api_key="none", model="tiny", **given)


def test_invoke_stream_and_batch(llm: LLM, url: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    want, other = (llm.chat(talk, params)[0] for talk in (SENT, SENT[1:]))
    model = chat(url)
    whole = model.invoke(TALK)
    assert whole.content == want.text
    assert whole.usage_metadata["output_tokens"] == len(want.token_ids)
    assert whole.response_metadata["finish_reason"] == ("length" if len(want.token_ids) == 16 else "stop")
    chunks = list(model.stream(TALK))
    assert "".join(chunk.content for chunk in chunks) == want.text
    assert [message.content for message in model.batch([TALK, TALK[1:]])] == [want.text, other.text]


def test_structured_output_and_tool_calls(url: str) -> None:
    pytest.importorskip("llguidance")
    from langchain_core.messages import AIMessage, ToolMessage

    model = chat(url, max_tokens=200)
    assert model.with_structured_output(SCHEMA, method="json_schema").invoke(TALK)["n"] in (1, 22)
    assert model.with_structured_output(SCHEMA, method="function_calling").invoke(TALK)["n"] in (1, 22)
    tool = {"name": "count", "description": "Counts.", "parameters": {k: v for k, v in SCHEMA.items() if k != "title"}}
    (call,) = model.bind_tools([tool], tool_choice="count").invoke(TALK).tool_calls
    assert call["name"] == "count"
    assert call["args"]["n"] in (1, 22)
    streamed = None
    for chunk in model.bind_tools([tool], tool_choice="count").stream(TALK):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("count", call["args"])]
    answered = [*TALK, AIMessage("", tool_calls=[call]), ToolMessage("7", tool_call_id=call["id"])]
    assert model.invoke(answered).usage_metadata["output_tokens"] > 0


def test_embeddings_are_not_offered(url: str) -> None:
    import openai
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(base_url=url, api_key="none", model="tiny", check_embedding_ctx_length=False)
    with pytest.raises(openai.NotFoundError):
        embeddings.embed_query("x")
