"""Whatever comes, whenever it comes and however good the drafts are: every request gets what it would get alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import choice_seed
from outrider.core.types import FinishReason, Status, StepRecord
from outrider.engine.engine import Engine
from outrider.engine.request import Delta, Request, RequestOutput
from outrider.spec.controller import FixedLength
from outrider.spec.drafts.combine import Combine, Part
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.drafts.ngram import Ngram, NgramSettings
from outrider.spec.drafts.suffix import Suffix, SuffixSettings
from outrider.spec.proposer import Proposer
from tests.engine.drafters import RandomTree, Shape
from tests.engine.harness import make_engine, toy_target
from tests.toy import toy_config

VOCAB, LONGEST, EOS = 12, 12, 0
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16}
TARGET = toy_target(toy_config(vocab=VOCAB, **SHAPE), seed=6, std=0.7, eos=(EOS,))
DRAFTER = toy_target(toy_config(vocab=VOCAB, **SHAPE), seed=4)
STEM = (5, 1, 4, 4, 2, 8, 0, 3, 11, 6, 9, 1)
PROMPTS = [STEM[:n] for n in (1, 2, 5, 8, 11, 12)] + [(*STEM[:n], 10, 2) for n in (0, 4, 9)] + [(2,) * 10]
PATIENCE = 100


@cache
def alone(prompt: tuple[int, ...], temperature: float, seed: int) -> tuple[int, ...]:
    """What plain decoding gives for one choice, alone in a large engine, past any EOS; the same at each run."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=LONGEST + 6, ignore_eos=True)
    engine = make_engine(TARGET, method="coupled", block_size=16)  # greedy output is the same with every method
    return engine.run(engine.add_request(prompt, params)).token_ids


@dataclass
class Job:
    """One request, when it comes and when its caller loses patience."""

    prompt: tuple[int, ...]
    params: SamplingParams
    spec: SpecParams
    arrives: int
    aborts: int | None
    request: Request | None = None

    def expected(self, index: int, room: int) -> tuple[tuple[int, ...], FinishReason]:
        """Tokens and finish reason of choice ``index`` when prompt and output may have ``room`` tokens."""
        assert self.params.seed is not None
        tokens = alone(self.prompt, self.params.temperature, choice_seed(self.params.seed, index))
        tokens = tokens[: min(self.params.max_tokens, room - len(self.prompt))]
        if EOS in tokens and not self.params.ignore_eos:
            return tokens[: tokens.index(EOS) + 1], FinishReason.STOP
        return tokens, FinishReason.LENGTH


class Recorder(FixedLength):
    """A fixed length that keeps the records of all steps."""

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self.records: list[StepRecord] = []

    def observe(self, record: StepRecord) -> None:
        self.records.append(record)


def suffix() -> Suffix:
    return Suffix(SuffixSettings(suffix_decoding_max_cached_requests=4))


def drafters(draw: Any, method: str, answers: Mapping[tuple[int, ...], tuple[int, ...]]) -> dict[str, Proposer]:
    shape = Shape(draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([0.0, 0.6, 0.9, 1.0, 1.0])), method)
    tree = draw(st.sampled_from(["", "2,2,1", "1,3"]))
    return {
        "random": RandomTree(VOCAB, shape, answers),
        "ngram": Ngram(NgramSettings(prompt_lookup_branches=draw(st.integers(1, 3)))),
        "suffix": suffix(),
        "combine": Combine(
            [Part("suffix", suffix()), Part("model", TwoModels(DRAFTER, TARGET, method, ModelSettings("toy")))],
            draw(st.sampled_from(["first", "extend", "merge"])),
        ),
        "model": TwoModels(DRAFTER, TARGET, method, ModelSettings("toy", draft_tree=tree)),
    }


@st.composite
def jobs(draw: Any, sampled: bool) -> Job:
    whole = st.integers
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.8, 2.0])) if sampled else 0,
        seed=draw(whole(0, 1)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        max_tokens=draw(whole(1, LONGEST)),
        ignore_eos=draw(whole(0, 3)) == 0,
    )
    drafter = draw(st.sampled_from(["random", "random", "ngram", "suffix", "combine", "model"]))
    spec = SpecParams(draw(whole(0, 5)) > 0, drafter, draw(st.sampled_from([None, None, 0, 1, 3])))
    aborts = draw(whole(0, 25)) if draw(whole(0, 3)) == 0 else None
    return Job(draw(st.sampled_from(PROMPTS)), params, spec, draw(whole(0, 20)), aborts)


class Watchdog:
    """Fails when a running sequence, or the engine as a whole, stands still."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[int, tuple[tuple[int, int], int]] = {}
        self.steps = self.last_output = 0

    def check(self, deltas: list[Delta]) -> None:
        self.steps += 1
        self.last_output = self.steps if deltas else self.last_output
        assert self.steps - self.last_output < PATIENCE, "many steps without a single token"
        for seq in self.engine.sequences:
            state = (len(seq), seq.n_computed)
            if seq.status is Status.RUNNING and self.seen.get(seq.id, ((0, 0), 0))[0] == state:
                assert self.steps - self.seen[seq.id][1] < PATIENCE, f"sequence {seq.id} stands still"
            else:
                self.seen[seq.id] = (state, self.steps)


def play(engine: Engine, todo: list[Job]) -> dict[tuple[int, int], list[int]]:
    """Runs all jobs to their ends, books checked after each step; the streamed tokens by request and choice."""
    streamed: dict[tuple[int, int], list[int]] = {}
    watchdog = Watchdog(engine)
    clock = 0
    while engine.has_work or any(job.request is None for job in todo):
        for job in todo:
            if job.request is None and job.arrives <= clock:
                job.request = engine.add_request(job.prompt, job.params, job.spec)
            if job.request is not None and job.aborts == clock:
                engine.abort(job.request.id)
        deltas = engine.step() if engine.has_work else []
        engine.check_integrity()
        watchdog.check(deltas or ([] if engine.has_work else [None]))  # type: ignore[list-item]
        for delta in deltas:
            streamed.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        clock += 1
    assert engine.blocks.n_free == engine.blocks.n_blocks, "blocks leaked"
    assert not [*engine.sequences, *engine.scheduler.running, *engine.scheduler.waiting]
    return streamed


def check_records(engine: Engine, outputs: list[RequestOutput], records: list[StepRecord]) -> None:
    """Answers, requests, steps and the engine's totals tell the same story."""
    metrics = engine.metrics
    assert metrics.generated_tokens == sum(out.usage["completion_tokens"] for out in outputs)
    aborted = sum(any(c.finish_reason is FinishReason.ABORT for c in out.completions) for out in outputs)
    assert (metrics.requests_finished, metrics.requests_aborted) == (len(outputs) - aborted, aborted)
    assert metrics.steps == len(records)
    for name in ("prompt_rows", "decode_rows", "draft_rows"):
        assert getattr(metrics, name) == sum(getattr(record, name) for record in records)
    for record in records:
        assert record.prompt_rows + record.decode_rows + record.draft_rows == sum(span.rows for span in record.spans)
        assert record.draft_rows == sum(span.drafted for span in record.spans)
        assert all(len(span.depths) == span.drafted for span in record.spans)
        assert all(span.accepted <= max(span.depths, default=0) for span in record.spans)
        assert all(span.emitted - span.accepted in (0, 1) for span in record.spans)
        assert 0 <= record.free_blocks <= engine.blocks.n_blocks
    for name, stats in metrics.spec.items():
        own = [out.stats for out in outputs if out.drafter == name]
        for count in ("steps", "drafts", "drafted", "accepted", "emitted"):
            assert getattr(stats, count) == sum(getattr(part, count) for part in own)
    for out in outputs:
        assert 0 <= out.cached_tokens < len(out.prompt_ids)
        for completion in out.completions:
            stats = completion.stats
            assert stats.accepted <= stats.drafted
            assert stats.drafts <= stats.steps
            assert stats.emitted == len(completion.token_ids) == len(completion.drafted)
            assert stats.accepted == sum(completion.drafted) == sum(stats.accepted_per_position)
            assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
            cut = stats.accepted + stats.steps - stats.emitted
            assert cut == 0 or (cut == 1 and completion.finish_reason is FinishReason.STOP and completion.drafted[-1])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_every_request_gets_what_it_gets_alone_and_every_block_comes_back(data: st.DataObject) -> None:
    draw, whole = data.draw, st.integers
    method = draw(st.sampled_from(["standard", "block", "coupled"]))
    sampled = method == "coupled" and draw(st.booleans())
    todo = draw(st.lists(jobs(sampled), min_size=1, max_size=7))
    answers = {job.prompt: alone(job.prompt, job.params.temperature, job.params.seed or 0) for job in todo}
    size = draw(whole(1, 6))
    gamma = draw(whole(0, 6))
    recorder = Recorder(gamma)
    engine = make_engine(
        TARGET,
        drafters(draw, method, answers),
        gamma=gamma,
        method=method,
        controller=recorder,
        block_size=size,
        num_kv_blocks=-(-draw(whole(16, 70)) // size),
        max_num_seqs=draw(whole(1, 6)),
        max_num_batched_tokens=draw(whole(1, 24)),
        enable_prefix_caching=draw(st.booleans()),
    )
    streamed = play(engine, todo)
    room = min(engine.limits.max_model_len, engine.limits.pool_tokens)
    outputs = []
    for job in todo:
        assert job.request is not None
        outputs.append(RequestOutput.of(job.request))
        for completion in outputs[-1].completions:
            tokens, finish = job.expected(completion.index, room)
            if completion.finish_reason is FinishReason.ABORT:
                assert job.aborts is not None
                assert completion.token_ids == tokens[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.finish_reason) == (tokens, finish)
            assert streamed.get((job.request.id, completion.index), []) == list(completion.token_ids)
    check_records(engine, outputs, recorder.records)


def test_the_reference_runs_differ_end_early_and_are_not_all_alike() -> None:
    """A negative control of the comparison: outputs that were all the same would prove nothing."""
    assert len({alone(prompt, 0, 0) for prompt in PROMPTS}) > len(PROMPTS) // 2
    assert len({alone(PROMPTS[3], 0.8, choice_seed(0, i)) for i in range(3)}) == 3
    assert {EOS in alone(prompt, 0, 0)[:LONGEST] for prompt in PROMPTS} == {True, False}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_a_draft_model_with_the_targets_weights_is_never_wrong(data: st.DataObject) -> None:
    """Wrong KV in the drafter's pool would not change the output, only what is accepted: so all must be."""
    draw, whole = data.draw, st.integers
    size = draw(whole(1, 5))
    engine = make_engine(
        TARGET,
        TwoModels(TARGET, TARGET, "standard", ModelSettings("toy")),
        gamma=draw(whole(1, 5)),
        block_size=size,
        num_kv_blocks=-(-draw(whole(26, 40)) // size),
        max_num_seqs=draw(whole(3, 6)),
        max_num_batched_tokens=draw(whole(12, 40)),
        enable_prefix_caching=draw(st.booleans()),
    )
    todo = []
    for prompt in draw(st.lists(st.sampled_from(PROMPTS), min_size=3, max_size=6)):
        params = SamplingParams(temperature=0, n=draw(whole(1, 3)), max_tokens=draw(whole(6, LONGEST)), ignore_eos=True)
        todo.append(Job(prompt, params, SpecParams(), draw(whole(0, 3)), None))
    play(engine, todo)
    for stats in engine.metrics.spec.values():
        assert stats.accepted == stats.drafted
