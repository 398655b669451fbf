"""Drafts of a model with another tokenizer keep the target's law; a q that is not renormalised is caught."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.core.dist import Dist
from outrider.core.params import SamplingParams
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.harness import toy_target
from tests.engine.laws import joint_law, p_value, raw_logits
from tests.engine.test_lossless_sampled import ALPHA, PROMPT, TINY, drain, draw, outputs, wide_engine
from tests.tokens import two_tongues
from tests.toy import toy_config

TARGET, OTHER = two_tongues(toy_target(TINY, seed=3))
SHOWN: Any = OTHER
DRAFTER = toy_target(
    toy_config(vocab=OTHER.vocab_size, layers=1, hidden=16, heads=2, kv_heads=1, ffn=16), seed=8, tokenizer=SHOWN
)


class Unrenormalised(TwoModels):
    """Reports what the draft model gave a token among all of its own, not among those that can be drafted."""

    def _children(self, *args: Any) -> list[tuple[int, Dist | None]]:
        return [(t, q and Dist(q.ids, q.probs * 0.4)) for t, q in super()._children(*args)]


SHAPED: dict[str, Any] = {"temperature": 1.3, "top_k": 4, "frequency_penalty": 0.5}


@pytest.mark.parametrize(
    ("tree", "method", "rules"),
    [("", "standard", SHAPED), ("", "block", {}), ("[[0],[1],[0,0],[0,1],[1,0]]", "standard", {})],
)
def test_the_law_is_the_targets_and_a_wrong_q_is_caught(tree: str, method: str, rules: dict[str, Any]) -> None:
    settings = ModelSettings("toy", use_heterogeneous_vocab=True, draft_tree=tree)
    kinds = {"honest": TwoModels, "liar": Unrenormalised}
    engine = wide_engine(
        {name: kind(DRAFTER, TARGET, method, settings) for name, kind in kinds.items()}, method, TARGET
    )
    runs = {name: draw(engine, name, SamplingParams(**rules), 1_000) for name in kinds}
    drain(engine)
    law = joint_law(raw_logits(TARGET, PROMPT), PROMPT, SamplingParams(**rules))
    assert engine.metrics.spec["honest"].drafted > 1_000
    assert 0.1 < engine.metrics.spec["honest"].acceptance_rate < 0.9
    assert p_value(outputs(runs["honest"]), law) > ALPHA
    assert p_value(outputs(runs["liar"]), law) < 1e-6
    assert np.isclose(sum(law.values()), 1.0)
