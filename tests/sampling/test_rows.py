"""Rows of a draft: each with its own node's history, each computed once and only when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.sampling.history import History
from outrider.sampling.rows import NodeRows
from outrider.sampling.sampler import Sampler

TREE = Draft.tree([4, 5, 6, 5], [-1, -1, 0, 2])  # 4 -> 6 -> 5, and 5 beside 4
LOGITS = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)


def test_every_row_sees_prompt_output_and_its_own_path_each_once() -> None:
    """A penalty that counted the last committed token twice, or a sibling, would show here (FAULTS B11)."""
    seen: list[tuple[list[int], list[int]]] = []

    def note(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        seen.append((list(prompt), list(output)))
        return logits

    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.7, repetition_penalty=1.2, processors=(note,))
    sampler = Sampler(params, 8)
    rows = NodeRows(sampler, LOGITS, History([1, 2, 3, 3], 2), TREE)
    laws = list(rows)
    histories = [[3, 3], [3, 3, 4], [3, 3, 5], [3, 3, 4, 6], [3, 3, 4, 6, 5]]
    assert seen == [([1, 2], h) for h in histories]
    for i, history in enumerate(histories):
        alone = sampler.dist(LOGITS[i], [1, 2], history)
        assert alone.ids.tolist() == laws[i].ids.tolist()
        assert alone.probs.tolist() == laws[i].probs.tolist()


def test_rows_are_lazy_and_remembered() -> None:
    asked: list[int] = []

    def note(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        asked.append(len(output))
        return logits

    rows = NodeRows(Sampler(SamplingParams(processors=(note,)), 8), LOGITS, History([1, 2], 1), TREE)
    assert asked == []
    assert rows[3] is rows[3]
    assert rows[-1] is rows[4]
    assert asked == [3, 4]
    assert rows[2:5] == [rows[2], rows[3], rows[4]]
    assert len(rows) == 5
    for bad in (5, -6):
        with pytest.raises(IndexError):
            rows[bad]


def test_a_greatest_logit_that_is_known_is_not_looked_for_again() -> None:
    """Unless the rules of the request move it, it lies in the padding, or it is not known."""
    best = np.array([2, 3, -1, 7, 2])
    free, moved = SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={1: 100.0})

    def tokens(sampler: Sampler) -> list[int]:
        return [int(dist.ids[0]) for dist in NodeRows(sampler, LOGITS, History([1, 2], 1), TREE, best)]

    looked = LOGITS.argmax(-1).tolist()
    assert tokens(Sampler(free, 8)) == [2, 3, looked[2], 7, 2] != looked
    assert tokens(Sampler(free, 8, n_tokens=7)) == [2, 3, looked[2], int(LOGITS[3, :7].argmax()), 2]
    assert tokens(Sampler(moved, 8)) == [1] * 5


def test_plain_choices_are_what_the_rules_would_choose() -> None:
    """And are left to them wherever it takes more than the greatest logit."""
    greedy, best = SamplingParams(temperature=0), LOGITS.argmax(-1)
    sampler = Sampler(greedy, 8)
    assert sampler.plain_choices(best) == [int(sampler.dist(row, [1], []).ids[0]) for row in LOGITS]
    unknown = best.copy()
    unknown[-1] = -1
    assert sampler.plain_choices(unknown) is None
    assert Sampler(greedy, 8, n_tokens=int(best.max())).plain_choices(best) is None
    for rules in ({"temperature": 1.0}, {"min_tokens": 1}, {"presence_penalty": 0.5}, {"banned_token_ids": (5,)}):
        params = SamplingParams(**{"temperature": 0, **rules})
        assert Sampler(params, 8, eos_ids=(5,)).plain_choices(best) is None
