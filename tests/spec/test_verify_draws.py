"""The random numbers behind verification: independent where they must be, shared where they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.rng import Stream, uniform
from outrider.core.types import Draws
from outrider.spec.draws import (
    CounterDraws,
    CoupledDraws,
    DraftPick,
    coupled_draft_pick,
    draft_pick,
    draft_pick_for,
    draws_for,
)
from outrider.spec.verify import verify
from tests.spec.verify_exact import History, Rows, Toy, target_law, toy

DrawsFor = Callable[[str, int, int], Draws]
PROMPT = 2  # tokens before the first drawn one
PARAMS = SamplingParams(temperature=0.9, frequency_penalty=0.5)


def propose(drafter: Toy, shape: str, pick: DraftPick, seed: int, output: History) -> Draft:
    """A sampled chain of two or three tokens, or two siblings without replacement with a child each."""
    base = PROMPT + len(output)
    if shape == "tree":
        root = drafter(output)
        a = pick(root, seed, base, 1, 0)
        rest = root.without(a)
        assert rest is not None
        b = pick(rest, seed, base, 1, 1)
        under = drafter((*output, a)), drafter((*output, b))
        tokens = [a, b, pick(under[0], seed, base, 2, 0), pick(under[1], seed, base, 2, 1)]
        return Draft.tree(tokens, [-1, -1, 0, 1], [root, rest, *under])
    tokens, q = [], []
    for depth in range(1, int(shape) + 1):
        q.append(drafter((*output, *tokens)))
        tokens.append(pick(q[-1], seed, base, depth, 0))
    return Draft.chain(tokens, q)


def generate(
    seed: int, target: Toy, drafter: Toy, shape: str, method: str, n: int, draws: DrawsFor = draws_for
) -> History:
    output: History = ()
    while len(output) < n:
        draft = propose(drafter, shape, draft_pick_for(method), seed, output)
        verdict = verify(draft, Rows(target, draft, output), draws(method, seed, PROMPT + len(output)), method)
        output += (*(draft.tokens[node] for node in verdict.path), verdict.next_token)
    return output[:n]


def chi_square_p(runs: int, shape: str, method: str, draws: DrawsFor = draws_for) -> float:
    """The p-value of the first three tokens of ``runs`` seeded runs against the target's exact law."""
    target, drafter = (toy(SamplingParams(), seed, vocab_size=3, scale=1.0) for seed in (5, 55))
    law = target_law(target)
    counts = dict.fromkeys(law, 0)
    for seed in range(runs):
        counts[generate(seed, target, drafter, shape, method, 3, draws)] += 1
    observed, expected = np.array(list(counts.values())), runs * np.array(list(law.values()))
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize(
    ("runs", "method", "shape"), [(5_000, "standard", "tree"), (20_000, "block", "3"), (4_000, "coupled", "2")]
)
def test_seeded_runs_have_the_targets_law(runs: int, method: str, shape: str) -> None:
    assert chi_square_p(runs, shape, method) > 0.001


@dataclass(frozen=True)
class ByPosition:
    """The mistake that CounterDraws' key avoids: a step meets numbers again that an earlier block already looked at."""

    seed: int
    base: int

    def accept(self, prob: float, depth: int, index: int) -> bool:
        return uniform(self.seed, self.base + depth, index, Stream.ACCEPT) < prob

    def pick(self, dist: Dist, depth: int) -> int:
        return dist.sample(uniform(self.seed, self.base + depth, Stream.SAMPLE))


def test_negative_control_numbers_keyed_by_position_fail_the_same_test() -> None:
    def wrong(method: str, seed: int, base: int) -> Draws:
        return ByPosition(seed, base)

    assert chi_square_p(6_000, "3", "block", wrong) < 1e-6


def test_counter_draws_are_functions_of_all_their_keys() -> None:
    dist = Dist.dense(np.ones(1000))
    keys = [(s, b, d) for s in (1, 2) for b in (5, 6) for d in (1, 2)]
    picks = {key: CounterDraws(key[0], key[1]).pick(dist, key[2]) for key in keys}
    assert len(set(picks.values())) == len(keys)
    assert picks == {key: CounterDraws(key[0], key[1]).pick(dist, key[2]) for key in keys}
    drafts = {draft_pick(dist, *key, index) for key in keys for index in (0, 1)}
    assert len(drafts | set(picks.values())) == 3 * len(keys)


def test_accept_is_true_with_its_probability() -> None:
    for prob in (0.1, 0.5, 0.93):
        hits = sum(CounterDraws(seed, 3).accept(prob, 1, 0) for seed in range(4000))
        assert stats.binomtest(hits, 4000, prob).pvalue > 0.001
    assert all(CounterDraws(seed, 3).accept(1.0, 1, 0) for seed in range(100))
    assert not any(CounterDraws(seed, 3).accept(0.0, 1, 0) for seed in range(100))


def test_accept_compares_one_number_so_siblings_and_depths_do_not_share_it() -> None:
    def flips(depth: int, index: int) -> np.ndarray:
        return np.array([CounterDraws(seed, 3).accept(0.5, depth, index) for seed in range(2000)])

    first = flips(1, 0)
    for other in (flips(1, 1), flips(2, 0)):
        table = [[int((first & other).sum()), int((first & ~other).sum())]]
        table.append([int((~first & other).sum()), int((~first & ~other).sum())])
        assert stats.chi2_contingency(table).pvalue > 0.001


# Coupled verification.


@pytest.mark.parametrize("shape", ["1", "2", "3", "tree"])
def test_coupled_output_is_the_same_with_and_without_speculation(shape: str) -> None:
    target, drafter = toy(PARAMS, 1), toy(SamplingParams(), 2)
    for seed in range(40):
        plain = generate(seed, target, drafter, "0", "coupled", 8)
        assert generate(seed, target, drafter, shape, "coupled", 8) == plain
    assert len({generate(seed, target, drafter, "0", "coupled", 8) for seed in range(40)}) > 30


def test_the_standard_rule_does_not_keep_the_tokens_of_plain_decoding() -> None:
    """Negative control of the test above: the law is the same there, the tokens are not."""
    target, drafter = toy(PARAMS, 1), toy(SamplingParams(), 2)
    pairs = [(generate(s, target, drafter, n, "standard", 8) for n in ("0", "2")) for s in range(40)]
    assert any(plain != drafted for plain, drafted in pairs)


def test_coupled_picks_stand_at_absolute_positions() -> None:
    p = Dist.dense(np.arange(1.0, 50.0))
    for position in range(10, 14):
        one = CoupledDraws(7, position).pick(p, 1)
        assert one == CoupledDraws(7, 10).pick(p, position - 9) == p.gumbel_max(7, position)
        assert coupled_draft_pick(p, 7, 10, position - 9, 0) == one
    with pytest.raises(NotImplementedError):
        CoupledDraws(7, 1).accept(0.5, 1, 0)


@pytest.mark.parametrize("seed", [3, 4])
def test_shared_noise_is_accepted_as_often_as_promised(seed: int) -> None:
    """Gumbel coupling: P(both are x) = 1 / sum_y max(p_y/p_x, q_y/q_x), at least (1 - TV)/(1 + TV) in all."""
    rng = np.random.default_rng(seed)
    p, q = Dist.dense(rng.dirichlet(np.ones(8))), Dist.dense(rng.dirichlet(np.ones(8)))
    tv = 0.5 * np.abs(p.probs - q.probs).sum()
    pairs = zip(p.probs, q.probs, strict=True)
    exact = sum(1 / np.maximum(p.probs / px, q.probs / qx).sum() for px, qx in pairs)
    assert exact >= (1 - tv) / (1 + tv)

    def share(pick: DraftPick, n: int = 3000) -> int:
        drafts = [(base, Draft.chain([pick(q, seed, base, 1, 0)], [q])) for base in range(n)]
        return sum(len(verify(d, [p, p], CoupledDraws(seed, base), "coupled").path) for base, d in drafts)

    assert stats.binomtest(share(coupled_draft_pick), 3000, exact).pvalue > 0.001
    unshared = share(draft_pick)
    assert stats.binomtest(unshared, 3000, float(p.probs @ q.probs)).pvalue > 0.001
    assert unshared / 3000 < (1 - tv) / (1 + tv)
