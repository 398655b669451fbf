"""Heads on the target's hidden states: the law of sampled output, and what must not pass for it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from outrider.core.dist import Dist
from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.engine import Engine
from outrider.spec.drafts import eagle
from tests.engine.drafters import context_for, registered
from tests.engine.harness import make_engine, toy_target
from tests.engine.laws import Law, joint_law, p_value, raw_logits
from tests.toy import toy_config

TARGET = toy_target(toy_config(vocab=6, layers=2, hidden=16, heads=2, kv_heads=1, ffn=16), seed=3)
PROMPT = [1, 4, 2, 3, 3]
ALPHA = 0.001
NAMES = [name for name, _ in registered() if name.split()[0] in ("medusa", "eagle") or "adapter" in name]
BLOCK = ("eagle chain", "eagle third", "self adapter", "self adapter, while sure")


@functools.cache
def law() -> Law:
    return joint_law(raw_logits(TARGET, PROMPT), PROMPT, SamplingParams())


def outputs(engine: Engine, runs: int) -> list[tuple[int, ...]]:
    """Seeded answers of four tokens, of which the first three are kept: the second step drafts two of them."""
    params = [SamplingParams(seed=seed, n=100, max_tokens=4) for seed in range(runs // 100)]
    requests = [engine.add_request(PROMPT, p, SpecParams()) for p in params]
    while engine.has_work:
        engine.step()
    return [tuple(answer.seq.output_ids[:3]) for request in requests for answer in request.answers]


def engine_of(drafter: Any, method: str) -> Engine:
    return make_engine(
        TARGET,
        drafter,
        gamma=4,
        method=method,
        block_size=8,
        num_kv_blocks=800,
        max_num_seqs=250,
        max_num_batched_tokens=2000,
    )


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "standard") for name in NAMES), *((name, "block") for name in BLOCK)]
)
def test_the_law_of_the_first_three_tokens(name: str, method: str) -> None:
    engine = engine_of(dict(registered())[name](context_for(TARGET, method=method)), method)
    assert p_value(outputs(engine, 1000), law()) > ALPHA
    stats = engine.metrics.spec["drafter"]
    assert stats.drafted > 500
    assert 0.05 < stats.acceptance_rate < 0.95


def test_a_chain_that_lies_about_its_draws_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same head, its tokens the likeliest ones under the name of draws."""
    drafter: Any = dict(registered())["eagle chain"](context_for(TARGET))

    def likeliest(dist: Dist, seed: int, base: int, depth: int, index: int) -> int:
        return int(dist.ids[dist.probs.argmax()])

    monkeypatch.setattr(eagle, "draft_pick_for", lambda method: likeliest)
    assert p_value(outputs(engine_of(drafter, "standard"), 2000), law()) < 1e-6
