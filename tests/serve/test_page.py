"""The live page's files, the numbers that it shows, and where the pieces of a streamed answer come from."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.core.params import SpecParams
from outrider.core.types import FinishReason
from outrider.engine.answer import Segment, SpecStats
from outrider.engine.metrics import EngineMetrics
from outrider.engine.request import Delta
from outrider.serve.live import WINDOW, Live
from outrider.serve.reply import Reply
from outrider.serve.static import FILES
from outrider.spec.controller import SpecStatus
from tests.serve.serving import run, serving

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
TALK = [{"role": "user", "content": "the pass the pass the pass the"}]


def test_the_page_is_sent_as_it_is_and_not_twice(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine, api_key=("secret",)) as (client, _):
            for path, (name, _) in FILES.items():
                got = await client.get(path)
                assert got.status_code == 200, "the page needs no key"
                assert got.headers["content-type"].startswith(KINDS[name.split(".")[1]])
                assert "default-src 'none'" in got.headers["content-security-policy"]
                assert "unsafe" not in got.headers["content-security-policy"]
                assert got.headers["cache-control"] == "no-cache"
                assert got.headers["x-content-type-options"] == "nosniff"
                tag = got.headers["etag"]
                again = await client.get(path, headers={"If-None-Match": f'"old", W/{tag}'})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
                assert (await client.get(path, headers={"If-None-Match": '"old"'})).content == got.content
            assert (await client.get("/v1/status")).status_code == 401
            assert (await client.get("/page/../app.py")).status_code in (401, 404)

    run(work())


def test_the_page_asks_nobody_else_and_runs_nothing_inline(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, _):
            texts = [(await client.get(path)).text for path in FILES]
        for text in texts:
            assert not re.search(r"https?://(?!www\.w3\.org/)", text)
        html = texts[0]
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! src=)|javascript:", html)
        assert set(re.findall(r'(?:src|href)="([^"]+)"', html)) == set(FILES) - {"/"}

    run(work())


def test_segments_say_which_text_was_drafted(llm: LLM) -> None:
    few = list(range(60, 66))
    want = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=few))[0].completions[0]
    assert {True, False} == set(want.drafted), "the test would show nothing"

    async def work() -> None:
        async with serving(llm.engine) as (client, _):
            asked: dict[str, Any] = {"messages": TALK, "max_tokens": 40, "temperature": 0, "stream": True}
            asked["allowed_token_ids"] = few
            got = await client.post("/v1/chat/completions", json=asked | {"speculative": {"segments": True}})
            choices = [c for chunk in chunks(got.text) for c in chunk["choices"]]
            segments = [segment for choice in choices for segment in choice.get("segments", [])]
            assert "".join(s["text"] for s in segments) == want.text
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            assert text == want.text
            # A token whose text is not there yet, or is empty, has no segment: what is left is in order.
            left = iter(want.drafted)
            assert all(any(flag == s["drafted"] for flag in left) for s in segments)
            plain = await client.post(
                "/v1/chat/completions", json=asked | {"speculative": {"segments": True, "enabled": False}}
            )
            drawn = [s for chunk in chunks(plain.text) for c in chunk["choices"] for s in c.get("segments", [])]
            assert "".join(s["text"] for s in drawn) == want.text
            assert not any(s["drafted"] for s in drawn)
            old = await client.post(
                "/v1/completions",
                json={"prompt": "the pass", "max_tokens": 9, "stream": True, "speculative": {"segments": True}},
            )
            for chunk in chunks(old.text):
                for choice in chunk["choices"]:
                    assert "".join(s["text"] for s in choice.get("segments", [])) == choice["text"]
            silent = await client.post("/v1/chat/completions", json=asked)
            assert not any("segments" in choice for chunk in chunks(silent.text) for choice in chunk["choices"])
            whole = await client.post(
                "/v1/chat/completions", json={"messages": TALK, "speculative": {"segments": True}}
            )
            assert (whole.status_code, whole.json()["error"]["param"]) == (400, "speculative.segments")

    run(work())


def test_segments_of_text_that_is_held_back_come_with_the_next_piece() -> None:
    reply = object.__new__(Reply)
    reply._waiting = {}

    def traced(text: str, pieces: list[Any]) -> list[Any]:
        end = FinishReason.STOP if not text else None
        segments = (Segment(text, True),) if text else ()
        return reply._traced(Delta(0, 0, (1,), segments, None, end), pieces)

    assert traced("<tool", []) == []
    held = {"text": "<tool", "drafted": True}
    assert traced("s>", [{"delta": {"role": "assistant"}}, {"delta": {"content": "<tools>"}}]) == [
        {"delta": {"role": "assistant"}},
        {"delta": {"content": "<tools>"}, "segments": [held, {"text": "s>", "drafted": True}]},
    ]
    assert traced("", [{"delta": {}}]) == [{"delta": {}}]


def test_status_tells_what_runs(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine) as (client, service):
            before = (await client.get("/v1/status")).json()
            assert (before["running"], before["kv_blocks"]["used"], before["kv_blocks"]["total"]) == (0, 0, 256)
            endless = SamplingParams(max_tokens=900, ignore_eos=True)
            stream = await service.loop.submit([[5, 6, 7]], endless, SpecParams())
            busy = (await client.get("/v1/status")).json()
            assert busy["running"] + busy["waiting"] == 1
            await anext(aiter(stream.deltas()))
            assert (await client.get("/v1/status")).json()["kv_blocks"]["used"] >= 1
            stream.close()
            await client.post("/v1/completions", json={"prompt": "the pass the pass the", "max_tokens": 50})
            now = (await client.get("/v1/status")).json()
            assert now["speculation"]["draft_length"] == 4
            assert now["lately"]["generated_tokens"] >= 50
            assert now["lately"]["plain_tokens_per_second"] is None, "a fixed length estimates nothing"
            assert now["lately"]["tokens_per_second"] == pytest.approx(
                now["lately"]["generated_tokens"] / now["lately"]["seconds"]
            )

    run(work())


@pytest.mark.parametrize(
    ("drafter", "on", "reason"),
    [
        ({"method": "none"}, False, "the server was started without a drafter"),
        ({"method": "ngram", "speculation": "off"}, False, "speculation is off"),
        ({"method": "ngram", "speculation": "fixed:0"}, False, "num_speculative_tokens is 0"),
        ({"method": "ngram", "speculation": "fixed:3"}, True, "drafter ngram, up to 3 draft tokens a step"),
    ],
)
def test_all_who_tell_of_speculation_agree(folder: str, drafter: dict[str, Any], on: bool, reason: str) -> None:
    async def work() -> tuple[Any, Any, str]:
        async with serving(LLM(folder, drafter, kv_cache_mib=16).engine) as (client, _):
            told = (await client.get("/v1/speculation")).json()
            return told, (await client.get("/v1/status")).json()["speculation"], (await client.get("/metrics")).text

    told, status, metrics = run(work())
    assert (told["enabled"], told["reason"]) == (on, reason)
    assert (told["controller"]["on"], status["on"]) == (on, on)
    assert status["reason"] == told["controller"]["reason"]
    assert status["drafter"] == told["controller"]["drafter"] == told["drafter"] == drafter["method"]
    assert f"outrider:speculation_on {float(on)}" in metrics


class Script:
    """An engine of which only the totals are there."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.metrics.spec["some"] = SpecStats()
        self.controller = SimpleNamespace(status=SpecStatus(True, "", "some", 2))
        self.told = [0.0, 0.0]

    def work(self, seconds: float, steps: list[tuple[int, int]], earned: float = 0.0) -> None:
        """Steps as (drafted, accepted), which took so long in all, and plain decoding ``earned``."""
        self.metrics.phases["forward"].add(seconds)
        for drafted, accepted in steps:
            self.metrics.spec["some"].add_step(drafted, accepted, accepted + 1)
            self.metrics.generated_tokens += accepted + 1
        self.told = [self.told[0] + earned, self.told[1] + (seconds if earned else 0)]
        status = SpecStatus(True, "", "some", 2, earned=self.told[0], spent=self.told[1])
        self.controller = SimpleNamespace(status=status)


def test_lately_is_the_last_seconds_of_work() -> None:
    script, live = Script(), Live()
    assert live.lately(script)["tokens_per_second"] == 0  # type: ignore[arg-type]
    for _ in range(40):  # slow, nothing accepted
        script.work(1.0, [(2, 0)])
        first = live.lately(script)  # type: ignore[arg-type]
    assert first["seconds"] == WINDOW
    assert first["tokens_per_second"] == 1
    assert (first["acceptance_rate"], first["acceptance_by_position"]) == (0, [])
    for _ in range(7):  # two steps a second: one draft of two accepted as a whole, one in half
        script.work(1.0, [(2, 2), (2, 1)], earned=2.5)
        then = live.lately(script)  # type: ignore[arg-type]
    assert (then["seconds"], then["generated_tokens"], then["drafts"]) == (5, 25, 10)
    assert then["tokens_per_second"] == 5
    assert then["plain_tokens_per_second"] == 2
    assert then["tokens_per_step"] == 2.5
    assert then["acceptance_rate"] == 0.75
    assert then["acceptance_by_position"] == [1.0, 0.5]
    assert live.lately(script) == then, "time stands still without work"  # type: ignore[arg-type]


def test_many_who_look_keep_few_samples() -> None:
    script, live = Script(), Live()
    for _ in range(2000):
        script.work(0.01, [(0, 0)])
        live.lately(script)  # type: ignore[arg-type]
    assert len(live._samples) < 25
    assert live.lately(script)["plain_tokens_per_second"] == pytest.approx(100)  # type: ignore[arg-type]


def chunks(body: str) -> list[Any]:
    return [json.loads(part[6:]) for part in body.split("\n\n") if part.startswith("data: {")]
