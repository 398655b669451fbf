"""The reference path runs unchanged on a GPU."""

from __future__ import annotations

import pytest
import torch

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.models.load import LoadedModel
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.drafts.ngram import Ngram, NgramSettings
from outrider.spec.drafts.none import NoDraft
from outrider.spec.proposer import Proposer
from tests.toy import toy_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def greedy(model: LoadedModel, proposer: Proposer) -> list[tuple[int, ...]]:
    config = EngineConfig(model="toy", num_kv_blocks=64, block_size=4, max_num_batched_tokens=16)
    engine = Engine(model, config, {"d": proposer}, SpecConfig(num_speculative_tokens=6))
    params = SamplingParams(temperature=0, max_tokens=32)
    requests = [engine.add_request([1, 2, 3, i], params) for i in range(4)]
    outputs = [engine.run(request).token_ids for request in requests]
    engine.check_integrity()
    assert engine.blocks.n_free == 64
    return outputs


def test_output_on_the_gpu_equals_the_cpu_for_every_kind_of_draft() -> None:
    expected = greedy(toy_model(), NoDraft())
    gpu, other = toy_model(device="cuda"), toy_model(seed=3, device="cuda")
    tree = ModelSettings(model="toy", draft_tree="2,2,1")
    for proposer in (
        NoDraft(),
        Ngram(NgramSettings(prompt_lookup_branches=2)),
        TwoModels(gpu, gpu, "standard", tree),
        TwoModels(other, gpu, "standard", tree),
    ):
        assert greedy(gpu, proposer) == expected
