"""Toy targets, engines and reference runs for the tests of the whole engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import bits
from outrider.engine.engine import Engine
from outrider.engine.request import Delta, Request, RequestOutput
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.ops.contract import Ops
from outrider.ops.reference import ReferenceOps
from outrider.spec.controller import DraftController
from outrider.spec.drafts.none import NoDraft
from outrider.spec.proposer import Proposer
from tests.toy import MemorySource, toy_config

PATIENCE = 100
"""Steps without a new token or a new row of KV after which a test gives up: the engine spins."""


class ToyTokenizer:
    """What the engine asks of a tokenizer: token i is the i-th of ``pieces``; one may be special, some unused."""

    strips_leading_space = False

    def __init__(self, pieces: Sequence[str | bytes], special: int = -1, unused_ids: tuple[int, ...] = ()) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.special, self.unused_ids = special, unused_ids
        self.vocab_size = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.unused_ids:
            raise SettingError(f"token id is {token_id}; allowed is a known token")
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == self.special

    def first_difference(self, other: ToyTokenizer) -> tuple[int, str | None, str | None] | None:
        for i, (mine, theirs) in enumerate(itertools.zip_longest(self.pieces, other.pieces)):
            if mine != theirs and self.special != i != other.special:
                return i, mine and mine.decode(), theirs and theirs.decode()
        return None


def toy_target(
    config: ModelConfig | None = None,
    seed: int = 0,
    *,
    std: float = 0.4,
    dtype: torch.dtype = torch.float64,
    quantization: str | None = None,
    tokenizer: ToyTokenizer | None = None,
    eos: Sequence[int] = (),
    ops: Ops | None = None,
) -> LoadedModel:
    """A toy model as the engine takes it; two with the same config and seed have the same weights."""
    config = config or toy_config()
    source = MemorySource(config, seed, std)
    decoder = Decoder.from_source(source, ops or ReferenceOps(), dtype, "cpu", quantization)
    shown: Any = tokenizer
    return LoadedModel(f"toy-{seed}", replace(config, eos_ids=tuple(eos)), decoder, shown, None, decoder.weight_bytes)


def with_eos(model: LoadedModel, *eos: int) -> LoadedModel:
    """The same weights with other end tokens (the EOS trick: declare any token to be EOS)."""
    return replace(model, config=replace(model.config, eos_ids=eos))


def make_engine(
    target: LoadedModel,
    proposers: Proposer | Mapping[str, Proposer] | None = None,
    *,
    gamma: int = 4,
    method: str = "standard",
    controller: DraftController | None = None,
    **config: Any,
) -> Engine:
    """An engine over a toy target: 64 blocks of 4 tokens unless ``config`` (fields of EngineConfig) says otherwise."""
    if proposers is None:
        proposers = NoDraft()
    named = proposers if isinstance(proposers, Mapping) else {"drafter": proposers}
    settings = EngineConfig(**{"model": "toy", "block_size": 4, "num_kv_blocks": 64, **config})
    spec = SpecConfig(num_speculative_tokens=gamma, rejection_sample_method=method)
    return Engine(target, settings, named, spec, controller)


def finish(engine: Engine, after_step: Callable[[list[Delta]], object] | None = None) -> None:
    """Steps until nothing is left to do, checking the books after each step, and that every block came back."""
    idle = 0
    while engine.has_work:
        before = [(len(seq), seq.n_computed) for seq in engine.sequences]
        deltas = engine.step()
        engine.check_integrity()
        for seq in engine.sequences:
            assert len(seq.blocks) == engine.blocks.blocks_for(seq.n_computed), "rejected drafts keep their blocks"
        if after_step is not None:
            after_step(deltas)
        moved = [(len(seq), seq.n_computed) for seq in engine.sequences] != before
        idle = 0 if moved else idle + 1
        assert idle < PATIENCE, "no request made progress for many steps"
    assert engine.blocks.n_free == engine.blocks.n_blocks, "blocks leaked"
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


Job = tuple[Sequence[int], SamplingParams] | tuple[Sequence[int], SamplingParams, SpecParams]


def run_all(engine: Engine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Runs all requests at once to their ends."""
    requests: list[Request] = [engine.add_request(*job) for job in jobs]
    finish(engine)
    return [RequestOutput.of(request) for request in requests]


def plain(target: LoadedModel, prompt: Sequence[int], params: SamplingParams, **config: Any) -> RequestOutput:
    """The same request alone, without a drafter: what every other run must equal."""
    return run_all(make_engine(target, **config), [(prompt, params)])[0]


def assert_same(got: RequestOutput, want: RequestOutput, what: object = "") -> None:
    """Token ids, text and finish reason of every choice are equal."""
    assert len(got.completions) == len(want.completions)
    for mine, theirs in zip(got.completions, want.completions, strict=True):
        assert (mine.token_ids, mine.finish_reason.value, mine.text, mine.error) == (
            theirs.token_ids,
            theirs.finish_reason.value,
            theirs.text,
            theirs.error,
        ), what


def greedy(max_tokens: int = 24, **rules: Any) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rules)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt; a shorter one of the same seed is its beginning."""
    return [random.Random(1000 * seed + i).randrange(32) for i in range(length)]


def all_pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of the factors' values that hold every pair of values of any two factors."""
    sizes = [range(len(factor)) for factor in factors]
    places = itertools.combinations(range(len(factors)), 2)
    left = {((a, i), (b, j)) for a, b in places for i in sizes[a] for j in sizes[b]}
    rows: list[tuple[Any, ...]] = []
    while left:
        chosen = dict(min(left))
        for factor in (factor for factor in range(len(factors)) if factor not in chosen):
            # Of values that cover as many new pairs take any one, but not always the same.
            gains = [
                (sum(tuple(sorted((pair, (factor, i)))) in left for pair in chosen.items()), bits(len(rows), factor, i))
                for i in sizes[factor]
            ]
            chosen[factor] = gains.index(max(gains))
        left -= set(itertools.combinations(sorted(chosen.items()), 2))
        rows.append(tuple(factors[factor][i] for factor, i in sorted(chosen.items())))
    return rows


def run_all_sorts(target: LoadedModel, drafter: Proposer) -> None:
    """Chunked prompts, several sequences, forks, sampled and greedy, preemption, and it all again from the cache."""
    engine = make_engine(target, drafter, gamma=3, num_kv_blocks=10, max_num_batched_tokens=14)
    jobs = [
        (prompt_of(14, 1), greedy(8)),
        (prompt_of(10, 1), greedy(6)),
        (prompt_of(5, 2), SamplingParams(temperature=0.8, seed=3, max_tokens=8, n=2)),
    ]
    for _ in range(2):
        run_all(engine, jobs)
    assert engine.metrics.preemptions > 0
    assert engine.metrics.cached_prompt_tokens > 0
