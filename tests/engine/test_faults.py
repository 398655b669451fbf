"""Faults stay where they are: a broken drafter or token costs its own request at most, and nothing leaks."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider import LLM, OutriderError, SamplingParams, SettingError, SpecParams
from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.grammar import Grammar
from outrider.core.types import Commit, Span, StepRecord
from outrider.engine.engine import Engine
from outrider.engine.request import RequestOutput
from outrider.models.tokenizer import Tokenizer
from outrider.spec.controller import DraftController, FixedLength
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.drafts.none import NoDraft
from outrider.spec.proposer import Proposer
from tests.tiny import write_tiny_model
from tests.toy import toy_model

TARGET = toy_model()
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def engine_with(proposer: Proposer, controller: DraftController | None = None, gamma: int = 4, **config: int) -> Engine:
    settings = EngineConfig(**{"model": "toy", "num_kv_blocks": 200, "block_size": 4, **config})  # type: ignore[arg-type]
    return Engine(TARGET, settings, {"d": proposer}, SpecConfig(num_speculative_tokens=gamma), controller)


def plain(prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    engine = engine_with(NoDraft())
    return engine.run(engine.add_request(prompt, params)).token_ids


class Broken(Proposer):
    """Fails in one of the ways a drafter can."""

    def __init__(self, how: str) -> None:
        self.how = how

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        if self.how == "raises":
            raise RuntimeError("no such weight")
        if self.how == "too few":
            return [Draft.chain([1])] * (len(spans) - 1)
        if self.how in ("nan", "inf", "text"):
            return [Draft.chain([1]).sure([float(self.how) if self.how != "text" else "high"]) for _ in spans]  # type: ignore[list-item]
        if self.how == "unsure":
            return [Draft.chain([1]).sure([]) for _ in spans]
        if self.how == "impossible":
            return [Draft.chain([1], [Dist.point(2)]) for _ in spans]
        return [Draft.chain([{"too large": 32, "negative": -1}[self.how]]) for _ in spans]


@pytest.mark.parametrize(
    "how", ["raises", "too few", "too large", "negative", "nan", "inf", "text", "unsure", "impossible"]
)
def test_a_drafter_that_fails_costs_only_its_drafts(how: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(Broken(how))
    prompts = ([1, 2, 3], [4, 5, 6, 7])
    with caplog.at_level(logging.WARNING, "outrider"):
        requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        outputs = [engine.run(request) for request in requests]
    assert [output.token_ids for output in outputs] == [plain(prompt) for prompt in prompts]
    for output in outputs:
        assert output.stats.drafted == 0
        assert "the drafter failed" in output.stats.no_draft
    assert "drafter d failed" in caplog.text
    assert engine.blocks.n_free == 200


class Flaky(Broken):
    """Guesses wrong until its calls number ``falls``; that one fails, in ``propose`` or in ``observe``."""

    def __init__(self, how: str, falls: int) -> None:
        super().__init__(how)
        self.falls = falls
        self.asked: list[list[int]] = []
        self.seen: list[list[int]] = []
        self.released: list[int] = []

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        self.asked.append([span.seq.id for span in spans])
        if self.how == "propose" and len(self.asked) == self.falls:
            raise RuntimeError("once")
        return [Draft.chain([1, 2]) for _ in spans]

    def observe(self, commits: Sequence[Commit]) -> None:
        self.seen.append([commit.seq.id for commit in commits])
        if self.how == "observe" and len(self.seen) == self.falls:
            raise RuntimeError("once")

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


@pytest.mark.parametrize("how", ["propose", "observe"])
def test_a_drafter_that_failed_is_off_for_that_request_only(how: str) -> None:
    drafter = Flaky(how, falls=3)
    engine = engine_with(drafter)
    params = dataclasses.replace(GREEDY, n=2, temperature=1.0, seed=5)
    request = engine.add_request([1, 2, 3], params)
    output = engine.run(request)
    other = engine_with(NoDraft())
    want = other.run(other.add_request([1, 2, 3], params))
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in want.completions]
    assert request.drafter_failed
    assert engine.metrics.drafter_failures == {"d": 1}
    calls, seen = len(drafter.asked), [ids for ids in drafter.seen if ids]
    assert calls <= 3
    assert len(seen) <= 3
    assert set(drafter.released) == {0, 1}
    later = engine.add_request([1, 2, 3], GREEDY)
    assert engine.run(later).token_ids == plain([1, 2, 3])
    assert not later.drafter_failed
    assert len(drafter.asked) > calls + 3
    assert engine.metrics.drafter_failures == {"d": 1}
    engine.check_integrity()


class Guesser(Proposer):
    """Guesses at random, and so mostly wrong."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [Draft.chain([1, 2]) for _ in spans]


def failing(method: str) -> Guesser:
    """One whose ``method`` fails whenever it is called."""
    drafter = Guesser()

    def fail(*args: object) -> None:
        drafter.called.append(method)
        raise RuntimeError(method)

    setattr(drafter, method, fail)
    return drafter


METHODS = sorted(name for name, value in vars(Proposer).items() if inspect.isfunction(value))
NOT_THE_ENGINES = {"continue_from"}
"""What other drafters call, within their own ``propose``."""


def test_the_methods_of_a_drafter_are_known() -> None:
    assert set(METHODS) == {"propose", "start", "share_kv", "copy_blocks", "observe", "release"} | NOT_THE_ENGINES


@pytest.mark.parametrize("method", METHODS)
def test_whatever_fails_in_a_drafter_the_answers_are_the_same(method: str) -> None:
    """Copies are made (two choices share a block), KV is taken away, requests end; another drafter is not touched."""
    drafter = failing(method)
    settings = EngineConfig("toy", num_kv_blocks=14, block_size=4)
    engine = Engine(TARGET, settings, {"d": drafter, "e": Guesser()}, SpecConfig(num_speculative_tokens=2))
    params = dataclasses.replace(GREEDY, n=2)
    hurt = [engine.add_request(prompt, params, SpecParams(drafter="d")) for prompt in ([1, 2, 3], [4, 5, 6])]
    other = engine.add_request([7, 8, 9], GREEDY, SpecParams(drafter="e"))
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    for request, prompt in zip([*hurt, other], ([1, 2, 3], [4, 5, 6], [7, 8, 9]), strict=True):
        for completion in RequestOutput.of(request).completions:
            assert completion.token_ids == plain(prompt)
    assert engine.metrics.preemptions > 0, "the pool was never short: the test is too easy"
    assert not other.drafter_failed
    assert RequestOutput.of(other).stats.drafted > 0
    assert engine.metrics.drafter_failures["e"] == 0
    assert engine.metrics.drafter_failures["d"] == len(drafter.called)
    assert bool(drafter.called) is (method not in NOT_THE_ENGINES)
    assert all(request.drafter_failed for request in hurt) is (method not in NOT_THE_ENGINES)
    assert engine.blocks.n_free == 14


def test_a_drafter_that_cannot_start_is_never_asked_and_may_be_replaced() -> None:
    class Lame(Guesser):
        def share_kv(self, kv: object) -> None:
            raise RuntimeError("not this KV")

        def propose(self, spans: Sequence[Span]) -> list[Draft]:
            raise AssertionError("it was asked")

    engine = engine_with(Lame())
    assert engine.run(engine.add_request([1, 2, 3], GREEDY)).stats.drafted == 0
    assert engine.metrics.drafter_failures == {"d": 1}
    engine.put_drafter("d", Guesser())
    assert engine.run(engine.add_request([1, 2, 3], GREEDY)).stats.drafted > 0
    both = Engine(TARGET, EngineConfig("toy"), {"d": Lame(), "e": Guesser()}, SpecConfig(num_speculative_tokens=2))
    assert both.run(both.add_request([1, 2, 3], GREEDY)).drafter == "e"

    class Unwilling(Guesser):
        def start(self, blocks: object, max_rows: int) -> None:
            raise SettingError("it wants more rows")

    with pytest.raises(SettingError, match="it wants more rows"):
        engine_with(Unwilling())


class Chooser(FixedLength):
    """Counts how often it is asked for a drafter."""

    asked = 0

    def choose(self, params: SamplingParams, drafters: Sequence[str]) -> str:
        self.asked += 1
        return drafters[-1]


def test_a_drafter_is_chosen_for_requests_that_run_only() -> None:
    controller = Chooser(2)
    settings = EngineConfig("toy", num_kv_blocks=50, block_size=4, max_num_seqs=1)
    drafters = {"d": Guesser(), "e": Guesser()}
    engine = Engine(TARGET, settings, drafters, SpecConfig(num_speculative_tokens=2), controller)
    grammar = Grammar("regex", "a")
    for refused in (
        lambda: engine.add_request([99], GREEDY),
        lambda: engine.add_request([1], dataclasses.replace(GREEDY, stop=("x",))),
        lambda: engine.add_request([1], dataclasses.replace(GREEDY, grammar=grammar)),
        lambda: engine.add_request([1], GREEDY, SpecParams(prediction=(1, 2))),
        lambda: engine.add_request([1], GREEDY, SpecParams(drafter="f")),
    ):
        with pytest.raises(SettingError):
            refused()
    assert controller.asked == 0
    runs = [engine.add_request([1, 2, 3], dataclasses.replace(GREEDY, n=2)) for _ in range(2)]
    engine.add_request([1], GREEDY, SpecParams(drafter="d"))
    engine.add_request([1], GREEDY, SpecParams(enabled=False))
    assert [request.drafter for request in runs] == ["", ""]
    engine.step()
    engine.abort(runs[1].id)  # it waited all the time
    while engine.has_work:
        engine.step()
    assert controller.asked == 1
    assert [request.drafter for request in runs] == ["e", ""]
    assert RequestOutput.of(runs[0]).stats.drafted > 0


class Greedy(DraftController):
    """Asks for more than there is."""

    def budgets(self, spans: Sequence[Span], rows: int) -> list[int]:
        return [50] * len(spans)

    def observe(self, record: StepRecord) -> None:
        assert record.draft_rows + record.decode_rows + record.prompt_rows <= 16


def test_a_controller_that_asks_for_too_much_is_held_to_the_limits() -> None:
    engine = engine_with(
        TwoModels(TARGET, TARGET, "standard", ModelSettings(model="x")), Greedy(), max_num_batched_tokens=16
    )
    request = engine.add_request([1, 2, 3], GREEDY)
    assert engine.run(request).token_ids == plain([1, 2, 3])


def test_decoding_requests_keep_their_drafts_while_a_long_prompt_is_read() -> None:
    drafter = TwoModels(TARGET, TARGET, "standard", ModelSettings(model="x"))
    engine = engine_with(drafter, max_num_batched_tokens=16)
    short = engine.add_request([1, 2, 3], GREEDY)
    engine.step()
    long = engine.add_request([i % 31 for i in range(150)], GREEDY)
    while short.finished is None:
        engine.step()
    assert long.first_token is None, "the long prompt was to be under way all the time"
    stats = RequestOutput.of(short).stats
    assert stats.tokens_per_step > 3
    assert engine.run(long).token_ids == plain([i % 31 for i in range(150)])


def test_the_draft_model_reads_prompts_within_the_row_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = TwoModels(TARGET, TARGET, "standard", ModelSettings(model="x"))
    engine = engine_with(drafter, max_num_batched_tokens=32)
    widths: list[int] = []
    forward = drafter.runner.forward

    def counted(spans: Sequence[Span], *rest: object) -> object:
        widths.append(sum(span.n_rows for span in spans))
        return forward(spans)

    monkeypatch.setattr(drafter.runner, "forward", counted)
    prompts = [[(i * k) % 31 for i in range(100)] for k in range(1, 5)]
    requests = [engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=60)) for prompt in prompts]
    outputs = [engine.run(request) for request in requests]
    assert max(widths) <= 32
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == plain(prompt, dataclasses.replace(GREEDY, max_tokens=60))
    assert all(output.stats.accepted > 0 for output in outputs)
    assert any("still reading" in reason for output in outputs for reason in output.stats.no_draft)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_ids_that_stand_for_no_token_are_never_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holes = tuple(range(100, 280))
    monkeypatch.setattr(Tokenizer, "unused_ids", holes)
    llm = LLM(str(folder), {"method": "model", "model": str(folder)}, kv_cache_mib=16)
    for params in (SamplingParams(temperature=3.0, n=8, seed=1, max_tokens=32), GREEDY):
        (output,) = llm.generate("Numbers: ", params)
        assert output.stats.accepted > 0
        assert not {token for c in output.completions for token in c.token_ids} & set(holes)


def test_a_token_that_cannot_be_shown_ends_its_own_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder), kv_cache_mib=16)
    other = llm.generate("a draft that is right", GREEDY)[0].token_ids
    bad = llm.generate("Numbers: ", GREEDY)[0].token_ids[5]
    assert bad not in other
    show = Tokenizer.token_bytes

    def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
        if token == bad:
            raise SettingError("no such token")
        return show(tokenizer, token)

    monkeypatch.setattr(Tokenizer, "token_bytes", token_bytes)
    engine = llm.engine
    requests = [engine.add_request(llm.encode(text), GREEDY) for text in ("Numbers: ", "a draft that is right")]
    outputs = [engine.run(request) for request in requests]
    assert outputs[0].completions[0].finish_reason.value == "error"
    assert bad not in outputs[0].token_ids
    assert len(outputs[0].completions[0].drafted) == len(outputs[0].token_ids)
    assert outputs[1].token_ids == other
    with pytest.raises(OutriderError, match="no such token"):
        llm.generate("Numbers: ", GREEDY)


def test_a_stream_that_was_never_read_leaves_nothing_behind(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_mib=16)
    stream = llm.stream("Numbers: ", GREEDY)
    stream.close()
    assert not llm.engine.has_work
    stream = llm.stream("Numbers: ", GREEDY)
    del stream
    assert not llm.engine.has_work


def test_numbers_of_other_libraries_are_numbers(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_mib=16)
    ids = llm.encode("Numbers: ")
    want = llm.generate([ids], SamplingParams(seed=3, max_tokens=8))[0].token_ids
    params = SamplingParams(seed=np.int64(3), max_tokens=np.int32(8), temperature=np.float32(1))  # type: ignore[arg-type]
    assert llm.generate(np.array(ids), params)[0].token_ids == want  # type: ignore[arg-type]
    assert llm.generate([], params) == []


def test_names_that_other_engines_use_are_understood(folder: Path) -> None:
    llm = LLM(str(folder), speculative_config={"method": "ngram", "num_speculative_tokens": 2}, kv_cache_mib=16)
    assert llm.engine.spec.num_speculative_tokens == 2
    assert len(llm.generate("x", sampling_params=GREEDY)[0].token_ids) == 20
    with pytest.raises(SettingError, match="num_speculative_tokens is a setting of speculation"):
        LLM(str(folder), num_speculative_tokens=3)
    with pytest.raises(SettingError, match=r"method is 'mlp_speculator'; allowed is one of none, ngram"):
        LLM(str(folder), "mlp_speculator")
    with pytest.raises(SettingError, match="enabled=False switches speculation off"):
        llm.generate("x", GREEDY, SpecParams(drafter="none"))


def test_a_kv_cache_that_the_machine_cannot_hold_is_refused_before_it_is_made(folder: Path) -> None:
    with pytest.raises(SettingError, match="KV cache of 10000000000 blocks"):
        LLM(str(folder), num_kv_blocks=10_000_000_000)


def test_counters_tell_finished_from_aborted() -> None:
    engine = engine_with(NoDraft())
    engine.run(engine.add_request([1], GREEDY))
    engine.abort(engine.add_request([1], GREEDY).id)
    assert (engine.metrics.requests_finished, engine.metrics.requests_aborted) == (1, 1)
