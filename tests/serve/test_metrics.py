"""``/metrics``: names as FORMATS has them, numbers as the trace has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outrider import LLM
from outrider.core.config import MAX_DRAFT
from outrider.core.types import Span, StepRecord
from outrider.engine.engine import Engine
from outrider.serve.metrics import Snapshot
from outrider.spec.controller import DraftController, SpecStatus
from outrider.spec.drafts.combine import Combine, Part
from outrider.spec.drafts.none import NoDraft
from tests.engine.drafters import Oracle, Wrong
from tests.engine.harness import finish, greedy, make_engine, run_all, with_eos
from tests.engine.test_metrics import ANSWERS, FREE, PROMPT, SCRIPT, TARGET, Broken, Partly
from tests.serve.serving import run, serving

SPEC = "outrider:spec_decode_"
WANTED = {
    "outrider:spec_decode_num_drafts": "counter",
    "outrider:spec_decode_num_draft_tokens": "counter",
    "outrider:spec_decode_num_accepted_tokens": "counter",
    "outrider:spec_decode_num_accepted_tokens_per_pos": "counter",
    "outrider:spec_decode_mean_acceptance_length": "gauge",
    "outrider:spec_decode_acceptance_rate": "gauge",
    "outrider:spec_decode_draft_length": "gauge",
    "outrider:spec_decode_estimated_speedup": "gauge",
    "outrider:speculation_on": "gauge",
    "outrider:speculation_info": "gauge",
    "outrider:time_to_first_token_seconds": "histogram",
    "outrider:time_per_output_token_seconds": "histogram",
    "outrider:e2e_request_latency_seconds": "histogram",
    "outrider:request_queue_time_seconds": "histogram",
    "outrider:step_phase_seconds": "histogram",
    "outrider:generation_tokens": "counter",
    "outrider:prompt_tokens": "counter",
    "outrider:num_requests_running": "gauge",
    "outrider:num_requests_waiting": "gauge",
    "outrider:num_preemptions": "counter",
    "outrider:kv_cache_usage_perc": "gauge",
    "outrider:prefix_cache_hits": "counter",
    "outrider:prefix_cache_queries": "counter",
    "outrider:drafter_failures": "counter",
    "outrider:requests_finished": "counter",
    "outrider:engine_ready": "gauge",
}

Numbers = dict[str, float]


def numbers(text: str) -> Numbers:
    """Every sample by its name, with its labels in order: ``name{a=x,b=y}``."""
    found: Numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in found, f"{name} comes twice"
            found[name] = sample.value
    return found


def read(engine: Engine) -> Numbers:
    return numbers(generate_latest(Snapshot.of(engine)).decode())


def test_names_and_kinds() -> None:
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT))
    text = generate_latest(Snapshot.of(engine)).decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert WANTED.items() <= kinds.items()
    assert all(name.startswith("outrider:") for name in kinds)
    for name, kind in kinds.items():
        if kind == "counter":
            assert f"# TYPE {name}_total counter" in text


def test_a_scripted_trace() -> None:
    """Drafts of 4, 4, 4 and 2 tokens, of which 2, 0, 4 and 1 are accepted (see tests/engine/test_metrics.py)."""
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT), gamma=4)
    before = read(engine)
    assert before[f"{SPEC}num_drafts_total{{drafter=drafter}}"] == 0
    run_all(engine, [(PROMPT, greedy(12))])
    got = read(engine)
    assert {name: value for name, value in got.items() if name.startswith(f"{SPEC}")} == {
        f"{SPEC}num_drafts_total{{drafter=drafter}}": 4,
        f"{SPEC}num_draft_tokens_total{{drafter=drafter}}": 14,
        f"{SPEC}num_accepted_tokens_total{{drafter=drafter}}": 7,
        f"{SPEC}num_accepted_tokens_per_pos_total{{drafter=drafter,position=0}}": 3,
        f"{SPEC}num_accepted_tokens_per_pos_total{{drafter=drafter,position=1}}": 2,
        f"{SPEC}num_accepted_tokens_per_pos_total{{drafter=drafter,position=2}}": 1,
        f"{SPEC}num_accepted_tokens_per_pos_total{{drafter=drafter,position=3}}": 1,
        f"{SPEC}num_steps_total{{drafter=drafter}}": 5,
        f"{SPEC}mean_acceptance_length{{drafter=drafter}}": 1 + 7 / 4,
        f"{SPEC}acceptance_rate{{drafter=drafter}}": 0.5,
        f"{SPEC}draft_length": 4,
        f"{SPEC}estimated_speedup": 1,
    }
    for name, value in {
        "generation_tokens_total": 12,
        "prompt_tokens_total": 6,
        "step_rows_total{kind=draft}": 14,
        "time_to_first_token_seconds_count": 1,
        "time_per_output_token_seconds_count": 11,
        "time_per_output_token_seconds_bucket{le=+Inf}": 11,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "step_phase_seconds_count{phase=forward}": 5,
        "requests_finished_total{finish_reason=length}": 1,
        "requests_finished_total{finish_reason=stop}": 0,
        "speculation_on": 1,
    }.items():
        assert got[f"outrider:{name}"] == value, name
    assert all(got[name] >= value for name, value in before.items() if "_total" in name or "_bucket" in name)


def test_buckets_add_up() -> None:
    engine = make_engine(TARGET, Partly(ANSWERS, SCRIPT), gamma=4)
    run_all(engine, [(PROMPT, greedy(12))])
    engine.metrics.token_time.counts = [1, *[0] * (len(engine.metrics.token_time.bounds) - 1), 10]
    got = [value for name, value in read(engine).items() if name.startswith("outrider:time_per_output_token_seconds_b")]
    assert got == [*[1] * len(engine.metrics.token_time.bounds), 11]


def test_tokens_behind_the_end_are_not_accepted() -> None:
    engine = make_engine(with_eos(TARGET, FREE.token_ids[2]), Partly(ANSWERS, (6,)), gamma=6)
    run_all(engine, [(PROMPT, greedy(12))])
    got = read(engine)
    assert got[f"{SPEC}num_draft_tokens_total{{drafter=drafter}}"] == 6
    assert got[f"{SPEC}num_accepted_tokens_total{{drafter=drafter}}"] == 3
    positions = [got[f"{SPEC}num_accepted_tokens_per_pos_total{{drafter=drafter,position={i}}}"] for i in range(6)]
    assert positions == [1, 1, 1, 0, 0, 0]
    assert got["outrider:requests_finished_total{finish_reason=stop}"] == 1


def test_what_runs_waits_and_is_held() -> None:
    """One seat; the six tokens of a prompt hold two of 16 blocks of 4, the newest token none yet."""
    engine = make_engine(TARGET, gamma=0, max_num_seqs=1, num_kv_blocks=16)
    for _ in range(3):
        engine.add_request(PROMPT, greedy(4))
    engine.step()
    got = read(engine)
    assert (got["outrider:num_requests_running"], got["outrider:num_requests_waiting"]) == (1, 2)
    assert got["outrider:kv_cache_usage_perc"] == 2 / 16
    finish(engine)
    got = read(engine)
    assert (got["outrider:num_requests_running"], got["outrider:num_requests_waiting"]) == (0, 0)
    assert got["outrider:kv_cache_usage_perc"] == 0
    assert got["outrider:prefix_cache_queries_total"] == 18
    assert got["outrider:prefix_cache_hits_total"] == 8


def test_drafters_and_their_parts_are_kept_apart() -> None:
    both = Combine([Part("right", Oracle(ANSWERS)), Part("wrong", Wrong(ANSWERS, 32))], "merge")
    engine = make_engine(TARGET, {"both": both, "broken": Broken(ANSWERS), "idle": NoDraft()}, gamma=4)
    run_all(engine, [(PROMPT, greedy(12))])
    engine.controller.choose = lambda params, drafters: "broken"  # type: ignore[method-assign]
    run_all(engine, [(PROMPT, greedy(12))])
    got, stats = read(engine), engine.metrics.spec["both"]
    accepted = got[f"{SPEC}num_accepted_tokens_total{{drafter=both}}"]
    assert accepted == stats.accepted > 0
    assert got[f"{SPEC}num_accepted_tokens_by_source_total{{drafter=both,source=right}}"] == accepted
    assert got[f"{SPEC}num_accepted_tokens_by_source_total{{drafter=both,source=wrong}}"] == 0
    drafted = got[f"{SPEC}num_draft_tokens_by_source_total{{drafter=both,source=wrong}}"]
    assert drafted == stats.drafted - accepted > 0
    assert got["outrider:drafter_failures_total{drafter=both}"] == 0
    assert got["outrider:drafter_failures_total{drafter=broken}"] == 1
    assert got[f"{SPEC}num_drafts_total{{drafter=idle}}"] == 0


class Moody(DraftController):
    """Has any status that a test gives it."""

    mood = SpecStatus(False, "too little would be accepted", "drafter", 0.25, (0.1,), 0.875)

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        return [0] * len(spans)

    def observe(self, record: StepRecord) -> None:
        pass

    @property
    def status(self) -> SpecStatus:
        return self.mood


def test_what_the_controller_does_and_why() -> None:
    controller = Moody()
    engine = make_engine(TARGET, Oracle(ANSWERS), controller=controller)
    got = read(engine)
    assert (got["outrider:speculation_on"], got[f"{SPEC}draft_length"], got[f"{SPEC}estimated_speedup"]) == (
        0,
        0.25,
        0.875,
    )
    assert got["outrider:speculation_info{drafter=drafter,reason=too little would be accepted}"] == 1
    series = set()
    for speedup in (1.5, 1.75):
        controller.mood = SpecStatus(True, f"{speedup} times as fast", "drafter", 3.0, (0.9,), speedup)
        assert read(engine)[f"{SPEC}estimated_speedup"] == speedup
        series |= {name for name in read(engine) if "speculation_info" in name}
    assert len(series) == 1, "a reason with numbers in it would make a new series each time"


def test_a_server_without_a_drafter_says_so() -> None:
    engine = make_engine(TARGET, {"none": NoDraft()}, gamma=4)
    got = read(engine)
    assert got["outrider:speculation_on"] == 0
    assert got["outrider:speculation_info{drafter=none,reason=the server was started without a drafter}"] == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_over_http(llm: LLM, stopped: bool) -> None:
    """What a response says of itself is what the counters grow by; a dead engine still shows its numbers."""

    async def work() -> None:
        async with serving(llm.engine) as (client, service):
            before = numbers((await client.get("/metrics")).text)
            body: dict[str, Any] = {"prompt": "the pass the pass the", "max_tokens": 24, "temperature": 0}
            sent = {**body, "speculative": {"method": "ngram", "metrics": True}}
            reply = (await client.post("/v1/completions", json=sent)).json()
            if stopped:
                service.loop.failure = RuntimeError("gone")
            page = await client.get("/metrics")
            assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            after = numbers(page.text)
            shown = reply["metrics"]["speculative_decoding"]

            def grown(name: str) -> float:
                return after[f"outrider:{name}"] - before[f"outrider:{name}"]

            assert grown("generation_tokens_total") == reply["usage"]["completion_tokens"] == 24
            assert grown("prompt_tokens_total") == reply["usage"]["prompt_tokens"]
            assert grown("spec_decode_num_drafts_total{drafter=ngram}") == shown["num_spec_steps"]
            assert grown("spec_decode_num_draft_tokens_total{drafter=ngram}") == shown["num_draft_tokens"]
            assert grown("spec_decode_num_accepted_tokens_total{drafter=ngram}") == shown["num_accepted_draft_tokens"]
            assert grown("spec_decode_num_draft_tokens_total{drafter=prediction}") == 0
            assert grown("requests_finished_total{finish_reason=length}") == 1
            assert after["outrider:engine_ready"] == (not stopped)
            assert (await client.get("/health")).status_code == (503 if stopped else 200)

    run(work())


def test_a_key_guards_the_numbers(llm: LLM) -> None:
    async def work() -> None:
        async with serving(llm.engine, api_key=("secret",)) as (client, _):
            assert (await client.get("/metrics")).status_code == 401
            allowed = await client.get("/metrics", headers={"Authorization": "Bearer secret"})
            assert allowed.status_code == 200

    run(work())


def test_positions_go_as_far_as_drafts_do() -> None:
    engine = make_engine(TARGET, Oracle(ANSWERS), gamma=MAX_DRAFT)
    assert sum("per_pos" in name for name in read(engine)) == MAX_DRAFT
