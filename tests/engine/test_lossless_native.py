"""The engine on the native operations: fp32 and quantized, yet speculative output is plain output to the last bit.

A row's bits do not depend on what else is in its pass, so that exactness needs no fp64 here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from outrider.core.config import SpecConfig
from outrider.core.params import SamplingParams
from outrider.engine.request import RequestOutput
from outrider.models.load import LoadedModel
from outrider.ops.native import NativeOps, available
from outrider.spec.proposer import DraftContext
from tests.engine.drafters import registered
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.toy import toy_config

pytestmark = pytest.mark.skipif(not available(), reason="the native operations were not built")

FORMATS = (None, "int8", "int4")
PROMPTS = [prompt_of(length, seed) for length, seed in ((3, 1), (9, 1), (14, 2), (25, 3), (6, 4))]
NAMES = [name for name, _ in registered()]


@functools.cache
def target(quantization: str | None) -> LoadedModel:
    config = toy_config(head_dim=32)  # wide enough for the tiles of AMX
    return toy_target(config, 1, dtype=torch.float32, quantization=quantization, ops=NativeOps(2))


GREEDY = greedy(24)


@functools.cache
def alone(quantization: str | None) -> tuple[RequestOutput, ...]:
    return tuple(plain(target(quantization), prompt, GREEDY) for prompt in PROMPTS)


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_plain_output(name: str, quantization: str | None) -> None:
    model = target(quantization)
    want = alone(quantization)
    for gamma, rows, blocks in ((1, 64, 64), (4, 7, 64), (7, 64, 20)):
        spec = SpecConfig(num_speculative_tokens=gamma)
        proposer = dict(registered())[name](DraftContext(model, spec))
        engine = make_engine(model, proposer, gamma=gamma, max_num_batched_tokens=rows, num_kv_blocks=blocks)
        got = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
        for mine, theirs in zip(got, want, strict=True):
            assert_same(mine, theirs, (gamma, rows, blocks))


@pytest.mark.parametrize("quantization", FORMATS)
def test_logprobs_are_the_same_to_the_last_bit(quantization: str | None) -> None:
    model, params = target(quantization), greedy(16, logprobs=3)
    want = [plain(model, prompt, params) for prompt in PROMPTS]
    proposer = dict(registered())["model self tree"](DraftContext(model, SpecConfig()))
    got = run_all(make_engine(model, proposer, gamma=6), [(prompt, params) for prompt in PROMPTS])
    assert [o.completions[0].logprobs for o in got] == [o.completions[0].logprobs for o in want]
    assert all(o.stats.acceptance_rate > 0.3 for o in got)


def test_a_coupled_seed_gives_the_same_tokens_with_and_without_speculation() -> None:
    model = target("int4")
    params: Sequence[SamplingParams] = [SamplingParams(temperature=0.9, seed=seed, max_tokens=24) for seed in range(5)]
    jobs = list(zip(PROMPTS, params, strict=True))
    want = [run_all(make_engine(model, method="coupled"), [job])[0] for job in jobs]
    spec = SpecConfig(rejection_sample_method="coupled")
    proposer = dict(registered())["model self"](DraftContext(model, spec))
    got = run_all(make_engine(model, proposer, gamma=5, method="coupled"), jobs)
    for mine, theirs in zip(got, want, strict=True):
        assert_same(mine, theirs)
        assert mine.stats.acceptance_rate == 1.0


def test_a_pass_over_the_middle_of_a_prompt_alone_has_no_logits() -> None:
    """A long prompt with nobody beside it: whole passes without a row that gets logits."""
    model, prompt = target(None), prompt_of(40, 7)
    want = plain(model, prompt, GREEDY)
    got = run_all(make_engine(model, max_num_batched_tokens=8), [(prompt, GREEDY)])[0]
    assert_same(got, want)
