"""Loads, turns and the closed loop of the benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SettingError
from outrider.bench import harness
from outrider.bench.harness import Load, Record, Setting, check_prompts, loads_for, run_bench, settings_for, turns
from outrider.bench.identity import encode
from outrider.bench.prompts import BenchPrompt
from outrider.bench.report import rows_of
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.types import Draws, Verdict
from tests.tiny import write_tiny_model

PROMPTS = [BenchPrompt(kind, f"Numbers: {i} {i} {i}.") for i, kind in enumerate("aabab")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def load_llm(folder: str, **settings: Any) -> LLM:
    drafters = ["none", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min_token_prob": 0}]
    return LLM(folder, drafters, ops="reference", enable_prefix_caching=False, kv_cache_mib=8, **settings)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return load_llm(folder)


def run(llm: LLM, settings: Sequence[Setting], records: list[Record] | None = None) -> list[Record]:
    records = [] if records is None else records
    run_bench(llm, PROMPTS, settings, PARAMS, records, lambda _: None)
    return records


def test_plain_decoding_is_always_the_baseline() -> None:
    lengths = {"none": (3,), "ngram": (1, 2)}
    assert settings_for(lengths, (1, 8)) == [
        Setting("none", 0, 1),
        Setting("ngram", 1, 1),
        Setting("ngram", 2, 1),
        Setting("none", 0, 8),
        Setting("ngram", 1, 8),
        Setting("ngram", 2, 8),
    ]
    assert [s.plain for s in settings_for(lengths, (1,))] == [True, False, False]


def test_a_load_is_one_prompt_or_some_batches_of_one_category() -> None:
    assert [load.prompts for load in loads_for(PROMPTS, 1)] == [(0,), (1,), (3,), (2,), (4,)]
    assert loads_for(PROMPTS, 2) == [Load(2, 0, "a", (0, 1, 3)), Load(2, 1, "b", (2, 4))]
    assert loads_for(PROMPTS, 4)[0].prompts == (0, 1, 3, 0)  # repeated until the batch is full
    many = [BenchPrompt("a", str(i)) for i in range(20)]
    sizes = [len(load.prompts) for load in loads_for(many, 2)]
    assert sizes == [6, 7, 7]
    assert max(sizes) <= harness.ROUNDS * 2
    assert [place for load in loads_for(many, 2) for place in load.prompts] == list(range(20))


def test_who_comes_first_moves_on_from_load_to_load() -> None:
    settings = settings_for({"ngram": (1, 2)}, (1, 2))
    order = list(turns(settings, loads_for(PROMPTS, 1)))
    assert len(set(order)) == len(order) == 5 * 3
    assert all(setting.batch == 1 for _, setting in order)
    by_load = [[setting.gamma for _, setting in order[i : i + 3]] for i in range(0, 15, 3)]
    assert by_load == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2], [1, 2, 0]]


def test_the_counts_of_a_real_run(llm: LLM) -> None:
    records = run(llm, settings_for({"ngram": (1, 3)}, (1, 2)))
    assert len(records) == 3 * (5 + 2)
    assert len({(record.setting, record.load) for record in records}) == len(records)
    alone = {i: llm.generate([encode(llm, p)], PARAMS)[0].token_ids for i, p in enumerate(PROMPTS)}
    for record in records:
        assert record.tokens == sum(len(alone[place]) for place in record.prompts)
        assert record.outputs == tuple(harness._digest(alone[place]) for place in record.prompts)
        assert record.preemptions == 0
        assert 0 < record.decode_seconds < record.seconds
        if record.setting.batch == 1:
            assert record.decode_tokens == record.tokens - 1
        if record.setting.plain:
            assert record.steps == record.tokens
            assert record.drafted == record.accepted == 0
        else:
            assert record.steps + record.accepted == record.tokens
            assert record.accepted <= record.drafted <= record.setting.gamma * record.steps
    drafted = Counter({gamma: sum(r.drafted for r in records if r.setting.gamma == gamma) for gamma in (0, 1, 3)})
    assert 0 == drafted[0] < drafted[1] < drafted[3]
    rows, overall = rows_of(records, settings_for({"ngram": (1, 3)}, (1, 2)))
    assert all(row.identical for row in [*rows, *overall])


def test_the_batch_is_kept_full_and_no_fuller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    step = llm.engine.step

    def watched() -> Any:
        running.append(len(llm.engine.sequences))
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    record = harness.run_load(llm, PROMPTS, Load(2, 0, "a", (0, 1, 2, 3)), Setting("ngram", 3, 2), PARAMS)
    assert len(record.outputs) == 4
    assert max(running) == 2
    assert running.count(1) < len(running) / 2
    assert not llm.engine.has_work


def test_what_is_done_is_not_done_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for({"ngram": (3,)}, (1,))
    records = run(llm, settings)
    want = sorted((r.load, r.setting, r.outputs) for r in records)
    kept = records[:4]
    ran: list[tuple[int, Setting]] = []
    run_load = harness.run_load

    def watched(llm: LLM, prompts: Any, load: Load, setting: Setting, params: SamplingParams) -> Record:
        if load.category:  # not the warm-up
            ran.append((load.index, setting))
        return run_load(llm, prompts, load, setting, params)

    monkeypatch.setattr(harness, "run_load", watched)
    assert sorted((r.load, r.setting, r.outputs) for r in run(llm, settings, list(kept))) == want
    assert len(ran) == len(records) - 4
    assert not {(r.load, r.setting) for r in kept} & set(ran)


def test_no_prompt_finds_its_own_answer_in_a_drafters_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def llm_with(memory: int) -> LLM:
        suffix = {"suffix_decoding_max_cached_requests": memory, "suffix_decoding_min_token_prob": 0}
        drafters = ["none", {"method": "suffix", **suffix}]
        llm = LLM(folder, drafters, ops="reference", enable_prefix_caching=False, kv_cache_mib=8)
        add = llm.engine.add_request

        def watched(ids: Sequence[int], params: Any, spec: Any) -> Any:
            if spec.drafter == "suffix":
                asked.append((spec.tenant, *ids))
            return add(ids, params, spec)

        monkeypatch.setattr(llm.engine, "add_request", watched)
        return llm

    settings = settings_for({"suffix": (3, 4)}, (1, 2, 4))
    records = run(llm_with(100), settings)
    assert len(asked) == 2 * (1 + 5 + 2 + 5 + 4 + 8)  # of each batch size the warm-up, then its loads
    assert len(set(asked)) == len(asked)
    tenants = {tenant for tenant, *_ in asked}
    assert len(tenants) == 2 * (2 + 2 + 4), "but a setting remembers its other prompts"
    assert all(row.identical for row in rows_of(records, settings)[1])

    def drafted(memory: int, prompts: Sequence[BenchPrompt]) -> list[tuple[int, int]]:
        records: list[Record] = []
        run_bench(llm_with(memory), prompts, settings[:3], PARAMS, records, lambda _: None)
        return [(r.steps, r.accepted) for r in records if r.setting.gamma == 4]

    once, twice = PROMPTS[:1], PROMPTS[:1] * 2
    assert drafted(100, once) == drafted(0, once)
    assert drafted(100, twice)[1] != drafted(0, twice)[1] == drafted(0, twice)[0], "the control: there is a memory"


def test_an_interrupted_load_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, settings_for({"ngram": (3,)}, (2,)))
    assert not llm.engine.has_work


def test_a_lossy_engine_is_found_out(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a verifier that keeps every draft token."""

    def keep_all(draft: Draft, rows: Sequence[Dist], draws: Draws, method: str) -> Verdict:
        return Verdict(tuple(range(len(draft))), draws.pick(rows[len(draft)], len(draft) + 1))

    monkeypatch.setattr("outrider.engine.engine.verify", keep_all)
    settings = settings_for({"ngram": (3,)}, (1, 2))
    _, overall = rows_of(run(load_llm(folder), settings), settings)
    assert [row.identical for row in overall] == [True, False, True, False]


def test_a_second_model_drafts_in_the_same_engine(folder: str) -> None:
    drafters = ["none", "ngram", {"method": "model", "model": folder, "num_speculative_tokens": 2}]
    llm = LLM(folder, drafters, ops="reference", enable_prefix_caching=False, kv_cache_mib=8)
    settings = settings_for({"ngram": (3,), "model": (1, 2)}, (1,))
    _, overall = rows_of(run(llm, settings), settings)
    by_gamma = {row.gamma: row for row in overall if row.drafter == "model"}
    assert all(row.identical for row in overall)
    assert by_gamma[1].acceptance_rate == by_gamma[2].acceptance_rate == 1.0  # it drafts for itself
    assert 1.5 < by_gamma[1].tokens_per_step <= 2 < by_gamma[2].tokens_per_step <= 3  # type: ignore[operator]


def test_a_prompt_that_does_not_fit_is_named(llm: LLM) -> None:
    long = [PROMPTS[0], replace(PROMPTS[1], text="word " * 400)]
    with pytest.raises(SettingError, match=r"prompt 2 \(a\): the prompt has \d+ tokens; allowed is at most 255"):
        check_prompts(llm, long, PARAMS)


@pytest.mark.parametrize(
    ("drafters", "said"),
    [
        ([], "drafter is an empty list"),
        (["ngram", {"method": "ngram", "num_speculative_tokens": 2}], "allowed is each drafter once"),
        (["none", {"method": "ngram", "rejection_sample_method": "block"}], "one rule for all of them"),
        (["none", 3], "drafter is 3; allowed is a drafter's name"),
    ],
)
def test_lists_of_drafters_that_do_not_go_together(tmp_path: Path, drafters: list[Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        LLM(str(tmp_path), drafters)
