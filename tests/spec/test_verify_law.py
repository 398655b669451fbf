"""The law of what comes out equals the target's, by exact enumeration; wrong drafters fail the same comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from tests.spec.verify_exact import Explorer, History, Propose, Toy, gap, step_law, toy

METHODS = ("standard", "block", "coupled")


def ban_three_later(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """A rule that depends on where it stands, in place: token 3 is for the first output only, its twin 2 for later."""
    logits[3 if len(output) >= 1 else 2] = -np.inf
    return logits


PARAMS = {
    "plain": SamplingParams(),
    "top_k_top_p": SamplingParams(temperature=0.7, top_k=3, top_p=0.8),
    "min_p": SamplingParams(temperature=1.4, min_p=0.3),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    "bias_ban": SamplingParams(logit_bias={1: 1.5, 0: -1.0}, banned_token_ids=(2,)),
    "min_tokens": SamplingParams(min_tokens=2, stop_token_ids=(3,)),
    "processor": SamplingParams(processors=(ban_three_later,)),
    "greedy": SamplingParams(temperature=0, presence_penalty=0.5),
}


def favourite(q: Dist, rank: int = 0) -> int:
    """The drafter's most likely token, or the next ones: certain, whatever its probability was."""
    order = np.argsort(-q.probs, kind="stable")
    return int(q.ids[order[min(rank, len(order) - 1)]])


def chain(pattern: str) -> Propose:
    """A chain whose depth i is sampled ('s') or certain ('c') as ``pattern`` says."""

    def propose(draws: Explorer, drafter: Toy, output: History) -> Draft:
        tokens: list[int] = []
        q: list[Dist | None] = []
        for kind in pattern:
            law = drafter(output + tuple(tokens))
            tokens.append(draws.pick(law, 0) if kind == "s" else favourite(law))
            q.append(law if kind == "s" else None)
        return Draft.chain(tokens, q)

    return propose


def sampled_tree(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Two siblings drawn without replacement, and a sampled child under each."""
    root = drafter(output)
    a = draws.pick(root, 0)
    rest = root.without(a)
    assert rest is not None
    b = draws.pick(rest, 0)
    under_a, under_b = drafter((*output, a)), drafter((*output, b))
    tokens = [a, b, draws.pick(under_a, 0), draws.pick(under_b, 0)]
    return Draft.tree(tokens, (-1, -1, 0, 1), (root, rest, under_a, under_b))


def certain_tree(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """The two favourites, the favourite after each, and a probe that must never stay."""
    root = drafter(output)
    a, b = favourite(root), favourite(root, 1)
    under_a, under_b = favourite(drafter((*output, a))), favourite(drafter((*output, b)))
    tokens, parents = (a, b, under_a, under_b, favourite(root, 2)), (-1, -1, 0, 1, -1)
    return Draft(tokens, parents, (None,) * 5, n_verify=4)


def mixed_tree(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Siblings sampled, certain (perhaps the same again), sampled from what is left; children certain, sampled."""
    root = drafter(output)
    a = draws.pick(root, 0)
    b = favourite(root, 1)
    left = root.without(a)
    rest = left.without(b) if left is not None else None
    under_a, under_b = favourite(drafter((*output, a))), drafter((*output, b))
    tokens, parents = [a, b, under_a, draws.pick(under_b, 0)], [-1, -1, 0, 1]
    q: list[Dist | None] = [root, None, None, under_b]
    if rest is not None:
        tokens.append(draws.pick(rest, 0))
        parents.append(-1)
        q.append(rest)
    return Draft.tree(tokens, parents, q)


def repeated_tree(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Two siblings drawn with replacement, and reported so."""
    root = drafter(output)
    return Draft.tree([draws.pick(root, 0), draws.pick(root, 0)], (-1, -1), (root, root))


CHAINS = {pattern: chain(pattern) for pattern in ("", "s", "ss", "cc", "sc", "cs")}
TREES = {"sampled": sampled_tree, "certain": certain_tree, "mixed": mixed_tree, "repeated": repeated_tree}
DRAFTERS = CHAINS | TREES
CASES = [
    (method, drafter, name)
    for method in METHODS
    for drafter in DRAFTERS
    for name in PARAMS
    if not (method == "block" and drafter in TREES and name not in ("plain", "penalties"))  # there it is the token rule
]


@pytest.mark.parametrize(("method", "drafter", "name"), CASES)
def test_three_tokens_have_the_targets_law(method: str, drafter: str, name: str) -> None:
    top_k = 0 if drafter in CHAINS else 2 if method == "coupled" else 3  # fewer trees to walk through
    q = toy(SamplingParams(top_k=top_k), seed=2)
    assert gap(toy(PARAMS[name], seed=1), q, DRAFTERS[drafter], method) < 1e-12


@pytest.mark.parametrize(
    ("pattern", "name"), [("sss", "penalties"), ("ccc", "plain"), ("scs", "processor"), ("csc", "plain")]
)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_three_draft_tokens_too(method: str, pattern: str, name: str) -> None:
    assert gap(toy(PARAMS[name], seed=5), toy(SamplingParams(), seed=6), chain(pattern), method) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_five_tokens_in_the_vocabulary_and_a_drafter_with_the_same_rules(method: str) -> None:
    params = SamplingParams(temperature=0.8, top_k=4, frequency_penalty=0.5)
    assert gap(toy(params, 11, vocab_size=5), toy(params, 12, vocab_size=5), chain("ss"), method) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", ["ss", "mixed"])
def test_a_drafter_equal_to_the_target_is_exact_too(method: str, drafter: str) -> None:
    params = SamplingParams(top_k=3)
    assert gap(toy(params, 1), toy(params, 1), DRAFTERS[drafter], method) < 1e-12


# What is biased must be seen to be biased.


def argmax_with_softmax_q(draws: Explorer, drafter: Toy, output: History) -> Draft:
    q = drafter(output)
    return Draft.chain([favourite(q)], [q])


def filtered_draw_with_full_q(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Drawn after top-k, reported before."""
    q = drafter(output)
    kept = np.sort(np.argsort(-q.probs, kind="stable")[:2])
    return Draft.chain([draws.pick(Dist.of(q.ids[kept], q.probs[kept]), 0)], [q])


def without_replacement_reported_as_with(draws: Explorer, drafter: Toy, output: History) -> Draft:
    root = drafter(output)
    a = draws.pick(root, 0)
    rest = root.without(a)
    assert rest is not None
    return Draft.tree([a, draws.pick(rest, 0)], (-1, -1), (root, root))


def with_replacement_reported_as_without(draws: Explorer, drafter: Toy, output: History) -> Draft:
    root = drafter(output)
    a = draws.pick(root, 0)
    return Draft.tree([a, draws.pick(root, 0)], (-1, -1), (root, root.without(a)))


def unlikely_tokens_dropped(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Proposes nothing when the token that was drawn has little confidence."""
    q = drafter(output)
    token = draws.pick(q, 0)
    return Draft.chain([token], [q]) if q.prob(token) >= 0.2 else Draft.nothing()


def stopped_after_unlikely_tokens(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """Submits what was drawn, and stops after a token that has little confidence."""
    tokens: list[int] = []
    q: list[Dist | None] = []
    while len(tokens) < 3:
        law = drafter(output + tuple(tokens))
        tokens.append(draws.pick(law, 0))
        q.append(law)
        if law.prob(tokens[-1]) < 0.3:
            break
    return Draft.chain(tokens, q)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("wrong", [argmax_with_softmax_q, filtered_draw_with_full_q, unlikely_tokens_dropped])
def test_negative_control_wrong_chains_fail_the_comparison(method: str, wrong: Propose) -> None:
    assert gap(toy(SamplingParams(), 1), toy(SamplingParams(), 2), wrong, method) > 1e-3


def test_negative_control_wrong_siblings_fail_the_comparison() -> None:
    p, q = toy(SamplingParams(), 1), toy(SamplingParams(), 2)
    assert gap(p, q, without_replacement_reported_as_with, "standard") > 1e-3


def test_a_sibling_that_its_own_q_cannot_give_is_an_error() -> None:
    p, q = toy(SamplingParams(), 1), toy(SamplingParams(), 2)
    with pytest.raises(ValueError, match="draft node 1 has token"):
        gap(p, q, with_replacement_reported_as_without, "standard")


@pytest.mark.parametrize("method", METHODS)
def test_stopping_after_an_unlikely_token_is_exact(method: str) -> None:
    assert gap(toy(SamplingParams(), 1), toy(SamplingParams(), 2), stopped_after_unlikely_tokens, method) < 1e-12


@pytest.mark.parametrize("method", ["standard", "block"])
def test_dropping_b_gives_a_three_quarters(method: str) -> None:
    """THEORY's number: p = q = (1/2, 1/2), b always dropped."""
    coin = toy(SamplingParams(), 0, vocab_size=2, scale=0.0)

    def drop_b(draws: Explorer, drafter: Toy, output: History) -> Draft:
        q = drafter(output)
        token = draws.pick(q, 0)
        return Draft.chain([token], [q]) if token == 0 else Draft.nothing()

    first = {0: 0.0, 1: 0.0}
    for emitted, weight in step_law(coin, coin, drop_b, method, ()).items():
        first[emitted[0]] += weight
    assert first == pytest.approx({0: 0.75, 1: 0.25}, abs=1e-12)
