"""KV in bf16 and int8 under the whole engine: speculation, trees, preemption, prefix sharing change nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.core.errors import SettingError
from outrider.engine.request import RequestOutput
from outrider.models.load import LoadedModel
from outrider.ops.contract import LayerKV
from outrider.ops.native import NativeOps, available, available_isas
from outrider.runtime.memory import MIB
from outrider.runtime.runner import Runner
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.drafters import Oracle, RandomTree, Shape, context_for, registered, self_drafter
from tests.engine.harness import assert_same, finish, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.engine.kv import assert_kv
from tests.tiny import write_tiny_model
from tests.toy import toy_config

TYPES = ("float16", "bfloat16", "int8")
BUILT = pytest.mark.skipif(not available(), reason="not built")
OPERATIONS = ("reference", pytest.param("native", marks=BUILT))
HALF = torch.bfloat16 if "avx512_amx" in available_isas() else torch.float16
AUTO = HALF if available() else torch.float32  # of a model from a file
# With each kind of operations, the types that "auto" is not.
OTHERS = [("reference", kv) for kv in TYPES] + [
    pytest.param("native", kv, marks=BUILT) for kv in ("float32", *TYPES) if getattr(torch, kv) != HALF
]
PROMPTS = [prompt_of(length, seed) for length, seed in ((3, 1), (9, 1), (14, 2), (25, 3), (6, 4), (14, 1))]
GREEDY = greedy(24)
DRAFTERS = dict(registered())


@functools.cache
def target(ops: str, context: int = 256) -> LoadedModel:
    config = toy_config(max_position=context)
    if ops == "native":  # its heads are wide enough for the tiles of AMX
        config = toy_config(max_position=context, head_dim=32)
        return toy_target(config, 1, dtype=torch.float32, quantization="int4", ops=NativeOps(2))
    return toy_target(config, 1)


@functools.cache
def alone(ops: str, kv: str) -> tuple[RequestOutput, ...]:
    return tuple(plain(target(ops), prompt, GREEDY, kv_cache_dtype=kv) for prompt in PROMPTS)


@pytest.mark.parametrize(("ops", "kv"), OTHERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_plain_output_of_the_same_type(name: str, ops: str, kv: str) -> None:
    """Chunked prompts, preemption, trees, and all of it once more out of the prefix cache."""
    model = target(ops)
    proposer = DRAFTERS[name](replace(context_for(model, 6), kv_cache_dtype=kv))
    engine = make_engine(model, proposer, gamma=6, max_num_batched_tokens=24, num_kv_blocks=22, kv_cache_dtype=kv)
    for again in (False, True):
        got = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
        for mine, theirs in zip(got, alone(ops, kv), strict=True):
            assert_same(mine, theirs, again)
    assert engine.metrics.preemptions > 0


@pytest.mark.parametrize("ops", OPERATIONS)
def test_the_type_is_really_in_use(ops: str) -> None:
    """A control for the tests here: log-probabilities of each type are near those of the others, and not the same."""
    params = greedy(8, logprobs=1)
    seen = []
    for kv in ("float32" if ops == "native" else "auto", *TYPES):
        entries = plain(target(ops), PROMPTS[3], params, kv_cache_dtype=kv).completions[0].logprobs
        assert entries
        seen.append(entries[0].logprob)
    for a, b in itertools.combinations(seen, 2):
        assert 1e-7 < abs(a - b) < 0.5


@pytest.mark.parametrize("ops", OPERATIONS)
def test_auto_is_16_bits_on_native_operations(ops: str) -> None:
    """And as the model computes on others; the memory plan knows."""
    model, auto = target(ops), HALF if ops == "native" else torch.float64
    engine = make_engine(model, DRAFTERS["none"](context_for(model)))
    parts = [part for kv in engine.runner.pool.layers for part in kv.parts]
    assert {part.dtype for part in parts} == {auto}
    assert engine.memory.target_kv == sum(part.nbytes for part in parts)


@pytest.mark.parametrize("forgotten", [False, True])
def test_scales_go_where_their_codes_go(forgotten: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted branches of a tree are moved; the control is a pool that moves the codes and leaves their scales."""
    if forgotten:
        monkeypatch.setattr(LayerKV, "parts", property(lambda kv: (kv.k, kv.v)))
    answers = {tuple(prompt): out.token_ids for prompt, out in zip(PROMPTS, alone("reference", "int8"), strict=True)}
    tree = RandomTree(32, Shape(tree=True, sampled=False), answers)
    engine = make_engine(target("reference"), tree, gamma=7, kv_cache_dtype="int8")
    got = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(got, alone("reference", "int8"), strict=True)]
    assert all(same) != forgotten


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("tree", ["", "3,1,2"])
def test_both_pools_equal_a_fresh_prefill_after_every_step(kv: str, tree: str) -> None:
    """Codes and scales of every computed slot, in both models, while trees, forks and preemption move them about."""
    model = target("reference")
    drafter = TwoModels(model, model, "standard", ModelSettings(model="toy", draft_tree=tree, kv_cache_dtype=kv))
    engine = make_engine(model, drafter, gamma=7, num_kv_blocks=14, max_num_batched_tokens=24, kv_cache_dtype=kv)
    for i in range(3):
        engine.add_request([*prompt_of(11, 2), i], replace(greedy(16), temperature=0.5 * i, seed=i, n=1 + i // 2))

    def check(_: object) -> None:
        for seq in engine.sequences:
            assert_kv(engine.runner, seq, seq.n_computed)
            follower = drafter._followers.get(seq.id)
            if follower is not None:
                assert_kv(drafter.runner, seq, follower.valid)

    finish(engine, check)
    assert engine.metrics.preemptions > 0


@pytest.mark.parametrize("ops", OPERATIONS)
def test_512_tokens_are_plains(ops: str) -> None:
    """No loops that the plain output does not have, with n-grams and with a draft model."""
    model, kv = target(ops, 640), "int8"
    want = plain(model, PROMPTS[2], greedy(512), kv_cache_dtype=kv, num_kv_blocks=160)
    assert len(want.token_ids) == 512
    for drafter in (DRAFTERS["ngram chain"](context_for(model)), self_drafter(model, kv_cache_dtype=kv)):
        engine = make_engine(model, drafter, gamma=4, num_kv_blocks=170, kv_cache_dtype=kv)
        got = run_all(engine, [(PROMPTS[2], greedy(512))])[0]
        assert_same(got, want, type(drafter))
        assert got.stats.drafted > 0


@pytest.mark.parametrize("kv", TYPES)
def test_a_completely_full_pool_with_a_prefix_cache(kv: str) -> None:
    """30 prompts decode together until no block is free; then once more, partly out of the cache."""
    model = target("reference")
    prompts = [prompt_of(16, seed) for seed in range(30)]
    want = [plain(model, prompt, greedy(16), kv_cache_dtype=kv) for prompt in prompts]
    answers = {tuple(prompt): out.token_ids for prompt, out in zip(prompts, want, strict=True)}
    engine = make_engine(
        model,
        Oracle(answers),
        gamma=3,
        num_kv_blocks=130,
        max_num_seqs=30,
        max_num_batched_tokens=600,
        kv_cache_dtype=kv,
    )
    free: list[int] = []
    for _ in range(2):
        free.clear()
        requests = [engine.add_request(prompt, greedy(16)) for prompt in prompts]
        finish(engine, lambda _: free.append(engine.blocks.n_free))
        assert min(free) == 0
        for request, theirs in zip(requests, want, strict=True):
            assert_same(RequestOutput.of(request), theirs)


@pytest.mark.parametrize("mine", ["auto", *TYPES])
@pytest.mark.parametrize("theirs", ["auto", *TYPES])
def test_target_and_draft_model_choose_their_types_apart(mine: str, theirs: str) -> None:
    model = target("reference")
    want = plain(model, PROMPTS[1], GREEDY, kv_cache_dtype=mine)
    drafter = self_drafter(model, kv_cache_dtype=theirs)
    engine = make_engine(model, drafter, kv_cache_dtype=mine)
    assert_same(run_all(engine, [(PROMPTS[1], GREEDY)])[0], want)
    kinds = {"auto": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
    assert [runner.pool.layers[1].v.dtype for runner in (engine.runner, drafter.runner)] == [kinds[mine], kinds[theirs]]
    assert (engine.memory.target_kv, engine.memory.draft_kv) == (held(engine.runner), held(drafter.runner))


def held(runner: Runner) -> int:
    """Bytes of a runner's whole pool."""
    return sum(part.nbytes for kv in runner.pool.layers for part in kv.parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("settings", "own", "expected"),
    [
        ({}, {}, (AUTO, AUTO)),
        ({"kv_cache_dtype": "int8"}, {}, (torch.int8, torch.int8)),
        ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "auto"}, (torch.int8, AUTO)),
        ({}, {"kv_cache_dtype": "float32"}, (AUTO, torch.float32)),
    ],
)
def test_a_draft_models_type_is_the_targets_unless_it_has_its_own(
    folder: Path, settings: Mapping[str, Any], own: Mapping[str, Any], expected: tuple[torch.dtype, torch.dtype]
) -> None:
    llm = LLM(str(folder), {"method": "model", "model": str(folder), **own}, kv_cache_mib=4, **settings)
    drafter = llm.engine.proposers["model"]
    assert isinstance(drafter, TwoModels)
    pools = llm.engine.runner.pool, drafter.runner.pool
    assert tuple(pool.layers[0].k.dtype for pool in pools) == expected
    assert llm.generate("Numbers: ", greedy(4))[0].stats.drafted > 0


def test_smaller_types_hold_more_tokens_in_the_same_memory(folder: Path) -> None:
    vectors = 2 * 2 * 2  # of a token: keys and values, 2 layers, 2 kv heads, 8 dims each
    for kv, size in (("float32", 8 * 4), ("auto", 8 * AUTO.itemsize), ("int8", 8 + 4)):
        memory = LLM(str(folder), "none", kv_cache_mib=1, kv_cache_dtype=kv, max_num_seqs=64).engine.memory
        assert memory.tokens == MIB // (16 * vectors * size) * 16
        assert memory.target_kv == memory.tokens * vectors * size


@pytest.mark.parametrize("bad", ["fp8", "float64", "INT8", 8])
def test_any_other_type_is_refused_in_one_sentence(folder: Path, bad: object) -> None:
    for drafter, settings in (
        ("none", {"kv_cache_dtype": bad}),
        ({"method": "model", "model": str(folder), "kv_cache_dtype": bad}, {}),
    ):
        with pytest.raises(SettingError) as error:
            LLM(str(folder), drafter, **settings)  # type: ignore[arg-type]
        assert f"kv_cache_dtype is {bad!r}; allowed is " in str(error.value)
        assert "\n" not in str(error.value)
