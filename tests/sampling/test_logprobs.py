"""Reported log-probabilities are the raw model's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.errors import SettingError
from outrider.sampling.logprobs import TokenLogprob, token_logprobs


def test_log_softmax_of_the_raw_logits_best_first() -> None:
    z = (np.log([0.1, 0.2, 0.4, 0.2, 0.1]) + 300).astype(np.float32)
    out = token_logprobs(z, 4, 3)
    assert out.token == 4
    assert out.logprob == pytest.approx(math.log(0.1), abs=1e-4)
    assert [i for i, _ in out.top] == [2, 1, 3]  # of equals the lower id first
    assert [x for _, x in out.top] == pytest.approx(np.log([0.4, 0.2, 0.2]), abs=1e-4)


def test_all_of_them_sum_to_one_and_the_chosen_one_is_among_them() -> None:
    z = np.random.default_rng(0).normal(size=50).astype(np.float32)
    out = token_logprobs(z, 7, 100)
    assert len(out.top) == 50
    assert sum(math.exp(x) for _, x in out.top) == pytest.approx(1.0, abs=1e-12)
    assert dict(out.top)[7] == out.logprob
    assert [x for _, x in out.top] == sorted((x for _, x in out.top), reverse=True)


def test_no_top_padding_and_masked_logits() -> None:
    z = np.array([0.0, -np.inf, 0.0, 50.0])
    assert token_logprobs(z, 0, 0, n_tokens=3) == TokenLogprob(0, -math.log(2), ())
    assert token_logprobs(z, 1, 0, n_tokens=3).logprob == -math.inf
    assert token_logprobs(z, 0, 9, n_tokens=3).top == ((0, -math.log(2)), (2, -math.log(2)), (1, -math.inf))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_refused(bad: float) -> None:
    with pytest.raises(SettingError, match=f"the logits of token 0 hold {bad}"):
        token_logprobs(np.array([0.0, bad]), 0, 1)
