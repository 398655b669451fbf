"""Sampled output has exactly the target's law, through the whole engine; and what must not pass does not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.engine import Engine
from outrider.spec.proposer import Proposer
from tests.engine.drafters import RandomTree, Script, Shape, context_for, registered, scripted, self_drafter
from tests.engine.harness import assert_same, make_engine, plain, run_all, toy_target
from tests.engine.laws import History, Law, joint_law, p_value, raw_logits
from tests.toy import toy_config

TINY = toy_config(vocab=6, layers=1, hidden=16, heads=2, kv_heads=1, ffn=16)
TARGET = toy_target(TINY, seed=3)
PROMPT = [1, 4, 2]
RUNS = 20_000
ALPHA = 0.001  # a right engine is refused this often; a wrong one must fail by far more
RULES = ("standard", "block", "coupled")


@functools.cache
def free_law() -> Law:
    return joint_law(raw_logits(TARGET, PROMPT), PROMPT, SamplingParams())


def draw(
    engine: Engine, drafter: str, params: SamplingParams, runs: int, first_seed: int = 0, **spec: bool
) -> list[Any]:
    """``runs`` seeded requests of three tokens, as choices of 100 each, all put into the engine at once.

    Runs of one seed are related whatever drafts for them: give each drafter other seeds where runs are put together.
    """
    settings = {name: getattr(params, name) for name in params.__dataclass_fields__ if name not in ("n", "seed")}
    settings["max_tokens"] = 3
    per = 100
    return [
        engine.add_request(PROMPT, SamplingParams(**settings, seed=seed, n=per), SpecParams(drafter=drafter, **spec))
        for seed in range(first_seed, first_seed + runs // per)
    ]


def wide_engine(proposers: Mapping[str, Proposer], method: str, model: Any = TARGET, gamma: int = 4) -> Engine:
    return make_engine(
        model,
        proposers,
        gamma=gamma,
        method=method,
        block_size=8,
        num_kv_blocks=1600,
        max_num_seqs=500,
        max_num_batched_tokens=4000,
    )


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert engine.blocks.n_free == engine.blocks.n_blocks


def outputs(requests: Sequence[Any]) -> list[History]:
    return [tuple(answer.seq.output_ids) for request in requests for answer in request.answers]


def trees(method: str, **options: Any) -> dict[str, RandomTree]:
    """Chains and trees, certain and sampled."""
    return {
        f"{tree=} {sampled=}": RandomTree(6, Shape(tree=tree, sampled=sampled, method=method, **options))
        for tree in (False, True)
        for sampled in (False, True)
    }


@pytest.mark.parametrize("method", RULES)
def test_the_law_of_the_first_three_tokens(method: str) -> None:
    """20,000 runs a rule: chains and trees, certain and sampled drafts, scripted and from a draft model."""
    context = context_for(TARGET, method=method)
    models = {name: build(context) for name, build in registered() if name in ("model other", "model other tree")}
    proposers: dict[str, Proposer] = {**trees(method), **models}
    engine = wide_engine(proposers, method)
    share = {name: 2_000 if name in models else 4_000 for name in proposers}
    apart = 0 if method == "coupled" else 1000
    requests = {name: draw(engine, name, SamplingParams(), share[name], i * apart) for i, name in enumerate(share)}
    drain(engine)
    everything: list[History] = []
    for name, mine in requests.items():
        stats = engine.metrics.spec[name]
        assert 0.1 < stats.acceptance_rate < 0.9, f"{name} accepts {stats.acceptance_rate}: nothing is at stake"
        assert p_value(outputs(mine), free_law()) > ALPHA, name
        everything += outputs(mine)
    assert len(everything) == RUNS
    if method == "coupled":
        n = 2_000
        firsts = [outputs(mine)[:n] for mine in requests.values()]
        assert all(first == firsts[0] for first in firsts)
    else:
        assert p_value(everything, free_law()) > ALPHA


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("deceit", [3.0, 100.0])
def test_a_wrong_q_is_caught(method: str, tree: bool, deceit: float) -> None:
    """Negative control: tokens from a sharper law than the reported one, or an argmax reported as a draw, must fail."""
    shape = Shape(tree=tree, sampled=True, method=method, deceit=deceit)
    engine = wide_engine({"liar": RandomTree(6, shape)}, method)
    requests = draw(engine, "liar", SamplingParams(), 1_000)
    drain(engine)
    assert p_value(outputs(requests), free_law()) < 1e-9


def test_coupled_verification_needs_no_q() -> None:
    """The same lies change nothing where the target's own draw decides."""
    liars = {
        f"{deceit}": RandomTree(6, Shape(sampled=True, method="coupled", deceit=deceit)) for deceit in (1.0, 100.0)
    }
    engine = wide_engine(liars, "coupled")
    first, second = [draw(engine, name, SamplingParams(), 1_000) for name in liars]
    drain(engine)
    assert outputs(first) == outputs(second)


def test_a_repeatable_request_has_the_law_and_is_its_seeds() -> None:
    """On an engine of another rule: right or wrong drafts, drawn ones included, and none give the same answers, those
    of the coupled rule. Without asking for it they do not."""
    proposers: dict[str, Proposer] = {**trees("standard"), "wrong": Script(5, 5)}

    def answers(method: str, **spec: bool) -> list[list[History]]:
        engine = wide_engine(proposers, method)
        requests = [draw(engine, name, SamplingParams(), 400, **spec) for name in proposers]
        drain(engine)
        return [outputs(mine) for mine in requests]

    first, *others = answers("standard", repeatable=True)
    assert others == [first] * (len(proposers) - 1)
    assert p_value(first, free_law()) > ALPHA
    assert answers("standard", repeatable=True, enabled=False)[0] == first
    assert answers("coupled", enabled=False)[0] == first
    plain_draws = answers("standard")
    assert all(one != other for one, other in itertools.combinations(plain_draws, 2))


def test_siblings_drawn_with_replacement_are_lossless_too() -> None:
    """Each child reports the full law it was drawn from; the same token may come up twice."""
    shape = Shape(tree=True, sampled=True, without=False)
    engine = wide_engine({"tree": RandomTree(6, shape)}, "standard")
    requests = draw(engine, "tree", SamplingParams(), 2_000)
    drain(engine)
    assert p_value(outputs(requests), free_law()) > ALPHA


def forbid_after_two(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """A processor that looks at the history: token 5 may not follow an even token."""
    if output and output[-1] % 2 == 0:
        logits[5] = -np.inf
    return logits * (1.0 + 0.1 * len(output))


RULE_SETS = {
    "cold": {"temperature": 0.5},
    "hot, top-p": {"temperature": 1.5, "top_p": 0.6},
    "cold, top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.3},
    "all three": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "encouragement": {"frequency_penalty": -2.0, "repetition_penalty": 0.8},
    "bias and bans": {"logit_bias": {2: 1.5, 3: -1.0}, "banned_token_ids": (1,), "temperature": 1.4},
    "processor": {"processors": (forbid_after_two,)},
    "ending": {"stop_token_ids": (2,), "min_tokens": 2, "temperature": 1.5},
}


@pytest.mark.parametrize("method", ["standard", "block"])
def test_every_rule_of_a_request_has_its_law(method: str) -> None:
    """Temperature, nucleus, top-k, min-p, penalties, bias, bans, processors, min_tokens: at every draft node.

    No outcome may lie outside the law's support. Each is also no sample of the law without rules (negative control).
    """
    drafters = ["tree=False sampled=True", "tree=True sampled=False"][: 1 if method == "block" else 2]
    engine = wide_engine(trees(method), method)
    requests = {
        (rules, drafter): draw(engine, drafter, SamplingParams(**settings), 1000 // len(drafters), i * 1000)
        for rules, settings in RULE_SETS.items()
        for i, drafter in enumerate(drafters)
    }
    drain(engine)
    for rules, settings in RULE_SETS.items():
        drawn = [history for (name, _), mine in requests.items() if name == rules for history in outputs(mine)]
        law = joint_law(raw_logits(TARGET, PROMPT), PROMPT, SamplingParams(**settings))
        assert p_value(drawn, law) > ALPHA, rules
        assert p_value(drawn, free_law()) < 1e-5, rules


COUPLED_RULES = {
    "free": {},
    "shaped": {"temperature": 1.3, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.5},
    "hot": {"temperature": 2.0, "repetition_penalty": 1.3, "logit_bias": {3: 2.0}},
}


@pytest.mark.parametrize("rules", COUPLED_RULES)
def test_coupled_output_is_the_same_with_and_without_speculation(rules: str) -> None:
    """The same tokens for every drafter, draft length, batch, chunk size and forced preemption."""
    model = toy_target(seed=1)
    prompts = [[7, 3, 9, 7, 3, 9, 7], [11], [4] * 9, [1, 2, 3, 4, 5, 6, 7, 8]]
    jobs = [(p, SamplingParams(seed=5 + i, max_tokens=16, **COUPLED_RULES[rules])) for i, p in enumerate(prompts)]
    wants = [plain(model, *job, method="coupled") for job in jobs]
    assert len({token for want in wants for token in want.token_ids}) > 8
    for at, (name, build) in enumerate([*registered(), *scripted({tuple(p): () for p in prompts}, 32)]):
        gamma = 1 + at % 8
        engine = make_engine(
            model,
            build(context_for(model, gamma, "coupled")),
            gamma=gamma,
            method="coupled",
            num_kv_blocks=9,
            max_num_batched_tokens=(3, 7, 64)[at % 3],
        )
        for mine, want in zip(run_all(engine, jobs), wants, strict=True):
            assert_same(mine, want, f"{name} {gamma}")
        assert engine.metrics.preemptions > 0


def test_coupled_drafts_of_the_same_model_are_always_right() -> None:
    """Draft model and target share the noise: the target's own weights are accepted every time, also when hot."""
    model = toy_target(seed=1)
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=25)
    engine = make_engine(model, self_drafter(model, "coupled"), method="coupled")
    got = run_all(engine, [([5, 6, 7], params)])[0]
    assert got.stats.acceptance_rate == 1.0
    assert got.stats.steps == 5


def test_a_banned_token_is_never_accepted() -> None:
    """A drafter that proposes one token at every step: bias -100, a ban, a late ban by a processor all hold."""

    def late(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(output) >= 10:
            logits[9] = -np.inf
        return logits

    model = toy_target(seed=1)
    for rules in ({"logit_bias": {9: -100.0}}, {"banned_token_ids": (9,)}, {"processors": (late,)}):
        for gamma in (1, 4, 5, 8):
            for temperature in (0.0, 1.5):
                # without the rule token 9 comes up all the time
                lure = {"logit_bias": {9: 6.0}, **rules} if "logit_bias" not in rules else rules
                params = SamplingParams(temperature=temperature, seed=2, max_tokens=40, **lure)
                got = run_all(make_engine(model, Script(9), gamma=gamma), [([9, 9, 9, 1, 9], params)])[0]
                assert 9 not in got.token_ids[10 if "processors" in rules else 0 :], rules
                if "processors" in rules:
                    assert 9 in got.token_ids[:10]
                    assert got.stats.accepted > 0


def test_nothing_below_the_min_p_floor_is_emitted() -> None:
    """Temperature 1.5 with min_p 0.5: every emitted token has at least half the probability of the best in its row."""
    model = toy_target(seed=1)
    for drafter in (Script(3, 1), RandomTree(32, Shape(tree=True, sampled=True))):
        params = SamplingParams(temperature=1.5, min_p=0.5, seed=8, max_tokens=60)
        got = run_all(make_engine(model, drafter), [([1, 2], params)])[0]
        after = raw_logits(model, [1, 2])
        for i, token in enumerate(got.token_ids):
            z = torch.tensor(after(got.token_ids[:i])) / 1.5
            assert float((z[token] - z.max()).exp()) >= 0.5
