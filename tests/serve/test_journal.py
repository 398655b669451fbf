"""What is noted of each request: its line in the log, as text and as JSON, and its span; never its text."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.core.params import SpecParams
from outrider.serve.caller import Caller
from outrider.serve.logs import JsonFormatter, TextFormatter
from outrider.serve.trace import Tracer
from tests.serve.serving import run, serving, until

BODY: dict[str, Any] = {"prompt": "the pass the pass the", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def notes(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == "request"]


def test_one_line_a_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, _):
            asked = {**BODY, "speculative": {"method": "ngram", "metrics": True}}
            reply = await client.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine/7"})
            assert reply.headers["x-request-id"] == "mine/7"
            body = reply.json()
            assert body["id"] == "cmpl-mine/7"
            (record,) = notes(caplog)
            values: Any = record.__dict__["values"]
            spec, usage = body["metrics"]["speculative_decoding"], body["usage"]
            assert values["id"] == "mine/7"
            assert values["prompt_tokens"] == usage["prompt_tokens"]
            assert values["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
            assert values["output_tokens"] == 24
            assert values["draft_tokens"] == spec["num_draft_tokens"]
            assert values["accepted_tokens"] == spec["num_accepted_draft_tokens"]
            assert values["acceptance"] == spec["draft_acceptance_rate"]
            assert values["mean_acceptance_length"] == spec["mean_acceptance_length"]
            assert (values["drafter"], values["finish_reason"]) == ("ngram", "length")
            assert 0 <= values["queue"] <= values["ttft"] <= values["total"]
            assert values["ttft"] + 23 * values["tpot"] <= values["total"] + 1e-9
            written = TextFormatter().format(record)
            assert re.search(
                r" outrider: request id=mine/7 sequences=\d+ prompt_tokens=\d+ .*finish_reason=length$", written
            )
            shown = json.loads(JsonFormatter().format(record))
            assert shown == {**values, **{name: shown[name] for name in ("time", "level", "logger", "event")}}
            assert (shown["event"], shown["level"]) == ("request", "info")
            for text in (written, JsonFormatter().format(record)):
                assert "the pass" not in text
                assert body["choices"][0]["text"] not in text

    with caplog.at_level(logging.INFO, "outrider"):
        run(work())


def test_every_prompt_and_every_end_has_its_line(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, service):
            many = {**BODY, "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": True}
            await client.post("/v1/completions", json=many, headers={"X-Request-Id": "two"})
            assert [r.__dict__["values"]["id"] for r in notes(caplog)] == ["two-0", "two-1"]
            assert [r.__dict__["values"]["output_tokens"] for r in notes(caplog)] == [6, 6]
            sequences = [r.__dict__["values"]["sequences"].split(",") for r in notes(caplog)]
            assert len({sequence for both in sequences for sequence in both}) == 4
            caplog.clear()
            chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            await client.post("/v1/chat/completions", json=chat)
            (record,) = notes(caplog)
            assert record.__dict__["values"]["tpot"] is None
            assert " tpot=- " in record.getMessage()
            caplog.clear()
            assert (await client.post("/v1/completions", json={"prompt": ""})).status_code == 400
            assert not notes(caplog)
            assert service.loop.answers == 0

    with caplog.at_level(logging.INFO, "outrider"):
        run(work())


def test_a_request_that_is_dropped_is_an_abort(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (_, service):
            long = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
            stream = await service.loop.submit([[5, 6, 7]], long, SpecParams(), caller=Caller(request_id="dropped"))
            stream.close()
            await until(lambda: len(notes(caplog)) == 1)
            values = notes(caplog)[0].__dict__["values"]
            assert (values["id"], values["finish_reason"]) == ("dropped", "abort")

    with caplog.at_level(logging.INFO, "outrider"):
        run(work())


@pytest.mark.parametrize("on", [True, False])
def test_the_log_can_be_switched_off(llm: LLM, caplog: pytest.LogCaptureFixture, on: bool) -> None:
    async def work() -> None:
        async with serving(llm.engine, log_requests=on) as (client, _):
            await client.post("/v1/completions", json=BODY)

    with caplog.at_level(logging.INFO, "outrider"):
        run(work())
    assert len(notes(caplog)) == on


@pytest.mark.parametrize("given", ["", "a b", "a\tb=c", "x" * 129, "é"])
def test_an_id_that_could_mislead_is_replaced(llm: LLM, given: str) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, _):
            for path in ("/health", "/nothing"):
                reply = await client.get(path, headers={"X-Request-Id": given.encode()})
                assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"])
            kept = await client.get("/health", headers={"X-Request-Id": "a-b.c:d"})
            assert kept.headers["x-request-id"] == "a-b.c:d"

    run(work())


def test_other_lines() -> None:
    line = logging.LogRecord("outrider", logging.WARNING, "", 0, "drafter %s\nfailed", ("x",), None)
    shown = json.loads(JsonFormatter().format(line))
    assert (shown["message"], shown["level"], shown["event"]) == ("drafter x\nfailed", "warning", "log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown["time"])
    assert "\n" not in JsonFormatter().format(line)
    assert TextFormatter().format(line).startswith("WARNING ")


def test_a_span_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = Tracer(provider)
    monkeypatch.setattr(Tracer, "find", staticmethod(lambda: tracer))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def work() -> None:
        async with serving(llm.engine) as (client, _):
            await client.post("/v1/completions", json=BODY, headers={"traceparent": parent, "X-Request-Id": "seen"})
            await client.post("/v1/completions", json=BODY)

    run(work())
    child, root = exporter.get_finished_spans()
    assert child.context.trace_id == int("0af7651916cd43dd8448eb211c80319c", 16)
    assert child.parent.span_id == int("b7ad6b7169203331", 16)
    assert root.parent is None
    assert child.name == "outrider.request"
    seen = dict(child.attributes)
    assert seen["gen_ai.response.id"] == "seen"
    assert seen["gen_ai.request.model"] == "tiny"
    assert (seen["gen_ai.usage.output_tokens"], seen["gen_ai.response.finish_reasons"]) == (24, ("length",))
    assert seen["outrider.accepted_tokens"] <= seen["outrider.draft_tokens"]
    lasted = (child.end_time - child.start_time) / 1e9
    assert seen["outrider.time_to_first_token"] <= lasted
    assert lasted >= 23 * seen["outrider.time_per_output_token"]
    assert not any("the pass" in str(value) for value in seen.values())


def test_without_the_package_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert Tracer.find() is None
