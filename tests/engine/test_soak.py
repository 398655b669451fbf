"""A thousand requests, a third of them aborted: nothing is left behind, neither blocks nor state nor memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import bits
from outrider.core.types import Span
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.drafts.ngram import Ngram, NgramSettings
from outrider.spec.drafts.none import NoDraft
from outrider.spec.draws import draft_pick
from outrider.spec.proposer import Proposer
from tests.engine.harness import make_engine, toy_target
from tests.toy import toy_config

VOCAB = 16
SHAPE: dict[str, Any] = {"vocab": VOCAB, "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16}
DRAFTERS = ("none", "ngram", "random", "model")
STEM = [int(t) for t in np.random.default_rng(0).integers(VOCAB, size=12)]


class RandomTrees(Proposer):
    """Trees of random shape with any tokens, drawn from an honest uniform q; it keeps nothing."""

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self.tree(span) for span in spans]

    def tree(self, span: Span) -> Draft:
        seq, uniform = span.seq, Dist.dense(np.ones(VOCAB))
        parents = [bits(seq.seed, len(seq), node) % (node + 1) - 1 for node in range(span.budget)]
        tokens = [draft_pick(uniform, seq.seed, len(seq), 0, node) for node in range(span.budget)]
        return Draft.tree(tokens, parents, [uniform] * span.budget)


def engine(caching: bool) -> Engine:
    target = toy_target(toy_config(**SHAPE), seed=1, eos=(3,))
    proposers = {
        "none": NoDraft(),
        "ngram": Ngram(NgramSettings(prompt_lookup_branches=2)),
        "random": RandomTrees(),
        "model": TwoModels(target, target, "standard", ModelSettings("toy", draft_tree="2,1,1")),
    }
    return make_engine(target, proposers, num_kv_blocks=24, max_num_batched_tokens=40, enable_prefix_caching=caching)


def containers(root: Engine) -> Iterator[tuple[str, Sized]]:
    """Every container that the engine's parts hold, by its place; the model's weights and settings aside."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("engine", root)]
    while todo:
        where, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, set, tuple)) or hasattr(value, "popleft"):
            yield where, value
            items = value.items() if isinstance(value, dict) else enumerate(value)
            todo += [(f"{where}[{key!r}]", item) for key, item in items if hasattr(item, "__dict__")]
        elif type(value).__module__.startswith(("outrider", "tests")):
            skipped = ("target", "decoder", "drafter", "config")
            todo += [(f"{where}.{key}", item) for key, item in vars(value).items() if key not in skipped]


def sizes(root: Engine) -> dict[str, int]:
    """How many things each container holds, but for the plain counters of the metrics."""
    return {where: len(value) for where, value in containers(root) if ".metrics" not in where}


def submit(to: Engine, rng: np.random.Generator) -> tuple[Request, int | None]:
    """A request of random kind, and at which of its steps it is to be aborted, if at all."""
    own = [int(t) for t in rng.integers(VOCAB, size=rng.integers(1, 5))]
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 1.0])),
        seed=int(rng.integers(100)),
        n=int(rng.choice([1, 1, 1, 1, 1, 2])),
        max_tokens=int(rng.integers(1, 17)),
    )
    spec = SpecParams(drafter=str(rng.choice(DRAFTERS)))
    request = to.add_request([*STEM[: rng.integers(0, 13)], *own], params, spec)
    return request, int(rng.integers(0, 6)) if rng.random() < 1 / 3 else None


def serve(to: Engine, n: int, rng: np.random.Generator) -> int:
    """Serves ``n`` requests, about ten at a time, to the last; returns how many were really aborted."""
    before, limit = to.metrics.requests_aborted, 400 * n
    patience: dict[int, int] = {}
    while n or to.has_work:
        while n and len(to.sequences) < 10:
            request, aborts = submit(to, rng)
            n -= 1
            if aborts is not None:
                patience[request.id] = aborts
        for request_id in [r for r, left in patience.items() if left <= 0]:
            to.abort(request_id)
            del patience[request_id]
        to.step()
        to.check_integrity()
        patience = {request_id: left - 1 for request_id, left in patience.items()}
        limit -= 1
        assert limit, "the requests do not end"
    return to.metrics.requests_aborted - before


@dataclass(frozen=True)
class Footprint:
    """What the process holds: objects that the collector knows, and blocks of Python's allocator."""

    objects: int
    blocks: int

    @staticmethod
    def now() -> Footprint:
        gc.collect()
        return Footprint(len(gc.get_objects()), sys.getallocatedblocks())


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_after_a_thousand_requests_everything_is_as_it_was(caching: bool) -> None:
    served = engine(caching)
    rng = np.random.default_rng(7)
    fresh = sizes(served)
    aborted = serve(served, 300, rng)  # fills what is bounded by the pool or the vocabulary
    warm, early = sizes(served), Footprint.now()
    tracemalloc.start()
    try:
        aborted += serve(served, 150, rng)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        aborted += serve(served, 250, rng)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    aborted += serve(served, 300, rng)
    late, after = Footprint.now(), sizes(served)

    assert served.blocks.n_free == served.blocks.n_blocks
    assert served.metrics.requests_finished + served.metrics.requests_aborted == 1000
    assert aborted > 200, "too few were really aborted"
    assert served.metrics.preemptions > 10, "the pool was never short: the test is too easy"
    assert late.objects - early.objects < 70, "objects are left behind: one in ten requests"
    assert late.blocks - early.blocks < 700, "memory is left behind: one small object a request"
    assert traced < 50_000, f"{traced} bytes more after 250 requests"
    assert set(after) == set(warm), "containers appear that are kept for ever"
    grown = {where: n for where, n in after.items() if n > max(fresh.get(where, 0), served.blocks.n_blocks)}
    assert grown == {}
    assert_nothing_by_sequence(served)


def assert_nothing_by_sequence(served: Engine) -> None:
    """No container outside the block manager and the metrics knows a sequence or request any more."""
    assert not [*served._requests, *served._request_of, *served._answer_of, *served._aborts]
    scheduler = served.scheduler
    assert not [*scheduler.waiting, *scheduler.running, *scheduler._last_step]
    ngram, model = served.proposers["ngram"], served.proposers["model"]
    assert isinstance(ngram, Ngram)
    assert isinstance(model, TwoModels)
    assert not [*ngram._indexes, *model._followers]
    assert len(model._filled) <= served.blocks.n_blocks


def test_state_that_is_left_behind_is_seen() -> None:
    """A negative control: a drafter that forgets nothing."""

    class Hoarder(Ngram):
        def release(self, seq_id: int) -> None:
            pass

    target = toy_target(toy_config(**SHAPE), seed=1)
    served = make_engine(target, Hoarder(NgramSettings()))
    fresh = sizes(served)
    for i in range(40):
        served.run(served.add_request([i % VOCAB, 1, 2], SamplingParams(temperature=0, max_tokens=3)))
    after: Mapping[str, int] = sizes(served)
    place = "engine._drafters.proposers['drafter']._indexes"
    assert (fresh[place], after[place]) == (0, 40)
