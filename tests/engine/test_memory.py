"""KV blocks and their content: nothing leaks, nothing stale is read, and the draft model's KV follows the target's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import choice_seed
from outrider.core.types import FinishReason
from outrider.engine.engine import Engine
from outrider.runtime.memory import MIB
from tests.engine.drafters import Oracle, RandomTree, Shape, Wrong, context_for, registered, self_drafter
from tests.engine.harness import assert_same, finish, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.engine.kv import assert_kv
from tests.toy import toy_config

TARGET = toy_target(seed=1)
WIDE = toy_target(toy_config(max_position=512), seed=1)
PROMPT = [7, 3, 9, 7, 3, 9, 7, 3, 9, 7, 30]
DRAFTERS = dict(registered())


def answers_to(prompts: Sequence[Sequence[int]], n: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(prompt): plain(WIDE, prompt, greedy(n)).token_ids for prompt in prompts}


@pytest.mark.parametrize("pool", [64, 14])
@pytest.mark.parametrize("seed", [-1, 5])
@pytest.mark.parametrize("tree", ["", "3,1,2"])
def test_both_kv_pools_equal_a_fresh_prefill_after_every_step(pool: int, seed: int, tree: str) -> None:
    """Bonus tokens, rejected drafts, moved branches, shared prefixes, forks and preemption leave nothing stale."""
    if seed < 0:
        drafter = self_drafter(TARGET, draft_tree=tree)
    else:
        drafter = DRAFTERS["model other tree" if tree else "model other"](context_for(TARGET))
    engine = make_engine(TARGET, drafter, gamma=7, num_kv_blocks=pool, max_num_batched_tokens=24)
    for i in range(3):
        engine.add_request([*PROMPT, i], SamplingParams(temperature=0.5 * i, seed=i, max_tokens=24, n=1 + i // 2))
    checked = 0

    def check(_: object) -> None:
        nonlocal checked
        for seq in engine.sequences:
            assert_kv(engine.runner, seq, seq.n_computed)
            follower = drafter._followers.get(seq.id)
            if follower is not None:
                assert follower.valid <= seq.n_computed
                assert_kv(drafter.runner, seq, follower.valid)
                checked += follower.valid
        blocks = engine.blocks
        for block in [b for b in range(blocks.n_blocks) if drafter._filled.get(b) == blocks.version[b]]:
            held = [(seq, seq.blocks.index(block)) for seq in engine.sequences if block in seq.blocks]
            for seq, at in held:
                assert (at + 1) * blocks.block_size <= seq.n_computed
                assert_kv(drafter.runner, seq, (at + 1) * blocks.block_size)

    finish(engine, check)
    assert checked > 100
    assert (engine.metrics.preemptions > 0) == (pool == 14)


@pytest.mark.parametrize("caching", [True, False])
def test_free_blocks_return_to_the_start(caching: bool) -> None:
    """Block 16, k = 5: one request, then 400 of mixed lengths, a third aborted at random, choices and preemption."""
    rng = random.Random(5)
    engine = make_engine(
        TARGET,
        {"tree": RandomTree(32, Shape(tree=True, sampled=True)), "model": self_drafter(TARGET)},
        gamma=5,
        block_size=16,
        num_kv_blocks=12,
        enable_prefix_caching=caching,
    )
    run_all(engine, [(PROMPT, greedy(10))])
    doomed: list[tuple[int, int]] = []  # (step, request)
    arrived, step = 0, 0
    while engine.has_work or arrived < 400:
        while arrived < 400 and len(engine.sequences) < 12:
            params = SamplingParams(seed=arrived, max_tokens=rng.randrange(1, 24), n=rng.choice((1, 1, 1, 2)))
            spec = SpecParams(drafter=rng.choice(("tree", "tree", "model")))
            request = engine.add_request(prompt_of(rng.randrange(1, 60), arrived % 7), params, spec)
            if rng.random() < 1 / 3:
                doomed.append((step + rng.randrange(0, 6), request.id))
            arrived += 1
        for when, request_id in doomed:
            if when == step:
                engine.abort(request_id)
                engine.check_integrity()
        engine.step()
        engine.check_integrity()
        step += 1
        assert step < 5000
    assert engine.blocks.n_free == 12
    assert engine.metrics.preemptions > 0
    assert engine.metrics.requests_aborted > 50
    assert engine.metrics.requests_finished + engine.metrics.requests_aborted == 401
    for kept in (engine.scheduler.running, engine.scheduler.waiting, engine._request_of, engine._answer_of):
        assert not kept
    assert not engine.proposers["model"]._followers  # type: ignore[attr-defined]


@pytest.mark.parametrize("gamma", [1, 5])
def test_sliding_windows_keep_the_books(gamma: int) -> None:
    """Window 24 over blocks of 16: every block is used, free or cached after every step; the output is plain's."""
    target = toy_target(toy_config("mistral", sliding_window=(24, 24)), seed=2)
    prompts = [prompt_of(20, i) for i in range(4)]
    engine = make_engine(target, self_drafter(target), gamma=gamma, block_size=16, num_kv_blocks=16)
    for got, prompt in zip(run_all(engine, [(p, greedy(60)) for p in prompts]), prompts, strict=True):
        assert_same(got, plain(target, prompt, greedy(60)))


@pytest.mark.parametrize("block_size", [16, 1, 3])
def test_wide_and_deep_trees(block_size: int) -> None:
    """Width 4, depth 5: twenty nodes over many blocks; every block comes back, the output is plain's."""
    prompts = [prompt_of(3 + i, i) for i in range(6)]
    wants = [plain(TARGET, prompt, greedy(60)) for prompt in prompts]
    drafter = self_drafter(TARGET, draft_tree="4,1,1,1,1")
    engine = make_engine(TARGET, drafter, gamma=20, block_size=block_size, num_kv_blocks=-(-640 // block_size))
    for _ in range(3):
        for got, want in zip(run_all(engine, [(prompt, greedy(60)) for prompt in prompts]), wants, strict=True):
            assert_same(got, want)
            assert got.stats.accepted_per_position[4] >= 6  # the best branch is right, five deep, while there is room


@pytest.mark.parametrize("gamma", [15, 16, 17, 20, 33])
def test_drafts_as_long_as_a_block_and_longer(gamma: int) -> None:
    """Block 16: the rows to verify span two and three blocks; all accepted, all rejected, and trees between."""
    prompts = [prompt_of(n, n) for n in (15, 16, 17)]
    answers = answers_to(prompts, 128)
    for drafter in (Oracle(answers), Wrong(answers, 32), RandomTree(32, Shape(tree=True, quality=0.9), answers)):
        engine = make_engine(WIDE, drafter, gamma=gamma, block_size=16)
        for got in run_all(engine, [(prompt, greedy(128)) for prompt in prompts]):
            assert got.token_ids == answers[got.prompt_ids]


@pytest.mark.parametrize("caching", [True, False])
def test_one_request_fills_the_pool(caching: bool) -> None:
    """8 blocks of 16, prompt 100, 500 tokens wanted: it ends with its pool, and the next request is served."""
    prompt = prompt_of(100)
    want = plain(WIDE, prompt, greedy(28))
    for drafter in (self_drafter(WIDE), Oracle({tuple(prompt): want.token_ids})):
        engine = make_engine(WIDE, drafter, gamma=5, block_size=16, num_kv_blocks=8, enable_prefix_caching=caching)
        got = run_all(engine, [(prompt, greedy(500))])[0]
        assert (got.token_ids, got.completions[0].finish_reason) == (want.token_ids, FinishReason.LENGTH)
        short = run_all(engine, [(prompt[:8], greedy(8))])[0] if not isinstance(drafter, Oracle) else None
        assert short is None or short.token_ids == plain(WIDE, prompt[:8], greedy(8)).token_ids
        with pytest.raises(SettingError, match="the KV cache holds 128"):
            engine.add_request(prompt_of(128), greedy(1))
        with_choices = SamplingParams(seed=1, n=3, max_tokens=500)
        many = engine.add_request(prompt, with_choices, SpecParams(enabled=False))
        finish(engine)
        assert [len(answer.seq.output_ids) for answer in many.answers] == [28] * 3


def test_preempted_requests_resume_as_if_nothing_had_happened() -> None:
    """20 blocks of 16, four requests of 100 + 80 tokens: old drafts are forgotten, all outputs are plain's."""
    prompts = [prompt_of(100, i) for i in range(4)]
    answers = answers_to(prompts, 80)
    oracle = Oracle(answers)
    for drafter in (oracle, self_drafter(WIDE), Wrong(answers, 32), DRAFTERS["ngram tree"](context_for(WIDE))):
        engine = make_engine(WIDE, drafter, block_size=16, num_kv_blocks=20, enable_prefix_caching=False)
        for got in run_all(engine, [(prompt, greedy(80)) for prompt in prompts]):
            assert got.token_ids == answers[got.prompt_ids]
        assert engine.metrics.preemptions > 0
    assert len(oracle.released) > 4, "also told of each preemption"
    lengths = [(seq_id, length) for seq_id, length, _ in oracle.asked]
    assert len(set(lengths)) == len(lengths), "no draft is asked for, or verified, twice"


def test_requests_with_one_prefix_in_one_step() -> None:
    """Blocks that are still being computed are never read by another request: both equal solo runs."""
    prompts = [[*prompt_of(64), 1, 2], [*prompt_of(64), 3]]
    answers = answers_to(prompts, 20)
    for rows in (512, 16, 40, 5):
        engine = make_engine(WIDE, self_drafter(WIDE), block_size=16, max_num_batched_tokens=rows)

        def check(_: object, engine: Engine = engine) -> None:
            for seq in engine.sequences:
                assert_kv(engine.runner, seq, seq.n_computed)

        requests = [engine.add_request(prompt, greedy(20)) for prompt in prompts]
        finish(engine, check)
        for request, prompt in zip(requests, prompts, strict=True):
            assert tuple(request.answers[0].seq.output_ids) == answers[tuple(prompt)]


@pytest.mark.parametrize("kind", ["wrong", "tree"])
def test_only_committed_tokens_reach_the_prefix_cache(kind: str) -> None:
    """A's drafts are all wrong; B repeats A's prompt and answer: it hits the cache and equals a cold run."""
    prompt = prompt_of(20)
    answers = answers_to([prompt], 100)
    first = answers[tuple(prompt)]
    drafter = Wrong(answers, 32) if kind == "wrong" else RandomTree(32, Shape(tree=True), answers)
    engine = make_engine(WIDE, drafter, gamma=5, block_size=16)
    got = run_all(engine, [(prompt, greedy(100))])[0]
    assert got.token_ids == first
    again = [*prompt, *first, 1, 2, 3, 4, 5]
    request = engine.add_request(again, greedy(20), SpecParams(enabled=False))
    engine.step()
    seq = request.answers[0].seq
    assert seq.n_cached == 112  # all full blocks of the 119 tokens that A had computed
    assert_kv(engine.runner, seq, seq.n_computed)
    finish(engine)
    assert tuple(seq.output_ids) == plain(WIDE, again, greedy(20)).token_ids


@pytest.mark.parametrize("shared", [16, 32, 64])
@pytest.mark.parametrize("name", ["none", "ngram chain", "model self"])
def test_prefix_hits_are_not_lost_by_drafting(shared: int, name: str) -> None:
    """Every full block of a shared prefix is found, drafter or not, and reported; the draft model uses its KV too."""
    engine = make_engine(WIDE, DRAFTERS[name](context_for(WIDE)), block_size=16)
    prompts = [[*prompt_of(shared), *prompt_of(8, seed)] for seed in (1, 2)]
    first, second = [run_all(engine, [(prompt, greedy(10))])[0] for prompt in prompts]
    assert (first.cached_tokens, second.cached_tokens) == (0, shared)
    assert engine.metrics.cached_prompt_tokens == shared
    assert second.token_ids == plain(WIDE, prompts[1], greedy(10)).token_ids
    if name == "model self":
        assert second.stats.acceptance_rate == 1.0


def test_cached_tokens_never_count_a_requests_own_answer() -> None:
    """A preempted request finds its own blocks again; that is no hit of its prompt."""
    engine = make_engine(TARGET, self_drafter(TARGET), num_kv_blocks=12)
    for got in run_all(engine, [(prompt_of(9, i), greedy(24)) for i in range(3)]):
        assert got.cached_tokens == 0
    assert engine.metrics.preemptions > 0


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8])
def test_choices_share_the_prompt_and_nothing_else(method: str, prompt_length: int) -> None:
    """n = 4: the prompt is computed once, blocks are copied on write, each choice equals a solo run with its seed."""
    prompt = prompt_of(prompt_length)
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=14, n=4)
    for caching in (True, False):
        drafter = self_drafter(TARGET, method)
        engine = make_engine(TARGET, drafter, method=method, enable_prefix_caching=caching)
        request = engine.add_request(prompt, params)
        finish(engine, lambda _, engine=engine: [assert_kv(engine.runner, s, s.n_computed) for s in engine.sequences])
        outputs = [tuple(answer.seq.output_ids) for answer in request.answers]
        assert len(set(outputs)) == 4
        assert engine.metrics.prompt_rows == prompt_length + 3  # each further choice computes the last token anew
        for index, output in enumerate(outputs):
            alone = SamplingParams(temperature=1.0, seed=choice_seed(9, index), max_tokens=14)
            solo = run_all(make_engine(TARGET, self_drafter(TARGET, method), method=method), [(prompt, alone)])[0]
            assert output == solo.token_ids


def test_the_plan_counts_target_and_drafter() -> None:
    """Weights and KV of both, item by item; a budget below one block is refused at the start."""
    drafter = DRAFTERS["model other"](context_for(TARGET))
    both = make_engine(TARGET, drafter, num_kv_blocks=None, kv_cache_mib=1, block_size=16)
    alone = make_engine(TARGET, num_kv_blocks=None, kv_cache_mib=1, block_size=16)
    assert both.memory.target_weights == alone.memory.target_weights == TARGET.weight_bytes
    assert both.memory.draft_weights == drafter.drafter.weight_bytes > 0
    assert alone.memory.draft_weights == alone.memory.draft_kv == 0
    for engine in (both, alone):
        kv = engine.memory.target_kv + engine.memory.draft_kv
        assert MIB * 0.95 < kv <= MIB
        pools = [engine.runner.pool, *([drafter.runner.pool] if engine is both else [])]
        assert kv == sum(t.nbytes for pool in pools for layer in pool.layers for t in (layer.k, layer.v))
    # one draft layer beside two target layers: a third of the memory, not a copy a sequence
    assert both.memory.draft_kv * 2 == both.memory.target_kv
    assert [line.split(":")[0] for line in both.memory.lines()] == [
        "target weights",
        "draft weights",
        "target KV",
        "draft KV",
        "KV cache",
    ]
    big = toy_target(toy_config(layers=4))
    with pytest.raises(SettingError, match="kv_cache_mib is 1; allowed is at least 2"):
        make_engine(big, self_drafter(big), num_kv_blocks=None, kv_cache_mib=1, block_size=1024)
