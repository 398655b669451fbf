"""/v1/completions against the offline API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider import LLM, SamplingParams, SpecParams
from tests.serve.serving import run, serving

PATH = "/v1/completions"
REPEATABLE = SpecParams(repeatable=True)
"""What a seed makes of a request."""
PROMPT = "the pass the pass the pass the"  # after which the model repeats itself, a little


def post(llm: LLM, body: dict[str, Any], **settings: Any) -> Any:
    async def work() -> Any:
        async with serving(llm.engine, **settings) as (client, _):
            return await client.post(PATH, json=body)

    return run(work())


def frames(text: str) -> list[Any]:
    """The JSON of every event; the stream must end as it should."""
    events = text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event[6:]) for event in events]


def test_a_completion_is_the_offline_one(llm: LLM) -> None:
    want = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0]
    reply = post(llm, {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24})
    assert reply.status_code == 200
    body = reply.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"] == f"cmpl-{reply.headers['x-request-id']}"
    assert body["choices"] == [{"index": 0, "text": want.text, "logprobs": None, "finish_reason": "length"}]
    used = body["usage"]
    assert {key: used[key] for key in want.usage} == want.usage
    counted = used["completion_tokens_details"]
    assert counted["accepted_prediction_tokens"] == want.stats.accepted > 0
    assert sum(counted.values()) == want.stats.drafted
    assert "metrics" not in body


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_put_together_is_the_offline_answer(llm: LLM, seed: int) -> None:
    """Sampled from random weights: characters of several bytes, and bytes that are none."""
    params = {"temperature": 1.0, "seed": seed, "max_tokens": 60, "logit_bias": {"2": -100}}
    want = llm.generate(PROMPT, SamplingParams(**{**params, "logit_bias": {2: -100}}), REPEATABLE)[0]
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **params}
    reply = post(llm, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = frames(reply.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 60
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


def test_a_seed_repeats_the_answer_whatever_is_drafted(llm: LLM) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 6, "max_tokens": 60, "n": 2, "ignore_eos": True}
    ways: list[dict[str, Any]] = [{"enabled": False}, {"max_draft": 1}, {}, {"method": "prediction"}]
    replies = [post(llm, {**body, "speculative": {**way, "metrics": True}}).json() for way in ways]
    texts = [[choice["text"] for choice in reply["choices"]] for reply in replies]
    assert texts == [texts[0]] * len(ways)
    assert texts[0][0] != texts[0][1]
    drafted = [reply["metrics"]["speculative_decoding"]["num_draft_tokens"] for reply in replies]
    assert 0 == drafted[0] < drafted[1] < drafted[2], "the drafts were alike: the test is too easy"


def test_several_prompts_and_answers_keep_their_places(llm: LLM) -> None:
    prompts = ["one", "two and more", "three"]
    wants = llm.generate(prompts, SamplingParams(seed=5, n=2, max_tokens=9, ignore_eos=True), REPEATABLE)
    texts = [completion.text for want in wants for completion in want.completions]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    whole = post(llm, body).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["completion_tokens"] == 54
    streamed = [""] * 6
    for chunk in frames(post(llm, {**body, "stream": True}).text):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm.encode(PROMPT)
    want = llm.generate(ids, SamplingParams(temperature=0, max_tokens=5))[0].text
    one = post(llm, {"prompt": ids, "temperature": 0, "max_tokens": 5}).json()
    two = post(llm, {"prompt": [ids, ids], "temperature": 0, "max_tokens": 5, "echo": True}).json()
    assert [choice["text"] for choice in one["choices"]] == [want]
    assert [choice["text"] for choice in two["choices"]] == [PROMPT + want] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
def test_logprobs_have_one_entry_a_token(llm: LLM, logprobs: int | None, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=logprobs)
    want = llm.generate(PROMPT, params)[0].completions[0]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
    reply = post(llm, {**body, "stream": stream})
    parts = [chunk["choices"][0] for chunk in frames(reply.text)] if stream else reply.json()["choices"]
    if logprobs is None:
        assert all(part["logprobs"] is None for part in parts)
        return
    assert want.logprobs is not None
    got = [entry for part in parts for entry in part["logprobs"]["token_logprobs"]]
    assert got == [entry.logprob for entry in want.logprobs]
    offsets = [entry for part in parts for entry in part["logprobs"]["text_offset"]]
    assert len(offsets) == 12
    assert offsets == sorted(offsets)
    tops = [part["logprobs"]["top_logprobs"] for part in parts]
    if logprobs == 0:
        assert set(map(str, tops)) == {"None"}
    else:
        assert [len(top) for part in tops for top in part] == [logprobs] * 12


def test_a_stop_ends_text_and_usage_together(llm: LLM) -> None:
    free = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0].text
    stop = free[10:13]
    want = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, stop=stop))[0]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": stop}
    whole = post(llm, body).json()
    assert whole["choices"][0]["text"] == want.text == free[: free.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len(want.token_ids)
    chunks = frames(post(llm, {**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want.text


def test_usage_may_run_along(llm: LLM) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True, "stream": True, "stream_options": options}
    used = [chunk["usage"]["completion_tokens"] for chunk in frames(post(llm, body).text)]
    assert used == sorted(used)
    assert used[-1] == 9


def test_speculation_is_chosen_and_shown_per_request(llm: LLM) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    want = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    on = post(llm, {**body, "speculative": {"metrics": True}}).json()
    off = post(llm, {**body, "speculative": {"enabled": False, "metrics": True}}).json()
    short = post(llm, {**body, "speculative": {"max_draft": 1}}, per_request_spec_decode_metrics=True).json()
    assert [r["choices"][0]["text"] for r in (on, off, short)] == [want.text] * 3
    shown, none, one = (r["metrics"]["speculative_decoding"] for r in (on, off, short))
    assert shown["num_draft_tokens"] == want.stats.drafted > 0
    assert shown["num_accepted_draft_tokens"] == want.stats.accepted
    assert sum(shown["acceptance_histogram"]) == shown["num_spec_steps"]
    weighted = sum(k * count for k, count in enumerate(shown["acceptance_histogram"]))
    assert weighted == shown["num_accepted_draft_tokens"]
    assert none["num_draft_tokens"] == 0
    assert 0 < one["num_draft_tokens"] == one["num_spec_steps"]


def test_a_prediction_saves_steps(llm: LLM) -> None:
    body = {"prompt": "Something new:", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    want = post(llm, {**body, "speculative": {"enabled": False}}).json()["choices"][0]["text"]
    used = {}
    for content in (want, [{"type": "text", "text": want}], "nothing of the kind", ""):
        reply = post(
            llm, {**body, "prediction": {"type": "content", "content": content}, "speculative": {"metrics": True}}
        )
        assert reply.json()["choices"][0]["text"] == want
        used[str(content)] = reply.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert used[want] > 0


def test_auto_is_itself_from_the_first_request_on(folder: str) -> None:
    """Until one has come there is nothing to say; a drafter that follows predictions serves those that predict only."""
    specs = [{"method": name, "speculation": "auto"} for name in ("ngram", "prediction")]
    llm = LLM(folder, specs, dtype="float64", num_kv_blocks=256)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}

    async def work() -> list[Any]:
        async with serving(llm.engine) as (client, _):
            told = [(await client.get("/v1/speculation")).json()]
            plain = await client.post(PATH, json={**body, "speculative": {"enabled": False}})
            want = plain.json()["choices"][0]["text"]
            for _ in range(10):
                assert (await client.post(PATH, json=body)).json()["choices"][0]["text"] == want
            told.append((await client.get("/v1/speculation")).json())
            helped = {**body, "prediction": {"type": "content", "content": want}}
            assert (await client.post(PATH, json=helped)).json()["choices"][0]["text"] == want
            told.append((await client.get("/v1/speculation")).json())
            return told

    fresh, without, helped = run(work())
    assert fresh["enabled"]
    assert (fresh["drafter"], fresh["controller"]["on"], fresh["controller"]["speedup"]) == ("ngram", False, 1.0)
    assert fresh["controller"]["reason"] == "no request yet"
    assert without["controller"]["drafter"] == "ngram"
    assert set(without["by_drafter"]) == {"ngram"}
    assert set(helped["by_drafter"]) == {"ngram", "prediction"}
