"""Drafters, draft lengths and batch sizes against plain decoding, on the same prompts, greedily.

A *setting* is a drafter, a draft length and a batch size; a *load* is the requests that one setting answers before the
next setting has its turn. The settings of a batch size take turns load by load, in an order that rotates, so that none
of them always comes first and all see the same hours of a shared machine.

A drafter may remember answers, but no prompt finds its own: each setting is a tenant of its own, and so are its warm-up
and, where a load repeats prompts until it is full, each repetition.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.identity import encode
from outrider.bench.prompts import BenchPrompt
from outrider.core.errors import OutriderError, SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.answer import SpecStats
from outrider.engine.llm import LLM, auto_controller
from outrider.engine.request import Request, RequestOutput, check_request
from outrider.spec.registry import PLAIN

ROUNDS = 4
"""Requests in a load over the batch size, at most: enough that the end, where the batch runs empty, weighs little."""

WARM_UP_TOKENS = 8

WARM_UP = -1
"""The index of the load that does not count."""

AUTO = -1
"""In place of a number of draft tokens: the controller decides."""


@dataclass(frozen=True, order=True)
class Setting:
    """One way to decode: the drafter, draft tokens a step (0 for plain decoding, ``AUTO``), and requests in flight."""

    drafter: str
    gamma: int
    batch: int

    @property
    def plain(self) -> bool:
        return self.drafter == PLAIN


@dataclass(frozen=True)
class Load:
    """Requests of one category: ``prompts`` are places in the list of prompts. ``index`` counts those of its batch."""

    batch: int
    index: int
    category: str
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """One load under one setting, raw: rates are derived in ``bench.report``.

    ``seconds`` is the wall time of the load; ``decode_seconds`` the part of it in steps without a prompt row, which
    yielded ``decode_tokens``. ``steps``, ``drafted`` and ``accepted`` are ``SpecStats``, summed over the requests.
    ``outputs`` has a digest of each answer's token ids.
    """

    setting: Setting
    load: int
    category: str
    prompts: tuple[int, ...]
    tokens: int
    decode_tokens: int
    seconds: float
    decode_seconds: float
    steps: int
    drafted: int
    accepted: int
    preemptions: int
    outputs: tuple[str, ...]


def settings_for(lengths: Mapping[str, Sequence[int]], batches: Sequence[int]) -> list[Setting]:
    """For each batch size plain decoding, then each drafter with each of its draft lengths."""
    each = [(drafter, gamma) for drafter, gammas in lengths.items() for gamma in gammas if drafter != PLAIN]
    return [Setting(drafter, gamma, batch) for batch in batches for drafter, gamma in [(PLAIN, 0), *each]]


def loads_for(prompts: Sequence[BenchPrompt], batch: int) -> list[Load]:
    """The loads of a batch size: single prompts, or up to ``ROUNDS`` batches of one category.

    Where a category has fewer prompts than the batch they are repeated until it is full.
    """
    members: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        members.setdefault(prompt.kind, []).append(place)
    size = 1 if batch == 1 else ROUNDS * batch
    loads: list[Load] = []
    for category, places in members.items():
        parts = -(-len(places) // size)
        for part in range(parts):
            own = places[part * len(places) // parts : (part + 1) * len(places) // parts]
            full = [own[i % len(own)] for i in range(max(len(own), batch))]
            loads.append(Load(batch, len(loads), category, tuple(full)))
    return loads


def turns(settings: Sequence[Setting], loads: Sequence[Load]) -> Iterator[tuple[Load, Setting]]:
    """Every load under every setting of its batch size; who comes first moves on by one from load to load."""
    for load in loads:
        own = [setting for setting in settings if setting.batch == load.batch]
        shift = load.index % len(own)
        for setting in own[shift:] + own[:shift]:
            yield load, setting


def check_prompts(llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams) -> None:
    """Raises SettingError, before any work, for a prompt that the engine cannot take."""
    for number, prompt in enumerate(prompts, 1):
        try:
            check_request(encode(llm, prompt), params, llm.engine.limits)
        except SettingError as error:
            raise SettingError(f"prompt {number} ({prompt.kind}): {error}") from None


def run_bench(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    settings: Sequence[Setting],
    params: SamplingParams,
    records: list[Record],
    done: Callable[[Record], None],
) -> None:
    """Runs what is not among ``records`` yet, adds it there and reports each load to ``done``."""
    controllers = {False: llm.engine.controller}
    if any(setting.gamma == AUTO for setting in settings):
        controllers[True] = auto_controller(llm.engine)
    known = {(record.setting, record.load) for record in records}
    for batch in dict.fromkeys(setting.batch for setting in settings):
        loads = loads_for(prompts, batch)
        todo = [(load, setting) for load, setting in turns(settings, loads) if (setting, load.index) not in known]
        short = SamplingParams(temperature=0.0, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
        for setting in dict.fromkeys(setting for _, setting in todo):
            first = Load(batch, WARM_UP, "", loads[0].prompts[:batch])
            llm.engine.controller = controllers[setting.gamma == AUTO]
            run_load(llm, prompts, first, setting, short)  # the first passes of a process are slow
        for load, setting in todo:
            llm.engine.controller = controllers[setting.gamma == AUTO]
            record = run_load(llm, prompts, load, setting, params)
            records.append(record)
            done(record)
    llm.engine.controller = controllers[False]


def run_load(llm: LLM, prompts: Sequence[BenchPrompt], load: Load, setting: Setting, params: SamplingParams) -> Record:
    """Keeps ``setting.batch`` requests in flight until the load is done: where one ends the next one enters.

    A prompt is encoded when its request enters, inside the measured time.
    """
    engine, metrics = llm.engine, llm.engine.metrics
    length = None if setting.gamma == AUTO else setting.gamma
    preemptions, tokens, decode_tokens, decode_seconds = metrics.preemptions, metrics.generated_tokens, 0, 0.0
    requests: list[Request] = []
    begin = before = time.perf_counter()
    try:
        while True:
            in_flight = sum(request.finished is None for request in requests)
            while in_flight < setting.batch and len(requests) < len(load.prompts):
                place = len(requests)
                ids = encode(llm, prompts[load.prompts[place]])
                spec = SpecParams(drafter=setting.drafter, max_draft=length, tenant=_tenant(setting, load, place))
                requests.append(engine.add_request(ids, params, spec))
                in_flight += 1
            if not in_flight:
                break
            rows, generated = metrics.prompt_rows, metrics.generated_tokens
            engine.step()
            now = time.perf_counter()
            if metrics.prompt_rows == rows:
                decode_seconds += now - before
                decode_tokens += metrics.generated_tokens - generated
            before = now
    finally:
        for request in requests:
            engine.abort(request.id)
    outputs = [RequestOutput.of(request) for request in requests]
    for error in (completion.error for output in outputs for completion in output.completions if completion.error):
        raise OutriderError(f"a request of {setting} ended with an error: {error}")
    stats = SpecStats.total(output.stats for output in outputs)
    return Record(
        setting=setting,
        load=load.index,
        category=load.category,
        prompts=load.prompts,
        tokens=metrics.generated_tokens - tokens,
        decode_tokens=decode_tokens,
        seconds=before - begin,
        decode_seconds=decode_seconds,
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        preemptions=metrics.preemptions - preemptions,
        outputs=tuple(_digest(output.token_ids) for output in outputs),
    )


def _tenant(setting: Setting, load: Load, place: int) -> str:
    """Who asks for the prompt at ``place`` of a load: somebody whom its answer, if given before, is kept from."""
    before = load.prompts[:place].count(load.prompts[place])
    return f"{setting}, {'warm-up' if load.index == WARM_UP else 'run'} {before}"


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]
