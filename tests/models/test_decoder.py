from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.errors import ModelFileError
from outrider.models.config import ModelConfig, RopeConfig
from outrider.models.decoder import Decoder, expected_tensors
from outrider.models.rope import rope_frequencies
from outrider.ops.contract import Int8Weight
from outrider.ops.native import NativeOps, NativeWeight, available
from outrider.ops.reference import ReferenceOps
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, full_logits, toy_config, toy_decoder

TOKENS = [(7 * i * i + 3 * i + 1) % 32 for i in range(40)]
YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position=64)

MODELS = {
    "llama": toy_config(),
    "all biases": toy_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "tied, no grouping": toy_config(tie_embeddings=True, kv_heads=4),
    "one kv head, wide heads": toy_config(kv_heads=1, head_dim=12),
    "mistral": toy_config("mistral", sliding_window=(5, 5)),
    "qwen2": toy_config("qwen2", rope=YARN),
    "qwen3, mixed windows": toy_config("qwen3", layers=3, sliding_window=(None, 6, None)),
}
WINDOWS = pytest.mark.parametrize("window", [(), (6, 6), (None, 3)], ids=str)
TREE = Draft.tree([5, 6, 7, 8, 9, 10, 11], [-1, -1, 0, 0, 1, 4, 3])


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def chain_logits(decoder: Decoder, prompt: list[int], draft: Draft) -> torch.Tensor:
    """What each draft node must get: its own path scored as plain text."""
    paths = [[draft.tokens[i] for i in draft.path(node)] for node in range(len(draft))]
    return torch.stack([full_logits(decoder, prompt + path)[-1] for path in paths])


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return toy_decoder(request.param)


def test_one_pass_equals_dense_reference(decoder: Decoder) -> None:
    (got,) = Paged(decoder).run(Rows(0, TOKENS))
    same(got, full_logits(decoder, TOKENS))
    assert len(set(got.argmax(-1).tolist())) > 8  # the toys say different things


def test_chunks_and_single_steps_equal_one_pass(decoder: Decoder) -> None:
    paged, got, cuts = Paged(decoder), [], [0, 7, 8, 9, 25, 26, 27, 40]
    for start, end in pairwise(cuts):
        got += paged.run(Rows(0, TOKENS[start:end]))
    same(torch.cat(got), full_logits(decoder, TOKENS))


def test_a_window_matters() -> None:
    free, narrow = toy_decoder(), toy_decoder(toy_config(sliding_window=(5, 5)))
    a, b = full_logits(free, TOKENS), full_logits(narrow, TOKENS)
    same(a[:5], b[:5])
    assert (a[5:] - b[5:]).abs().amax(-1).min() > 1e-3


@WINDOWS
@pytest.mark.parametrize("start", [0, 9])
def test_tree_row_equals_its_path_alone(window: tuple[int | None, ...], start: int) -> None:
    decoder = toy_decoder(toy_config(sliding_window=window))
    paged = Paged(decoder)
    if start:
        paged.run(Rows(0, TOKENS[:start]))
    (got,) = paged.run(Rows(0, TOKENS[start:13], TREE))
    same(got[: 13 - start], full_logits(decoder, TOKENS[:13])[start:])
    same(got[13 - start :], chain_logits(decoder, TOKENS[:13], TREE))


@WINDOWS
def test_chain_of_drafts_needs_no_mask(window: tuple[int | None, ...]) -> None:
    decoder, draft = toy_decoder(toy_config(sliding_window=window)), Draft.chain([3, 1, 4, 1, 5])
    paged = Paged(decoder)
    paged.run(Rows(0, TOKENS[:10]))
    (got,) = paged.run(Rows(0, TOKENS[10:11], draft))
    same(got[1:], chain_logits(decoder, TOKENS[:11], draft))


@WINDOWS
def test_tree_over_several_mask_words(window: tuple[int | None, ...]) -> None:
    parents = [-1] + [max(-1, (3 * i) % 61 - 2) if i > 61 else (i - 1) // 2 for i in range(1, 130)]
    decoder, draft = toy_decoder(toy_config(sliding_window=window)), Draft.tree([i % 32 for i in range(130)], parents)
    paged = Paged(decoder)
    paged.run(Rows(0, TOKENS[:6]))
    (got,) = paged.run(Rows(0, TOKENS[6:7], draft))
    same(got[1:], chain_logits(decoder, TOKENS[:7], draft))


@WINDOWS
def test_tree_grown_in_passes(window: tuple[int | None, ...]) -> None:
    """As a draft model grows its draft: earlier nodes are in the KV, later ones are this pass's only rows."""
    decoder = toy_decoder(toy_config(sliding_window=window))
    paged = Paged(decoder)
    paged.run(Rows(0, TOKENS[:10], TREE.truncated(2)))
    got = [*paged.run(Rows(0, [], TREE.truncated(5), done=2)), *paged.run(Rows(0, [], TREE, done=5))]
    same(torch.cat(got), chain_logits(decoder, TOKENS[:10], TREE)[2:])


@WINDOWS
@pytest.mark.parametrize("with_tree", [True, False])
def test_sequences_in_one_batch_equal_solo(window: tuple[int | None, ...], with_tree: bool) -> None:
    decoder = toy_decoder(toy_config(sliding_window=window))
    chain = Draft.chain([9, 8])
    before = [TOKENS[:4], [], TOKENS[5:30], TOKENS[3:9], TOKENS[8:17], TOKENS[20:31]]
    step = [
        Rows(0, [1]),
        Rows(1, TOKENS[9:20]),
        Rows(2, [2], TREE if with_tree else chain),
        Rows(3, [3]),
        Rows(4, [4], chain),
        Rows(5, [5]),
    ]
    paged = Paged(decoder, n_seqs=6)
    paged.run(*(Rows(seq, tokens) for seq, tokens in enumerate(before) if tokens))
    for rows, got in zip(step, paged.run(*step), strict=True):
        text = [*before[rows.seq], *rows.tokens]
        same(got[: len(rows.tokens)], full_logits(decoder, text)[-len(rows.tokens) :])
        if len(rows.draft):
            same(got[len(rows.tokens) :], chain_logits(decoder, text, rows.draft))


def test_sequence_without_rows_is_skipped() -> None:
    decoder = toy_decoder()
    paged = Paged(decoder, n_seqs=2)
    paged.run(Rows(0, TOKENS[:5]), Rows(1, TOKENS[:3]))
    nothing, got = paged.run(Rows(0), Rows(1, TOKENS[3:4]))
    assert nothing.shape == (0, 32)
    same(got, full_logits(decoder, TOKENS[:4])[-1:])


def test_only_wanted_logits() -> None:
    decoder = toy_decoder()
    paged = Paged(decoder)
    assert paged.forward([Rows(0, TOKENS[:6])], logit_rows=[]).logits.shape == (0, 32)
    out = paged.forward([Rows(0, TOKENS[6:12])], logit_rows=[5, 1])
    assert out.features is None
    same(out.logits, full_logits(decoder, TOKENS[:12])[[11, 7]])


def test_features_are_hidden_states_side_by_side() -> None:
    decoder = toy_decoder(toy_config(layers=3))
    out = Paged(decoder).forward([Rows(0, TOKENS)], features=(2, 0))
    assert out.features is not None
    assert out.features.shape == (40, 64)
    last, first = out.features.split(32, dim=1)
    same(decoder.logits(last), full_logits(decoder, TOKENS))
    shallow = Decoder(
        toy_config(layers=1), decoder.ops, decoder.embedding, decoder.layers[:1], decoder.final_norm, decoder.head
    )
    same(shallow.logits(first), full_logits(shallow, TOKENS))


def test_tied_head_shares_storage_and_counts_once() -> None:
    tied, loose = (toy_decoder(toy_config(tie_embeddings=tie)) for tie in (True, False))
    assert tied.head is tied.embedding
    assert loose.weight_bytes - tied.weight_bytes == 32 * 32 * 8
    numbers = sum(torch.Size(shape).numel() for shape in expected_tensors(loose.config).values())
    assert loose.weight_bytes == numbers * 8


def test_int8_halves_memory_and_stays_near() -> None:
    source = MemorySource(toy_config(hidden=64, ffn=128))
    exact, small = (
        Decoder.from_source(source, ReferenceOps(), torch.float32, "cpu", quantization=q) for q in (None, "int8")
    )
    assert small.weight_bytes < 0.45 * exact.weight_bytes
    (got,) = Paged(small).run(Rows(0, TOKENS))
    error = (got - full_logits(exact, TOKENS)).abs()
    assert 1e-3 < error.mean() < 0.2


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_quantized_too(tied: bool) -> None:
    """Tied: embedding and head are one 8-bit weight. Else the embedding, of which single rows are read, stays."""
    source = MemorySource(toy_config(hidden=64, ffn=128, tie_embeddings=tied))
    small = Decoder.from_source(source, ReferenceOps(), torch.float32, "cpu", quantization="int8")
    assert isinstance(small.head, Int8Weight)
    assert (small.head is small.embedding) == tied
    assert isinstance(small.embedding, torch.Tensor) != tied
    (got,) = Paged(small).run(Rows(0, TOKENS))
    error = (got - full_logits(source, TOKENS)).abs()
    assert got.dtype == torch.float32
    assert 1e-3 < error.mean() < 0.3


@pytest.mark.skipif(not available(), reason="the extension is not built")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quantization", "of_layers"), [("int8", "int8"), ("int4", "q4_1")])
def test_formats_on_the_native_operations(quantization: str, of_layers: str, tied: bool) -> None:
    """int4 has a head in 8 bits; the tied embedding is that same weight, an untied one stays in floats."""
    source = MemorySource(toy_config(hidden=64, ffn=128, tie_embeddings=tied))
    d = Decoder.from_source(source, NativeOps(1), torch.float32, "cpu", quantization=quantization)
    assert isinstance(d.head, NativeWeight)
    assert isinstance(d.embedding, NativeWeight)
    assert d.head.format == "int8"
    assert d.embedding.format == ("int8" if tied else "f32")
    assert (d.head is d.embedding) == tied
    for layer in d.layers:
        assert {getattr(layer, name).format for name in ("q", "k", "v", "o", "gate", "up", "down")} == {of_layers}


@pytest.mark.skipif(not available(), reason="the extension is not built")
def test_int8_means_the_same_on_both_operations() -> None:
    """The very same codes and scales, of the embedding and the head as well."""
    source = MemorySource(toy_config(hidden=64, ffn=128, tie_embeddings=True))
    source.tensors = {name: tensor.float() for name, tensor in source.tensors.items()}
    ours, theirs = (
        Decoder.from_source(source, ops, torch.float32, "cpu", quantization="int8")
        for ops in (NativeOps(1), ReferenceOps())
    )
    ids = torch.arange(32)
    assert torch.equal(ours.ops.embed(ours.embedding, ids), theirs.ops.embed(theirs.embedding, ids))
    (got,), (want,) = (Paged(d).run(Rows(0, TOKENS)) for d in (ours, theirs))
    assert (got - want).abs().mean() < 0.3  # native activations have 8 bits; the logits are some 3 wide


def test_half_precision_rows_come_out_of_an_8_bit_embedding() -> None:
    source = MemorySource(toy_config(tie_embeddings=True))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        d = Decoder.from_source(source, ReferenceOps(), dtype, "cpu", quantization="int8")
        out = Paged(d).forward([Rows(0, TOKENS)], features=(0,))
        assert out.features is not None
        assert out.features.dtype == dtype
        assert out.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


CONFIG = toy_config(qkv_bias=True)


def altered(config: ModelConfig = CONFIG, **tensors: torch.Tensor | None) -> MemorySource:
    """A source with some tensors replaced, added, or (None) removed; dots in names are written as __."""
    source = MemorySource(config)
    for name, tensor in tensors.items():
        source.tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            source.tensors[name.replace("__", ".")] = tensor
    return source


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (altered(model__layers__1__mlp__up_proj__weight=None), ["lacks", "layers.1.mlp.up_proj.weight", "[64, 32]"]),
        (altered(lm_head__weight=None), ["lacks", "lm_head.weight", "[32, 32]"]),
        (altered(model__norm__weight=torch.ones(31)), ["model.norm.weight", "[31]", "[32]"]),
        (
            altered(model__layers__0__self_attn__k_proj__bias=torch.ones(16, 1)),
            ["layers.0.self_attn.k_proj.bias", "[16, 1]", "[16]"],
        ),
        (
            altered(model__layers__0__self_attn__o_proj__bias=torch.ones(32)),
            ["unexpected", "layers.0.self_attn.o_proj.bias", "[32]", "llama"],
        ),
        (altered(model__layers__2__mlp__up_proj__weight=torch.ones(64, 32)), ["unexpected", "layers.2.mlp"]),
        (
            altered(dataclasses.replace(CONFIG, tie_embeddings=True), lm_head__weight=torch.ones(31, 32)),
            ["lm_head.weight", "[31, 32]", "[32, 32]"],
        ),
        (altered(model__norm__weight=torch.ones(32).int()), ["model.norm.weight", "int32", "floating"]),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_checkpoint_is_refused(source: MemorySource, words: list[str]) -> None:
    with pytest.raises(ModelFileError) as error:
        Decoder.from_source(source, ReferenceOps(), torch.float32, "cpu")
    for word in ["memory", *words]:
        assert word in str(error.value)


def test_harmless_extras_are_ignored() -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    source = altered(
        config,
        lm_head__weight=torch.ones(32, 32),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
    )
    decoder = Decoder.from_source(source, ReferenceOps(), torch.float64, "cpu")
    assert decoder.head is decoder.embedding


def test_unknown_rope_kind() -> None:
    with pytest.raises(ValueError, match="longrope"):
        rope_frequencies(RopeConfig(kind="longrope"), 8, 64)
