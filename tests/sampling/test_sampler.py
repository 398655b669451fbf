"""The sampler against a dense reference, its order of rules, its edges and its refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.core.dist import Dist
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.sampling.history import History
from outrider.sampling.sampler import Sampler, check_token_ids
from tests.sampling.dense_reference import dense_law

EOS = (0,)


def law(
    logits: Sequence[float] | np.ndarray,
    params: SamplingParams,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (),
    n_tokens: int | None = None,
) -> np.ndarray:
    z = np.asarray(logits, dtype=np.float64)
    return dense(Sampler(params, len(z), EOS, n_tokens).dist(z, prompt, output), len(z))


def dense(dist: Dist, size: int) -> np.ndarray:
    return dist.probs_of(np.arange(size))


@st.composite
def cases(draw: st.DrawFn, size: int) -> tuple[np.ndarray, SamplingParams, list[int], list[int]]:
    ids = st.integers(0, size - 1)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    z = rng.normal(size=size) * draw(st.sampled_from([0.3, 1.0, 5.0]))
    if draw(st.booleans()):
        z = np.round(z)  # ties
    if draw(st.booleans()):
        z = z.astype(np.float32)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 1e-6, 0.01, 0.5, 1.0, 1.7, 50.0])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-9])),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 5, size, size + 7])),
        min_p=draw(st.sampled_from([0.0, 0.03, 0.4, 0.97])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-math.inf, -3.0, 2.5]), max_size=2)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=size).map(tuple)),
        banned_token_ids=draw(st.lists(ids, max_size=2).map(tuple)),
        min_tokens=draw(st.sampled_from([0, 0, 2, 5])),
        stop_token_ids=draw(st.sampled_from([(), (1,)])),
        ignore_eos=draw(st.booleans()),
    )
    return z, params, draw(st.lists(ids, max_size=6)), draw(st.lists(ids, max_size=6))


def check_against_reference(case: tuple[np.ndarray, SamplingParams, list[int], list[int]]) -> None:
    z, params, prompt, output = case
    before = z.copy()
    sampler = Sampler(params, len(z), EOS)
    with np.errstate(invalid="ignore"):
        expected, near = dense_law(z, params, EOS, prompt, output)
    assume(near > 1e-9)
    if np.isnan(expected).any() or not expected.sum():
        with pytest.raises(SettingError, match="no token is left to draw"):
            sampler.dist(z, prompt, output)
        return
    if params.temperature == 0 and all_masked(z, params, prompt, output):
        with pytest.raises(SettingError, match="no token is left to draw"):
            sampler.dist(z, prompt, output)
        return
    dist = sampler.dist(z, prompt, output)
    assert dense(dist, len(z)) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (np.diff(dist.ids) > 0).all()
    assert (dist.probs > 0).all()
    assert np.array_equal(z, before)


def all_masked(z: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> bool:
    warm = SamplingParams(
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    with np.errstate(invalid="ignore"):
        return bool(np.isnan(dense_law(z, warm, EOS, prompt, output)[0]).any())


@settings(max_examples=300, deadline=None)
@given(case=cases(12))
def test_the_law_is_the_dense_references(case: tuple[np.ndarray, SamplingParams, list[int], list[int]]) -> None:
    check_against_reference(case)


@settings(max_examples=60, deadline=None)
@given(case=cases(1000))
def test_the_law_is_the_dense_references_at_a_thousand_tokens(
    case: tuple[np.ndarray, SamplingParams, list[int], list[int]],
) -> None:
    check_against_reference(case)


def test_plain_is_softmax() -> None:
    assert law(np.log([0.1, 0.2, 0.7]), SamplingParams()) == pytest.approx([0.1, 0.2, 0.7], abs=1e-15)


def test_greedy_takes_the_lowest_of_ties() -> None:
    assert law([1.0, 3.0, 3.0, 3.0], SamplingParams(temperature=0)).tolist() == [0, 1, 0, 0]
    assert law([1, 3, 3, 3], SamplingParams(temperature=0, banned_token_ids=(1,))).tolist() == [0, 0, 1, 0]
    assert law([1.0, 3.0, 3.0, 3.0], SamplingParams(temperature=0, logit_bias={3: 0.5})).tolist() == [0, 0, 0, 1]


def test_top_k_keeps_exactly_k_and_of_ties_the_lower_ids() -> None:
    params = SamplingParams(top_k=3)
    assert np.flatnonzero(law([2.0, 5.0, 2.0, 2.0, 5.0], params)).tolist() == [0, 1, 4]
    assert np.flatnonzero(law([1.0] * 6, params)).tolist() == [0, 1, 2]
    assert np.flatnonzero(law([1.0, 2.0], params)).tolist() == [0, 1]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    z = np.log([0.1, 0.4, 0.2, 0.3])
    for top_p, kept in (
        (1e-9, [1]),
        (0.4 - 1e-9, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        assert np.flatnonzero(law(z, SamplingParams(top_p=top_p))).tolist() == kept
    flat = SamplingParams(top_p=0.5)
    assert np.flatnonzero(law([0.0] * 4, flat)).tolist() == [0, 1]  # exactly reached; lower ids first
    assert np.flatnonzero(law([0.0] * 5, flat)).tolist() == [0, 1, 2]


def test_top_p_is_right_where_much_of_the_mass_lies_in_a_long_tail() -> None:
    z = np.r_[np.zeros(1), np.full(50_000, -9.0)]  # weights 1 and 50,000 of 1.2e-4: a mass of 1 and 6.2
    kept = np.flatnonzero(law(z, SamplingParams(top_p=0.5)))
    need = 0.5 * (1 + 50_000 * math.exp(-9.0)) - 1
    assert kept.tolist() == list(range(1 + math.ceil(need / math.exp(-9.0))))


def test_min_p_is_relative_to_the_best_after_temperature() -> None:
    z = np.log([0.6, 0.25, 0.15])
    assert np.flatnonzero(law(z, SamplingParams(min_p=0.3))).tolist() == [0, 1]
    assert np.flatnonzero(law(z, SamplingParams(min_p=0.3, temperature=2.0))).tolist() == [0, 1, 2]
    assert np.flatnonzero(law([1.0, 2.0, 2.0], SamplingParams(min_p=1.0))).tolist() == [1, 2]


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    z = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.flatnonzero(law(z, SamplingParams(top_p=0.56))).tolist() == [0, 1]
    assert np.flatnonzero(law(z, SamplingParams(top_p=0.56, top_k=2))).tolist() == [0]  # 0.4 / 0.7 >= 0.56
    assert np.flatnonzero(law(z, SamplingParams(top_p=0.56, min_p=0.7))).tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.01])
def test_tiny_temperatures_are_nearly_greedy(temperature: float) -> None:
    assert law([0.0, 12.0, -4.0, 3.0], SamplingParams(temperature=temperature)).tolist() == [0, 1, 0, 0]
    assert law([0.0, 12.0, 12.0, 3.0], SamplingParams(temperature=temperature)).tolist() == [0, 0.5, 0.5, 0]


def test_penalties_count_the_output_once_each_and_repetition_the_prompt_too() -> None:
    z = [1.0, -1.0, 2.0, 0.5]
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    shaped = np.array([0.5, -2.0 - 0.25 - 1.0, 2.0, 0.25 - 0.25 - 0.5])
    expected = np.exp(shaped) / np.exp(shaped).sum()
    assert law(z, params, output=[1, 1, 3], prompt=[0, 0, 1]) == pytest.approx(expected, abs=1e-15)


def test_min_tokens_masks_what_would_end_the_answer_until_enough_exist() -> None:
    z, three = [5.0, 4.0, 1.0], SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    assert [int(law(z, three, output=[2] * n).argmax()) for n in range(4)] == [2, 2, 0, 0]
    ignoring = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,), ignore_eos=True)
    assert law(z, ignoring).argmax() == 0  # EOS ends nothing here, so it may be drawn
    both = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(0, 1), ignore_eos=True)
    assert law(z, both).argmax() == 2


def test_bias_cannot_bring_back_what_is_not_allowed() -> None:
    params = SamplingParams(allowed_token_ids=(0, 2), banned_token_ids=(2,), logit_bias={1: 90.0, 2: 90.0})
    assert law([0.0, 0.0, 0.0], params).tolist() == [1, 0, 0]


def test_processors_come_after_penalties_in_order_and_may_write_in_place() -> None:
    seen = []

    def first(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append((list(prompt), list(output), logits.tolist()))
        logits[0] = 7.0
        return logits

    def second(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append(logits.tolist())
        return np.where(logits == 7.0, -np.inf, logits).astype(np.float32)

    z = np.array([1.0, 2.0, 2.5])
    params = SamplingParams(temperature=0, presence_penalty=1.0, processors=(first, second))
    assert Sampler(params, 3).dist(z, [1], [2]).ids.tolist() == [1]
    assert seen == [([1], [2], [1.0, 2.0, 1.5]), [7.0, 2.0, 1.5]]
    assert z.tolist() == [1.0, 2.0, 2.5]


def test_a_processors_own_array_is_not_written_by_the_next_one() -> None:
    kept = np.zeros(3)

    def spoil(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        logits[:] = 1.0
        return logits

    Sampler(SamplingParams(processors=(lambda p, o, z: kept, spoil)), 3).dist(np.zeros(3), [], [])
    assert kept.tolist() == [0, 0, 0]


def test_padding_is_never_drawn() -> None:
    z = [1.0, 2.0, 9.0, math.nan]
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3, top_p=0.99),
        SamplingParams(logit_bias={2: 50.0}, min_tokens=1),
        SamplingParams(processors=(lambda p, o, z: np.full(4, 3.0),)),
    ):
        assert law(z, params, n_tokens=2)[2:].tolist() == [0, 0]
    assert law(z[:3], SamplingParams(temperature=0), n_tokens=9).argmax() == 2


@pytest.mark.parametrize("shape", [(3,), (1, 4), ()])
def test_a_processor_that_returns_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    params = SamplingParams(processors=(lambda p, o, z: z, lambda p, o, z: np.zeros(shape)))
    with pytest.raises(SettingError, match=r"^processors\[1\] returned shape .* allowed is the logits' shape \(4,\)$"):
        law([0.0] * 4, params)


def test_a_processor_that_returns_nothing_is_refused() -> None:
    with pytest.raises(SettingError, match=r"processors\[0\] returned shape \(\)"):
        law([0.0] * 4, SamplingParams(processors=(lambda p, o, z: None,)))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_token_left_and_bad_logits_are_refused(temperature: float) -> None:
    nothing = SamplingParams(temperature=temperature, allowed_token_ids=(1,), banned_token_ids=(1,))
    with pytest.raises(SettingError, match="no token is left to draw at output position 2"):
        law([0.0, 1.0], nothing, output=[0, 0])
    with pytest.raises(SettingError, match="no token is left"):
        law([-math.inf] * 2, SamplingParams(temperature=temperature))
    for bad in (math.nan, math.inf):
        with pytest.raises(SettingError, match=f"the logits hold {bad}"):
            law([0.0, bad, 1.0], SamplingParams(temperature=temperature, top_k=1))


def test_token_ids_outside_the_vocabulary_are_refused_by_setting() -> None:
    for name, value in (
        ("logit_bias", {2: 1.0, 10: 1.0}),
        ("allowed_token_ids", (1, 10)),
        ("banned_token_ids", (10,)),
        ("stop_token_ids", (10,)),
    ):
        params = SamplingParams(**{name: value})
        check_token_ids(params, 11)
        with pytest.raises(SettingError, match=f"^{name} names token 10; allowed is 0 to 9$"):
            check_token_ids(params, 10)
        with pytest.raises(SettingError, match=name):
            Sampler(params, 10)


def test_a_large_vocabulary_gives_the_same_law_in_float32() -> None:
    z = np.random.default_rng(0).normal(size=49_152).astype(np.float32) * 3
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9)
    dist = Sampler(params, len(z)).dist(z, [], [])
    order = np.lexsort((np.arange(len(z)), -z))[:40]
    weights = np.exp((z[order].astype(float) - float(z.max())) / 0.8)
    weights /= weights.sum()
    n = int((np.cumsum(weights) < 0.9).sum()) + 1
    assert dist.ids.tolist() == sorted(order[:n].tolist())
    assert dist.prob(int(order[0])) == pytest.approx(weights[0] / weights[:n].sum(), rel=1e-12)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1 - 1e-16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_a_nucleus_of_a_large_vocabulary_is_the_sorted_ones(top_p: float, scale: float) -> None:
    z = (np.random.default_rng(3).gumbel(size=30_000) * scale).astype(np.float32)
    z[::3] = -np.inf
    dist = Sampler(SamplingParams(top_p=top_p), len(z)).dist(z, [], [])
    order = np.argsort(-z, kind="stable")
    weights = np.exp(z[order].astype(float) - float(z.max()))
    weights = weights[weights > 0] / weights.sum()
    n = int((np.cumsum(weights) < top_p).sum()) + 1
    assert top_p > 0.99 or len(dist.ids) == n
    assert weights[: len(dist.ids)].sum() >= top_p - 1e-12
    assert dist.ids.tolist() == sorted(order[: len(dist.ids)].tolist())
    assert (dist.probs > 0).all()


def test_min_p_of_a_large_vocabulary_and_banned_tokens() -> None:
    z = (np.random.default_rng(4).normal(size=20_000) * 3 + 500).astype(np.float32)
    best = float(z.max())
    dist = Sampler(SamplingParams(min_p=0.01, temperature=0.7), len(z)).dist(z, [], [])
    assert dist.ids.tolist() == np.flatnonzero((z.astype(float) - best) / 0.7 >= math.log(0.01)).tolist()
    banned = (0, 5, int(z.argmax()))
    left = np.delete(np.arange(len(z)), banned)
    for params in (SamplingParams(banned_token_ids=banned), SamplingParams(banned_token_ids=banned, top_p=0.999999)):
        dist = Sampler(params, len(z)).dist(z, [], [])
        assert np.isin(dist.ids, left).all()
        assert dist.probs.sum() == pytest.approx(1.0, abs=1e-12)
        assert (len(dist.ids) == len(left)) == (params.top_p == 1.0)


def test_counts_that_grew_with_the_answer_give_the_same_law_as_counting_anew() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 300, 150).tolist()
    history, z = History(tokens, 100), rng.normal(size=300).astype(np.float32)
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    sampler = Sampler(params, 300)
    for _ in range(30):
        for path in ([], [7], [7, 7, 299], tokens[-2:]):
            grown, anew = sampler.dist_at(z, history, path), sampler.dist(z, tokens[:100], tokens[100:] + path)
            assert grown.ids.tolist() == anew.ids.tolist()
            assert grown.probs.tolist() == anew.probs.tolist()
        tokens += rng.integers(0, 300, 3).tolist()
    ids, times = history.counts([1, 1])
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
        i: float([*tokens[100:], 1, 1].count(i)) for i in {*tokens, 1}
    }


@pytest.mark.parametrize("rules", [{"banned_token_ids": (0, 1, 2)}, {"logit_bias": {0: 1e308}}])
def test_only_a_rule_is_the_requests_fault(rules: dict[str, Any]) -> None:
    sampler = Sampler(SamplingParams(temperature=0, **rules), 3, ())
    sound = np.array([1.7e308, 0.0, 1.0])
    with pytest.raises(SettingError) as caught:
        sampler.dist(sound, [0], [])
    assert caught.value.setting in rules
    for broken in (math.nan, math.inf):
        with pytest.raises(SettingError) as caught:
            sampler.dist(np.array([0.0, 1.0, broken]), [0], [])
        assert caught.value.setting is None
