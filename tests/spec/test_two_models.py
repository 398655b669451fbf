"""The draft model's drafts: their shapes, honest q, the request's rules, and tokens that one side lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.harness import ToyTokenizer, toy_target
from tests.spec.draft_bench import DRAFTER, GREEDY, PROMPT, SHAPE, TARGET, VOCAB, Bench, greedy_chain, law, logits_after
from tests.toy import toy_config


def test_a_chain_is_the_draft_models_own_greedy_text() -> None:
    bench = Bench()
    (draft,) = bench.propose(bench.add(), budget=5)
    assert draft == Draft.chain(greedy_chain(PROMPT, 5))


@pytest.mark.parametrize("shape", ["2,2,1", "3,1", "1,3,2"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)], ids=["greedy", "sampled"])
def test_a_tree_has_the_asked_number_of_children_level_by_level(shape: str, params: SamplingParams) -> None:
    bench = Bench(draft_tree=shape)
    (draft,) = bench.propose(bench.add(params=params), budget=30)
    widths = [int(part) for part in shape.split(",")]
    want: list[int] = []
    level = [-1]
    for width in widths:
        first = len(want)
        want += [node for node in level for _ in range(width)]
        level = list(range(first, len(want)))
    assert list(draft.parents) == want
    for node in range(-1, len(draft)):
        siblings = [draft.tokens[child] for child in draft.children(node)]
        assert len(set(siblings)) == len(siblings)
        if params.greedy:
            text = PROMPT + [draft.tokens[i] for i in draft.path(node)]
            assert siblings == logits_after(text).argsort(descending=True)[: len(siblings)].tolist()
    assert all((q is None) == params.greedy for q in draft.q)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)], ids=["greedy", "sampled"])
def test_a_smaller_budget_keeps_the_first_nodes_whatever_they_are(params: SamplingParams) -> None:
    full = Bench(draft_tree="3,2,1").propose(Bench().add(params=params, seed=5), budget=40)[0]
    for budget in range(1, len(full)):
        bench = Bench(draft_tree="3,2,1")
        (draft,) = bench.propose(bench.add(params=params, seed=5), budget=budget)
        assert (draft.tokens, draft.parents) == (full.tokens[:budget], full.parents[:budget])


def test_q_is_the_models_own_law_renormalised_without_the_earlier_siblings() -> None:
    bench = Bench(draft_tree="3,2")
    (draft,) = bench.propose(bench.add(params=SamplingParams(temperature=0.7)), budget=9)
    for parent in range(-1, 3):
        left = law(PROMPT + [draft.tokens[i] for i in draft.path(parent)], temperature=0.7)
        for child in draft.children(parent):
            q = draft.q[child]
            assert q is not None
            assert q.probs_of(np.arange(VOCAB)) == pytest.approx(left / left.sum(), abs=1e-12)
            left[draft.tokens[child]] = 0.0


def chi_square(counts: Counter[tuple[int, ...]], weights: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic over cells expected at least 5 times, the others together; and its degrees of freedom."""
    n, total = sum(counts.values()), sum(weights.values())
    expected = {cell: n * w / total for cell, w in weights.items()}
    big = [cell for cell, e in expected.items() if e >= 5]
    rest = n - sum(expected[c] for c in big)
    stat = sum((counts[c] - expected[c]) ** 2 / expected[c] for c in big)
    if rest > 5:
        stat += (n - sum(counts[c] for c in big) - rest) ** 2 / rest
    return stat, len(big) - (rest <= 5)


def one_number_for_both(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The joint law of two tokens drawn from ``p`` and ``q`` with the same uniform number."""
    ends = [np.cumsum(x)[:, None] for x in (p, q)]
    starts = [end - x[:, None] for end, x in zip(ends, (p, q), strict=True)]
    return np.maximum(np.minimum(ends[0], ends[1].T) - np.maximum(starts[0], starts[1].T), 0.0)


def test_siblings_are_really_drawn_from_their_q_and_a_law_with_replacement_fails_the_same_test() -> None:
    bench = Bench(draft_tree="2,1", n_blocks=64 * 4)
    counts: Counter[tuple[int, ...]] = Counter()
    cousins: Counter[tuple[int, ...]] = Counter()
    for first in range(0, 4096, 64):
        seqs = [bench.add(PROMPT[:2], SamplingParams(), id=i, seed=first + i) for i in range(64)]
        drafts = bench.propose(*seqs, budget=4)
        counts.update(draft.tokens[:3] for draft in drafts)
        cousins.update(draft.tokens[2:] for draft in drafts)
        for seq in seqs:
            bench.end(seq)
    p = law(PROMPT[:2])
    after = [law([*PROMPT[:2], a]) for a in range(VOCAB)]
    cells = [(a, b, c) for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    right = {(a, b, c): p[a] * p[b] / (1 - p[a]) * after[a][c] * (a != b) for a, b, c in cells}
    wrong = {(a, b, c): p[a] * p[b] * after[a][c] for a, b, c in cells}
    stat, freedom = chi_square(counts, right)
    assert freedom > 20
    assert stat < freedom + 4.5 * (2 * freedom) ** 0.5
    stat, freedom = chi_square(counts, wrong)
    assert stat > freedom + 30 * (2 * freedom) ** 0.5

    # The children of two siblings are independent of each other, given their parents.
    pairs = [(a, b, p[a] * p[b] / (1 - p[a])) for a in range(VOCAB) for b in range(VOCAB) if a != b]
    independent = sum(w * np.outer(after[a], after[b]) for a, b, w in pairs)
    tied = sum(w * one_number_for_both(after[a], after[b]) for a, b, w in pairs)
    stat, freedom = chi_square(cousins, dict(np.ndenumerate(independent)))
    assert freedom > 20
    assert stat < freedom + 4.5 * (2 * freedom) ** 0.5
    stat, freedom = chi_square(cousins, dict(np.ndenumerate(tied)))
    assert stat > freedom + 30 * (2 * freedom) ** 0.5


def test_the_requests_own_rules_shape_q_at_every_node_with_that_nodes_history() -> None:
    def once(prompt: List[int], output: List[int], logits: Any) -> Any:
        """No token that is in the output already; tokens 0 to 3 never."""
        logits[[0, 1, 2, 3, *output]] = -np.inf
        return logits

    bench = Bench()
    seq = bench.add(params=SamplingParams(processors=(once,), top_k=3, banned_token_ids=(11,)))
    seq.tokens.append(7)
    (draft,) = bench.propose(seq, budget=5)
    assert len(draft) == 5
    for node in range(5):
        q = draft.q[node]
        assert q is not None
        assert len(q.ids) <= 3
        assert not {0, 1, 2, 3, 7, 11, *draft.tokens[:node]} & {int(i) for i in q.ids}
    seq.params = SamplingParams(temperature=0, processors=(once,))
    (draft,) = bench.propose(seq, budget=5)
    assert len({*draft.tokens} - {0, 1, 2, 3, 7}) == 5, "a greedy draft follows the rules too"


def test_a_rule_that_cannot_be_applied_is_the_reason_for_no_draft_and_hurts_nobody_else() -> None:
    def broken(prompt: List[int], output: List[int], logits: Any) -> Any:
        raise RuntimeError("not today")

    bench = Bench()
    seqs = [bench.add(params=SamplingParams(temperature=0, processors=(broken,))), bench.add(id=1)]
    bad, good = bench.propose(*seqs)
    assert len(bad) == 0
    assert bad.reason == "a rule of the request cannot be applied to the draft model"
    assert good.tokens == greedy_chain(PROMPT, 4)


def test_a_greedy_draft_of_a_sampled_request_is_certain() -> None:
    bench = Bench(draft_sample_method="greedy")
    (draft,) = bench.propose(bench.add(params=SamplingParams(temperature=1.3, top_p=0.5)), budget=3)
    assert draft == Draft.chain(greedy_chain(PROMPT, 3))


def test_a_certain_draft_has_all_its_branches_whatever_the_request_would_cut() -> None:
    bench = Bench(draft_tree="3,2", draft_sample_method="greedy")
    for params in (SamplingParams(top_p=0.01), SamplingParams(min_p=1.0), SamplingParams(top_k=1), GREEDY):
        seq = bench.add(params=params)
        (draft,) = bench.propose(seq, budget=9)
        bench.end(seq)
        assert draft.tokens[:3] == tuple(logits_after(PROMPT).argsort(descending=True)[:3].tolist())
        assert len(draft) == 9


def test_a_coupled_draft_by_the_target_itself_is_what_the_target_will_pick() -> None:
    bench = Bench(TARGET, method="coupled")
    (draft,) = bench.propose(bench.add(params=SamplingParams(), seed=11), budget=6)
    text = list(PROMPT)
    for _ in range(6):
        p = torch.softmax(logits_after(text, TARGET), -1).numpy()
        text.append(Dist.dense(p).gumbel_max(11, len(text)))
    assert draft.tokens == tuple(text[len(PROMPT) :])


def test_many_sequences_at_once_get_what_each_gets_alone() -> None:
    texts = [PROMPT, PROMPT[:1], [7] * 9, [*PROMPT, 0, 0, 2]]
    params = [SamplingParams(), GREEDY, SamplingParams(temperature=2.0), GREEDY]
    bench = Bench(draft_tree="2,1,2")
    together = bench.propose(*(bench.add(t, p, i, seed=i) for i, (t, p) in enumerate(zip(texts, params, strict=True))))
    for i, draft in enumerate(together):
        alone = Bench(draft_tree="2,1,2")
        (want,) = alone.propose(alone.add(texts[i], params[i], i, seed=i))
        assert (draft.tokens, draft.parents) == (want.tokens, want.parents)


@pytest.mark.parametrize("drafter_vocab", [VOCAB - 4, VOCAB + 4])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=5.0)], ids=["greedy", "sampled"])
def test_vocabularies_padded_differently_give_tokens_that_both_have(drafter_vocab: int, params: SamplingParams) -> None:
    drafter = toy_target(toy_config(vocab=drafter_vocab, **SHAPE), seed=2)
    bench = Bench(drafter, draft_tree="4,4,4")
    (draft,) = bench.propose(bench.add(PROMPT[:4], params=params), budget=60)
    assert len(draft) == 60
    assert max(draft.tokens) < min(VOCAB, drafter_vocab)
    for q in draft.q:
        assert q is None or q.ids.max() < min(VOCAB, drafter_vocab)


def test_a_text_with_a_token_that_the_draft_model_lacks_gets_no_draft_and_says_why() -> None:
    bench = Bench(toy_target(toy_config(vocab=VOCAB - 4, **SHAPE), seed=2))
    seqs = [bench.add([1, 2, VOCAB - 1, 3]), bench.add([1, 2, 3], id=1)]
    lacking, fine = bench.propose(*seqs)
    assert (len(lacking), lacking.reason) == (0, "the text holds a token that the draft model lacks")
    assert len(fine) == 4
    bench.commit(seqs[1], *fine.tokens, VOCAB - 4)
    (after,) = bench.propose(seqs[1])
    assert after.reason == lacking.reason


def test_another_tokenizer_is_refused_with_the_first_token_that_differs() -> None:
    pieces = [f"piece {i}" for i in range(VOCAB)]
    target = toy_target(toy_config(vocab=VOCAB, **SHAPE), tokenizer=ToyTokenizer(pieces))
    other = toy_target(toy_config(vocab=VOCAB, **SHAPE), tokenizer=ToyTokenizer([*pieces[:7], "x", "y", *pieces[9:11]]))
    with pytest.raises(SettingError) as error:
        TwoModels(other, target, "standard", ModelSettings(model="x"))
    said = str(error.value)
    assert "token 7 is 'piece 7' for the target and 'x' for the draft" in said
    assert f"sizes {VOCAB} and {VOCAB - 1}" in said
    TwoModels(target, target, "standard", ModelSettings(model="x"))


def test_what_it_needs_is_its_kv_and_weights() -> None:
    needs = Bench().drafter.needs
    pool = Bench(n_blocks=7).drafter.runner.pool.layers
    assert needs.kv_bytes_per_token * 7 * 4 == sum(t.numel() * t.element_size() for kv in pool for t in (kv.k, kv.v))
    assert needs.weight_bytes == DRAFTER.decoder.weight_bytes > 0
