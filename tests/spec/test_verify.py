"""The verification rules' numbers, edges and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.config import SpecConfig
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.core.settings import bounds_of
from outrider.core.types import Verdict
from outrider.spec.draws import draft_pick_for, draws_for
from outrider.spec.verify import verify, verify_greedy
from tests.spec.verify_exact import Explorer, History, Propose, Rows, Toy, outcomes, toy

METHODS = ("standard", "block", "coupled")
P = Dist.dense(np.array([0.5, 0.3, 0.2, 0.0]))
Q = Dist.dense(np.array([0.1, 0.6, 0.2, 0.1]))


@dataclass
class Scripted:
    """Answers ``accept`` from a list (where chance decides), picks the likeliest token, and notes what it was asked."""

    answers: list[bool] = field(default_factory=list)
    asked: list[tuple[float, int, int]] = field(default_factory=list)
    picked: list[tuple[Dist, int]] = field(default_factory=list)

    def accept(self, prob: float, depth: int, index: int) -> bool:
        self.asked.append((prob, depth, index))
        return prob > 0.0 and (prob >= 1.0 or self.answers.pop(0))

    def pick(self, dist: Dist, depth: int) -> int:
        self.picked.append((dist, depth))
        return int(dist.ids[np.argmax(dist.probs)])


def dense(dist: Dist, size: int = 4) -> list[float]:
    return dist.probs_of(np.arange(size)).tolist()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_replacement_of_a_rejected_token_is_drawn_from_the_residual(method: str) -> None:
    draws = Scripted([False])
    assert verify(Draft.chain([1], [Q]), [P, P], draws, method) == Verdict((), 0)
    assert draws.asked == [(pytest.approx(0.5), 1, 0)]
    assert [(dense(p), depth) for p, depth in draws.picked] == [([1.0, 0.0, 0.0, 0.0], 1)]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_p_equal_to_q_never_rejects(method: str) -> None:
    for token in (0, 1, 2):
        draws = Scripted()
        verdict = verify(Draft.chain([token, 0], [P, P]), [P, P, Q], draws, method)
        assert verdict.path == (0, 1)
        assert all(prob == 1.0 for prob, _, _ in draws.asked)
        assert [(dense(p), depth) for p, depth in draws.picked] == [(dense(Q), 3)]


def test_a_residual_without_mass_is_replaced_by_p() -> None:
    """p <= q everywhere in floats, and a rejection all the same: never NaN, never an added epsilon."""

    class Contrary(Scripted):
        def accept(self, prob: float, depth: int, index: int) -> bool:
            return False

    for method in ("standard", "block"):
        draws = Contrary()
        assert verify(Draft.chain([1], [P]), [P, P], draws, method) == Verdict((), 0)
        assert dense(draws.picked[0][0]) == dense(P)
    draws = Contrary()
    assert verify(Draft.chain([2]), [Dist.point(2), P], draws, "standard") == Verdict((), 2)


def test_a_certain_token_stays_with_p_and_leaves_p_without_it() -> None:
    draws = Scripted([False])
    verify(Draft.chain([1]), [P, P], draws, "standard")
    assert draws.asked[0][0] == pytest.approx(0.3)
    assert dense(draws.picked[0][0]) == pytest.approx([5 / 7, 0, 2 / 7, 0])


def test_siblings_are_visited_in_order_and_taken_out_of_p_one_by_one() -> None:
    draws = Scripted([False, False])
    q_rest = Q.without(1)
    verify(Draft.tree([1, 0, 2], [-1, -1, -1], [Q, q_rest, None]), [P] * 4, draws, "standard")
    assert draws.asked == [(pytest.approx(0.5), 1, 0), (pytest.approx(4.0), 1, 1)]  # p is [1,0,0,0], q(0) is 1/4
    draws = Scripted([False, False])
    verify(Draft.tree([1, 2, 3], [-1, -1, -1]), [P] * 4, draws, "standard")
    assert [a[0] for a in draws.asked] == [pytest.approx(0.3), pytest.approx(2 / 7), 0.0]
    assert dense(draws.picked[0][0]) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_follows_the_argmax_and_asks_chance_for_nothing(method: str) -> None:
    rows = [
        Dist.point(t) for t in (2, 0, 1, 3)
    ]  # after: committed, node 0 (token 0), node 1 (token 2), node 2 (token 1)
    tree = Draft.tree([0, 2, 1], [-1, -1, 1])
    assert verify(tree, rows, Scripted(), method) == Verdict((1, 2), 3)
    chain = Draft.chain([2, 0, 3], [Q, Q, Q])
    assert verify(chain, [Dist.point(t) for t in (2, 0, 1, 3)], Scripted(), method) == Verdict((0, 1), 1)


@pytest.mark.parametrize("method", METHODS)
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_where_the_target_is_sure_every_method_decides_as_the_short_way(method: str, data: st.DataObject) -> None:
    """Trees and chains, certain and drawn tokens, siblings that repeat one another, probes."""
    n = data.draw(st.integers(0, 6))
    tokens = [data.draw(st.integers(0, 2)) for _ in range(n)]
    parents = [data.draw(st.sampled_from((i - 1, i - 1, data.draw(st.integers(-1, i - 1))))) for i in range(n)]
    q = [data.draw(st.sampled_from((None, Q))) for _ in range(n)]
    best = [data.draw(st.integers(0, 2)) for _ in range(n + 1)]
    draft = Draft(tuple(tokens), tuple(parents), tuple(q), n_verify=data.draw(st.integers(0, n)))
    assert verify(draft, [Dist.point(t) for t in best], Scripted(), method) == verify_greedy(draft, best)


@pytest.mark.parametrize("method", METHODS)
def test_no_draft_is_plain_decoding(method: str) -> None:
    draws = Scripted()
    assert verify(Draft.nothing("x"), [P], draws, method) == Verdict((), 0)
    assert draws.picked == [(P, 1)]
    assert draws.asked == []


@pytest.mark.parametrize("method", METHODS)
def test_probes_never_stay(method: str) -> None:
    rows = [Dist.point(1), Dist.point(2), Dist.point(3)]
    assert verify(Draft((1, 2), (-1, 0), (None, None), n_verify=1), rows, Scripted(), method) == Verdict((0,), 2)
    assert verify(Draft((1, 2), (-1, 0), (None, None), n_verify=0), rows, Scripted(), method) == Verdict((), 1)
    probe_beside = Draft((1, 2, 1), (-1, 0, -1), (None,) * 3, n_verify=2)  # a chain and a probe that is none
    assert verify(probe_beside, [*rows, P], Scripted(), method) == Verdict((0, 1), 3)
    draws = Scripted()
    verify(Draft((0, 1), (-1, 0), (Dist.point(0), Q), n_verify=1), [Dist.point(0), P, P], draws, method)
    assert draws.picked[-1] == (P, 2)  # the bonus token's own law: a probe takes nothing away from it


def test_unknown_methods_are_refused_by_name() -> None:
    for call in (
        lambda: verify(Draft(), [P], Scripted(), "blok"),
        lambda: draws_for("blok", 1, 1),
        lambda: draft_pick_for("blok"),
    ):
        with pytest.raises(
            SettingError, match=r"rejection_sample_method is 'blok'; .*standard, block, coupled.*'block'"
        ):
            call()


def test_the_engines_setting_knows_exactly_these_methods() -> None:
    field_ = SpecConfig.__dataclass_fields__["rejection_sample_method"]
    assert bounds_of(field_).choices == METHODS


def test_a_token_that_its_q_cannot_give_is_an_error() -> None:
    for method in ("standard", "block"):
        with pytest.raises(ValueError, match="draft node 0 has token 3, which its own q gives no probability"):
            verify(Draft.chain([3], [P]), [Q, Q], Scripted(), method)


@pytest.mark.parametrize("drafted", [(0, 1), (1, 1), (2, 0)])
def test_block_takes_the_token_rule_on_trees(drafted: tuple[int, int]) -> None:
    tree = Draft.tree(drafted, [-1, -1], [Q, Q])
    for answers in ([True], [False, True], [False, False]):
        ours, theirs = Scripted(list(answers)), Scripted(list(answers))
        assert verify(tree, [P] * 3, ours, "block") == verify(tree, [P] * 3, theirs, "standard")
        assert ours.asked == theirs.asked


# How many tokens stay.


def kept(rows: Sequence[Dist], qs: Sequence[Dist], method: str) -> float:
    """The exact expected number of kept tokens of a chain whose p and q do not depend on the history."""

    def run(draws: Explorer) -> int:
        draft = Draft.chain([draws.pick(q, 0) for q in qs], list(qs))
        return len(verify(draft, rows, draws, method).path)

    return sum(weight * n for weight, n in outcomes(run))


def test_block_keeps_eleven_ninths_where_tokens_keep_ten() -> None:
    p, q = Dist.dense(np.array([1 / 3, 2 / 3])), Dist.dense(np.array([2 / 3, 1 / 3]))
    assert kept([p] * 3, [q] * 2, "standard") == pytest.approx(10 / 9, abs=1e-12)
    assert kept([p] * 3, [q] * 2, "block") == pytest.approx(11 / 9, abs=1e-12)


weights = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(lambda w: Dist.dense(np.array(w)))


@settings(max_examples=25, deadline=None)
@given(p=weights, q=weights)
def test_acceptance_is_one_minus_tv_and_blocks_keep_no_less(p: Dist, q: Dist) -> None:
    tv = 0.5 * float(np.abs(p.probs - q.probs).sum())
    assert kept([p, p], [q], "standard") == pytest.approx(1 - tv, abs=1e-12)
    assert kept([p, p], [q], "block") == pytest.approx(1 - tv, abs=1e-12)
    assert kept([p] * 3, [q] * 2, "block") >= kept([p] * 3, [q] * 2, "standard") - 1e-12


def test_a_block_of_history_dependent_rows_keeps_more_than_tokens() -> None:
    target, drafter = toy(SamplingParams(), 1), toy(SamplingParams(), 2)

    def propose(draws: Explorer, model: Toy, output: History) -> Draft:
        tokens: list[int] = []
        for _ in range(3):
            tokens.append(draws.pick(model((*output, *tokens)), 0))
        return Draft.chain(tokens, [model((*output, *tokens[:i])) for i in range(3)])

    assert mean_kept(target, drafter, propose, "block") > mean_kept(target, drafter, propose, "standard") + 0.01


def mean_kept(target: Toy, drafter: Toy, propose: Propose, method: str) -> float:
    def run(draws: Explorer) -> int:
        draft = propose(draws, drafter, ())
        return len(verify(draft, Rows(target, draft, ()), draws, method).path)

    return sum(weight * n for weight, n in outcomes(run))


def test_every_decision_of_a_step_has_its_own_key() -> None:
    """Two decisions with one (depth, index) would share a random number."""
    draws = Scripted([False, True, False, False])
    verify(Draft.tree([0, 1, 0, 1], [-1, -1, 1, 1]), [P] * 5, draws, "standard")
    assert [(depth, index) for _, depth, index in draws.asked] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    draws = Scripted([False] * 3)
    verify(Draft.chain([1, 1, 1], [Q] * 3), [P] * 4, draws, "block")
    assert [(depth, index) for _, depth, index in draws.asked] == [(3, 0), (2, 0), (1, 0)]


def test_tiny_probabilities_give_no_nan() -> None:
    q = Dist.dense(np.array([1e-300, 1.0, 1e-300, 1e-300]))
    p = Dist.dense(np.array([1.0, 1e-300, 1e-300, 1e-300]))
    for method in ("standard", "block"):
        for tokens in ([1, 0, 1], [0, 0, 0], [1, 1, 1]):
            draws = Scripted([False] * 3)
            verdict = verify(Draft.chain(tokens, [q] * 3), [p] * 4, draws, method)
            assert all(prob >= 0.0 for prob, _, _ in draws.asked)  # NaN compares false
            assert np.isfinite(draws.picked[0][0].probs).all()
            assert verdict.next_token == 0
