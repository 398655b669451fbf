"""Draft models that differ from the target: vocabulary, size, precision, quantization, tokenizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from outrider.core.config import SpecConfig
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.metrics import EngineMetrics
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.ops.contract import Int8Weight
from outrider.ops.native import NativeOps, available
from outrider.ops.reference import ReferenceOps
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.registry import DRAFTERS
from tests.engine.drafters import TOY_VARIANTS, Script, context_for, registered, self_drafter
from tests.engine.harness import ToyTokenizer, assert_same, greedy, make_engine, plain, run_all, toy_target
from tests.engine.laws import joint_law, p_value, raw_logits
from tests.toy import MemorySource, toy_config

PROMPT = [7, 3, 9, 7, 3, 9, 7, 3, 9, 7]
LETTERS = [chr(ord("!") + i) for i in range(58)]


def pair(drafter: LoadedModel, target: LoadedModel, method: str = "standard", **settings: object) -> TwoModels:
    return TwoModels(drafter, target, method, ModelSettings(model="toy", **settings))  # type: ignore[arg-type]


def padded(vocab: int, seed: int, tokenizer: ToyTokenizer | None = None) -> LoadedModel:
    """The toy model of 58 tokens whose embedding and head have further rows, as loud as any."""
    return toy_target(toy_config(vocab=vocab), seed, tokenizer=tokenizer or ToyTokenizer(LETTERS))


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 60), (60, 64), (58, 64), (64, 58)])
@pytest.mark.parametrize("tree", ["", "3,2,1"])
def test_vocabularies_padded_differently(target_rows: int, draft_rows: int, tree: str) -> None:
    """58 tokens, 58 to 64 rows on either side: the pair loads, padding never comes out, output is plain's."""
    target, drafter = padded(target_rows, 1), padded(draft_rows, 2)
    for temperature in (0.0, 1.5):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, logprobs=3)
        engine = make_engine(target, pair(drafter, target, draft_tree=tree), gamma=5)
        got = run_all(engine, [(PROMPT, params)])[0]
        assert got.stats.drafted > 0
        assert max(got.token_ids) < 58
        if temperature == 0:
            assert_same(got, plain(target, PROMPT, params))
        after = raw_logits(target, PROMPT, 58)
        for i, entry in enumerate(got.completions[0].logprobs or ()):
            z = after(got.token_ids[:i])
            total = z.max() + math.log(np.exp(z - z.max()).sum())
            assert entry.logprob == pytest.approx(z[entry.token] - total, abs=1e-9), "padding has no mass"
            assert all(token < 58 for token, _ in entry.top)
    with pytest.raises(SettingError, match="token id 58"):
        make_engine(target).add_request([58], greedy(1))


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(9, 7), (7, 9)])
@pytest.mark.parametrize("tree", ["", "2,1"])
def test_padding_does_not_bend_the_law(target_rows: int, draft_rows: int, tree: str) -> None:
    """Sampled with 6 tokens and 7 or 9 rows: the law is that of the 6, renormalised."""
    shape = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16}
    tokenizer = ToyTokenizer(LETTERS[:6])
    target = toy_target(toy_config(vocab=target_rows, **shape), 3, tokenizer=tokenizer)
    drafter = toy_target(toy_config(vocab=draft_rows, **shape), 4, tokenizer=tokenizer)
    engine = make_engine(
        target,
        pair(drafter, target, draft_tree=tree),
        block_size=8,
        num_kv_blocks=1200,
        max_num_seqs=400,
        max_num_batched_tokens=4000,
    )
    params = [SamplingParams(seed=seed, n=100, max_tokens=3) for seed in range(20)]
    answers = run_all(engine, [([1, 4, 2], p) for p in params])
    drawn = [choice.token_ids for answer in answers for choice in answer.completions]
    law = joint_law(raw_logits(target, [1, 4, 2], 6), [1, 4, 2], SamplingParams())
    assert p_value(drawn, law) > 0.001
    if target_rows > 6:
        wrong = joint_law(raw_logits(target, [1, 4, 2]), [1, 4, 2], SamplingParams())
        assert p_value(drawn, wrong) < 1e-6


def test_a_token_that_the_draft_model_lacks() -> None:
    """The target's tokenizer knows control tokens past the draft model's last row: no draft there, and no crash."""
    with_marks = ToyTokenizer([*LETTERS, "<mark>"], special=58)
    target = padded(64, 1, with_marks)
    drafter = toy_target(toy_config(vocab=58), 2, tokenizer=ToyTokenizer(LETTERS))
    engine = make_engine(target, pair(drafter, target))
    prompt = [58, *PROMPT]
    jobs = [(prompt, greedy(20)), (PROMPT, greedy(20))]
    marked, ordinary = run_all(engine, jobs)
    for got, job in zip((marked, ordinary), jobs, strict=True):
        assert_same(got, plain(target, *job))
    assert marked.stats.drafted == 0
    assert sum(count for reason, count in marked.stats.no_draft.items() if "lacks" in reason) == 19
    assert ordinary.stats.drafted > 0


def test_other_tokenizers_are_refused() -> None:
    """Same size or another: an error that names the sizes and the first differing token; control tokens may differ."""
    target = padded(64, 1)
    swapped = ToyTokenizer([*LETTERS[:10], "xx", *LETTERS[11:]])
    with pytest.raises(SettingError, match="token 10 is '\\+' for the target and 'xx' for the draft"):
        pair(padded(64, 2, swapped), target)
    with pytest.raises(SettingError, match="sizes 58 and 40"):
        pair(padded(64, 2, ToyTokenizer(LETTERS[:40])), target)
    pair(padded(64, 2, ToyTokenizer([*LETTERS[:57], "<other>"], special=57)), padded(64, 1, special_last()))


def special_last() -> ToyTokenizer:
    return ToyTokenizer([*LETTERS[:57], "<end>"], special=57)


@pytest.mark.parametrize(
    ("target_in", "draft_in"), [("int8", None), (None, "int8"), ("int8", "int8")], ids=["target", "draft", "both"]
)
def test_each_model_has_its_own_quantization(target_in: str | None, draft_in: str | None) -> None:
    """Int8 on one side says nothing about the other; output is that of the target as it is."""
    target, drafter = (toy_target(seed=1, quantization=how) for how in (target_in, draft_in))
    assert isinstance(target.decoder.layers[0].q, Int8Weight) == (target_in is not None)
    assert isinstance(drafter.decoder.layers[0].q, Int8Weight) == (draft_in is not None)
    want = plain(target, PROMPT, greedy(60))
    engine = make_engine(target, pair(drafter, target))
    got = run_all(engine, [(PROMPT, greedy(60))])[0]
    assert_same(got, want)
    assert got.stats.acceptance_rate > (0.99 if target_in == draft_in else 0.3)
    assert engine.memory.draft_weights == drafter.weight_bytes
    assert engine.memory.target_weights == target.weight_bytes


@pytest.mark.skipif(not available(), reason="the extension is not built")
@pytest.mark.parametrize(
    ("target_in", "draft_in"), [("int8", "int4"), ("int4", "int8"), ("int4", None), (None, "int4")]
)
def test_each_model_has_its_own_quantization_on_the_native_operations(
    target_in: str | None, draft_in: str | None
) -> None:
    """As above, in one engine on one thread pool; output is the target's to the last bit."""
    ops = NativeOps(2)
    target, drafter = (
        toy_target(seed=1, dtype=torch.float32, quantization=how, ops=ops) for how in (target_in, draft_in)
    )
    formats = {None: ("f32", "f32"), "int8": ("int8", "int8"), "int4": ("q4_1", "int8")}
    for model, how in ((target, target_in), (drafter, draft_in)):
        assert (model.decoder.layers[0].q.format, model.decoder.head.format) == formats[how]  # type: ignore[union-attr]
    want = plain(target, PROMPT, greedy(60))
    engine = make_engine(target, pair(drafter, target))
    got = run_all(engine, [(PROMPT, greedy(60))])[0]
    assert_same(got, want)
    assert got.stats.accepted > 0
    assert engine.memory.draft_weights == drafter.weight_bytes != target.weight_bytes


MIXES = [
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize(("target_in", "draft_in"), MIXES)
def test_each_model_has_its_own_precision(target_in: torch.dtype, draft_in: torch.dtype) -> None:
    """Weights, KV and logits of either side in its own type: no dtype error, the target's verdict in its own."""
    target, drafter = (toy_target(seed=1, dtype=dtype) for dtype in (target_in, draft_in))
    two = pair(drafter, target, draft_tree="2,2")
    engine = make_engine(target, two, gamma=6)
    got = run_all(engine, [(PROMPT, greedy(40))])[0]
    assert engine.runner.pool.layers[0].k.dtype == target_in
    assert two.runner.pool.layers[0].k.dtype == draft_in
    assert got.stats.accepted > 0
    if target_in is not torch.bfloat16:  # whose rows may round apart by their number
        assert_same(got, plain(target, PROMPT, greedy(40)))
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
    assert len(run_all(engine, [(PROMPT, sampled)])[0].token_ids) == 20


@pytest.mark.parametrize("hidden", [16, 64])
def test_the_draft_model_has_any_shape(hidden: int) -> None:
    """Another width, depth, number of heads and family: a two-model draft shares nothing but tokens."""
    target = toy_target(toy_config(hidden=32), seed=1)
    for architecture, layers, heads, kv_heads in (("qwen3", 1, 2, 1), ("mistral", 4, 4, 4), ("qwen2", 3, 4, 2)):
        drafter = toy_target(toy_config(architecture, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads), 2)
        got = run_all(make_engine(target, pair(drafter, target)), [(PROMPT[:5], greedy(30))])[0]
        assert_same(got, plain(target, PROMPT[:5], greedy(30)))
        assert got.stats.drafted > 0


def test_a_target_as_its_own_drafter_is_left_as_it_is() -> None:
    """Draft and target pools are apart although the weights are one: neither run disturbs the other."""
    target = toy_target(seed=1)
    before = [tensor.clone() for tensor in (target.decoder.embedding, target.decoder.layers[0].input_norm)]
    drafter = self_drafter(target)
    engine = make_engine(target, drafter)
    first = run_all(engine, [(PROMPT, greedy(30))])[0]
    assert_same(first, plain(target, PROMPT, greedy(30)))
    assert drafter.runner.pool is not engine.runner.pool
    after = [target.decoder.embedding, target.decoder.layers[0].input_norm]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_each_decoder_keeps_its_own_head_and_embedding() -> None:
    """Nothing of the draft model is replaced by the target's, nor the other way round."""
    for tied in (True, False):
        sources = [MemorySource(toy_config(tie_embeddings=tied), seed) for seed in (1, 2)]
        target, drafter = (Decoder.from_source(s, ReferenceOps(), torch.float64, "cpu") for s in sources)
        loaded = [LoadedModel("toy", d.config, d, None, None, d.weight_bytes) for d in (target, drafter)]
        run_all(make_engine(loaded[0], pair(loaded[1], loaded[0])), [(PROMPT, greedy(8))])
        for source, decoder in zip(sources, (target, drafter), strict=True):
            assert torch.equal(decoder.embedding, source.tensors["model.embed_tokens.weight"])
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            assert torch.equal(decoder.head, source.tensors[name])


@pytest.mark.parametrize("name", [name for name, _ in registered()])
def test_every_drafter_serves_plans_and_counts(name: str) -> None:
    """Start, plan, metrics and one request with each alone; a drafter without a model weighs nothing."""
    target = toy_target(seed=1)
    build = dict(registered())[name]
    engine = make_engine(target, build(context_for(target)))
    assert engine.metrics == EngineMetrics()
    needs = engine.proposers["drafter"].needs
    assert engine.memory.draft_weights == needs.weight_bytes
    assert (needs.weight_bytes > 0) == any(kind in name for kind in ("model", "medusa", "eagle", "adapter"))
    got = run_all(engine, [(PROMPT, greedy(8))])[0]
    assert_same(got, plain(target, PROMPT, greedy(8)))
    assert engine.metrics.requests_finished == 1
    assert engine.metrics.generated_tokens == 8


def test_every_registered_drafter_is_tested() -> None:
    """A new drafter joins these tests by being registered; one that needs settings must say which to test with."""
    built = {name.split(" ")[0] for name, _ in registered()}
    assert built == set(DRAFTERS)
    assert set(TOY_VARIANTS) <= set(DRAFTERS)


def test_a_drafter_not_loaded_is_refused() -> None:
    """The error names what is loaded; several drafters in one engine serve their own requests."""
    target = toy_target(seed=1)
    engine = make_engine(target, {"script": Script(1), "model": self_drafter(target)})
    with pytest.raises(SettingError, match=r"drafter is 'modell'; loaded .* script, model \(did you mean 'model'\?\)"):
        engine.add_request(PROMPT, greedy(4), SpecParams(drafter="modell"))
    got = run_all(engine, [(PROMPT, greedy(20), SpecParams(drafter=name)) for name in ("model", "script")])
    assert [answer.drafter for answer in got] == ["model", "script"]
    assert got[0].stats.acceptance_rate == 1.0
    assert got[0].token_ids == got[1].token_ids


@pytest.mark.parametrize("token", [-1, 32])
def test_a_drafter_that_makes_up_tokens_is_not_believed(token: int, caplog: pytest.LogCaptureFixture) -> None:
    """An id outside the vocabulary never reaches the embedding: the draft is lost, no answer is, and it is said why."""
    target = toy_target(seed=1)
    engine = make_engine(target, {"bad": Script(token), "good": self_drafter(target)})
    jobs = [(PROMPT, greedy(12), SpecParams(drafter=name)) for name in ("bad", "good")]
    bad, good = run_all(engine, jobs)
    for got in (bad, good):
        assert_same(got, plain(target, PROMPT, greedy(12)))
    assert bad.stats.drafted == 0
    assert "the drafter failed" in bad.stats.no_draft
    assert [m for m in caplog.messages if "failed" in m] == [
        f"drafter bad failed: token id {token}, where 0 to 31 are allowed"
    ]  # said once, not each step
    assert good.stats.acceptance_rate == 1.0


def test_ids_without_a_token_never_come_out() -> None:
    """A tokenizer with holes: an id that stands for nothing is like padding, although the model likes it best."""
    tokenizer = ToyTokenizer(LETTERS[:32], unused_ids=(14, 22))
    target = toy_target(seed=1, tokenizer=tokenizer)
    assert 22 in plain(toy_target(seed=1), PROMPT, greedy(30)).token_ids
    want = plain(target, PROMPT, greedy(30))
    assert not {14, 22} & set(want.token_ids)
    for drafter in (Script(22, 14), self_drafter(target)):
        got = run_all(make_engine(target, drafter), [(PROMPT, greedy(30))])[0]
        assert_same(got, want)


def test_more_draft_than_the_budget_is_cut_without_looking() -> None:
    """A drafter that hands over too much: the first rows stay, whatever their tokens are."""

    class TooMuch(Script):
        def propose(self, spans):  # type: ignore[no-untyped-def]
            return [Draft.chain([3] * 50) for _ in spans]

    target = toy_target(seed=1)
    got = run_all(make_engine(target, TooMuch(3), gamma=2), [(PROMPT, greedy(12))])[0]
    assert_same(got, plain(target, PROMPT, greedy(12)))
    assert got.stats.drafted <= 2 * got.stats.steps


def test_the_settings_of_the_engines_drafter_are_checked() -> None:
    with pytest.raises(SettingError, match="rejection_sample_method"):
        SpecConfig(rejection_sample_method="typical")
    with pytest.raises(SettingError, match="num_speculative_tokens"):
        SpecConfig(num_speculative_tokens=-1)
