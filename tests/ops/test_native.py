from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.ops import native
from outrider.ops.contract import LayerWeights
from outrider.ops.native import NativeOps, NativeWeight, pack, pack_gguf
from outrider.ops.reference import ReferenceOps
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, toy_config

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

ISAS = native.available_isas()
FORMATS = ("f32", "bf16", "int8", "q8_0", "q4_0", "q4_1")
LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
TREE = Draft((11, 12, 13, 14, 15, 16), (-1, -1, 0, 1, 3, 2), (None,) * 6)


def gguf_blocks(kind: str, out: int, width: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """Random blocks of a GGUF tensor and what they stand for, by the format's definition: u8 bytes, f32[out, width]."""
    g = torch.Generator().manual_seed(seed)
    shape = (out, width // 32)
    d = torch.rand(shape, generator=g).half() * 0.01
    parts, codes = [d[..., None].view(torch.uint8)], torch.randint(0, 256, (*shape, 32), generator=g)
    if kind == "Q8_0":
        value = (codes - 128) * d.float()[..., None]
        parts.append((codes - 128).to(torch.int8).view(torch.uint8))
    else:
        codes %= 16
        low = -8 * d.float() if kind == "Q4_0" else torch.randn(shape, generator=g).half().float() * 0.125
        if kind == "Q4_1":
            parts.append(low.half()[..., None].view(torch.uint8))
        value = codes * d.float()[..., None] + low[..., None]
        parts.append((codes[..., :16] + 16 * codes[..., 16:]).to(torch.uint8))
    return torch.cat(parts, -1).view(out, -1).contiguous(), value.view(out, width)


def some_weight(fmt: str, out: int, width: int, seed: int = 0) -> NativeWeight:
    if fmt == "q4_0":
        return pack_gguf("Q4_0", gguf_blocks("Q4_0", out, width, seed)[0], out, width)
    return pack(torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) / 8, fmt)


def dense(weight: NativeWeight) -> torch.Tensor:
    """What a packed weight stands for."""
    return NativeOps(1).embed(weight, torch.arange(weight.shape[0]))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the integer kernels see them: per group of 32, absmax / 127, in fp32 up to the rounding."""
    groups = x.float().view(len(x), -1, 32)
    most = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (127 / most.clamp(min=1e-30))).round()
    return (codes.double() * (most / 127).double()).view_as(x)


def native_decoder(config: ModelConfig, fmt: str, threads: int = 2, isa: str | None = None, seed: int = 0) -> Decoder:
    """A toy decoder on the native operations; linear weights packed to ``fmt``."""
    d = Decoder.from_source(MemorySource(config, seed), ReferenceOps(), torch.float32, "cpu")
    layers = [dataclasses.replace(w, **{n: pack(getattr(w, n), fmt) for n in LINEAR}) for w in d.layers]
    return Decoder(d.config, NativeOps(threads, isa), d.embedding, layers, d.final_norm, pack(d.head, fmt))


def reference_of(d: Decoder) -> Decoder:
    """The same decoder in fp64 on the reference operations, with the weights that the packed ones stand for."""
    layers = [
        LayerWeights(
            **{
                f.name: None
                if (t := getattr(w, f.name)) is None
                else dense(t).double()
                if f.name in LINEAR
                else t.double()
                for f in dataclasses.fields(w)
            }
        )
        for w in d.layers
    ]
    return Decoder(
        d.config, ReferenceOps(), d.embedding.double(), layers, d.final_norm.double(), dense(d.head).double()
    )


def test_gguf_blocks_are_what_their_definition_says() -> None:
    import gguf

    for kind in native.GGUF_FORMATS:
        raw, value = gguf_blocks(kind, 5, 96)
        expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_weights_keep_their_exact_values(kind: str) -> None:
    raw, value = gguf_blocks(kind, 37, 96)
    packed = pack_gguf(kind, raw, 37, 96)
    assert packed.shape == (37, 96)
    torch.testing.assert_close(dense(packed), value, rtol=0, atol=1e-7)
    assert pack_gguf(kind, raw.numpy(), 37, 96).nbytes == packed.nbytes


@pytest.mark.parametrize(
    ("fmt", "bound"), [("f32", 0), ("bf16", 2**-8), ("int8", 0.016), ("q8_0", 0.012), ("q4_1", 0.15)]
)
def test_packing_rounds_no_more_than_the_format_must(fmt: str, bound: float) -> None:
    w = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    w[3] = 0
    error = (dense(pack(w, fmt)) - w).abs().amax(1) / w.abs().amax(1).clamp(min=1)
    assert (error <= bound).all()
    assert (error[torch.arange(33) != 3] >= bound / 16).all()
    if fmt == "bf16":
        assert torch.equal(dense(pack(w, fmt)), w.bfloat16().float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_equals_the_dense_product(fmt: str, isa: str) -> None:
    rng, ops = random.Random(f"{fmt}{isa}"), NativeOps(2, isa)
    torch.manual_seed(0)
    for case in range(12):
        out, width, rows = rng.randint(1, 90), 32 * rng.randint(1, 6), rng.choice((1, 2, 3, 5, 8, 12, 13, 25))
        if fmt in ("f32", "bf16"):
            width -= rng.randint(0, 31)
        weight, x = some_weight(fmt, out, width, case), torch.randn(rows, width) * 2
        bias = torch.randn(out) if case % 2 else None
        exact = (x.double() if fmt in ("f32", "bf16") else rounded(x)) @ dense(weight).double().T
        got = ops.linear(x, weight, bias)
        torch.testing.assert_close(got.double(), exact + (0 if bias is None else bias), rtol=1e-5, atol=1e-4)


def test_activations_of_every_size_are_rounded_to_eight_bits() -> None:
    weight = some_weight("q8_0", 16, 32)
    for size in (1e-42, 1e-31, 1e-20, 1.0, 1e20, 1e37):
        x = torch.randn(3, 32) * size
        exact = (torch.zeros(3, 32).double() if size < 1e-30 else rounded(x)) @ dense(weight).double().T
        torch.testing.assert_close(NativeOps(1).linear(x, weight).double() / size, exact / size, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_harms_no_other_row(fmt: str, isa: str, bad: float) -> None:
    weight, x = some_weight(fmt, 20, 64), torch.randn(3, 64)
    clean = NativeOps(1, isa).linear(x, weight)
    x[1, 40] = bad
    got = NativeOps(1, isa).linear(x, weight)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
def test_norm_embedding_and_rope_table(isa: str) -> None:
    ops, reference = NativeOps(2, isa), ReferenceOps()
    for width in (1, 15, 16, 64, 100):
        x, weight = torch.randn(7, width), torch.randn(width)
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6
        )
    table = torch.randn(50, 40)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embed(pack(table, "f32"), ids), table[ids])
    inv_freq, positions = 1e4 ** -(torch.arange(0, 64, 2) / 64), torch.tensor([0, 1, 77, 8000])
    for got, wanted in zip(
        ops.rope_table(inv_freq, 1.5, positions), reference.rope_table(inv_freq, 1.5, positions), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


CONFIGS = {
    "llama": toy_config(hidden=64, ffn=96),
    "grouped": toy_config(hidden=96, heads=6, kv_heads=1, ffn=128, head_dim=16, vocab=50),
    "wide heads": toy_config(hidden=32, heads=3, kv_heads=3, head_dim=80, ffn=64),
    "odd heads": toy_config(hidden=64, heads=4, kv_heads=2, head_dim=24, ffn=64),
    "qwen2": toy_config("qwen2", hidden=64, ffn=96, head_dim=32),
    "qwen3": toy_config("qwen3", hidden=64, ffn=96, head_dim=64),
    "all biases": toy_config("qwen2", hidden=64, ffn=96, o_bias=True, mlp_bias=True, qk_norm=True),
    "window": toy_config("mistral", hidden=64, ffn=96, sliding_window=(5, None)),
    "odd sizes": toy_config(hidden=36, heads=3, kv_heads=1, head_dim=10, ffn=50),
}


def traffic(paged: Paged) -> list[torch.Tensor]:
    """A prompt in chunks, two sequences, a chain, a tree, and the tree grown further: logits of every row."""
    tokens = [i * 7 % 31 for i in range(80)]
    out = paged.run(Rows(0, tokens[:37]))
    out += paged.run(Rows(0, tokens[37:40]), Rows(1, tokens[:9]))
    out += paged.run(Rows(0, tokens[40:42], TREE), Rows(1, tokens[9:10], Draft.chain((1, 2, 3))))
    out += paged.run(Rows(1, tokens[9:11]))
    out += paged.run(Rows(0, (), TREE, done=3), Rows(1, tokens[11:12]))
    return out


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_equal_the_reference(name: str, kv_dtype: torch.dtype) -> None:
    for isa in (ISAS[0], "portable"):
        decoder = native_decoder(CONFIGS[name], "f32", isa=isa)
        got = traffic(Paged(decoder, n_seqs=2, kv_dtype=kv_dtype))
        wanted = traffic(
            Paged(reference_of(decoder), n_seqs=2, kv_dtype=None if kv_dtype == torch.float32 else kv_dtype)
        )
        if kv_dtype == torch.bfloat16:  # queries and weights are rounded as well
            a, b = torch.cat(got), torch.cat(wanted)
            assert (a - b).std() < 0.02 * b.std()
            continue
        bound = 1e-3 if kv_dtype == torch.float32 else 0.15  # a value may round to the other neighbour
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=bound)


class RoundingOps(ReferenceOps):
    """The reference with the input of every linear layer rounded as the integer kernels round it.

    That of ``fine`` weights (keys and values) keeps what the rounding leaves over, rounded as well.
    """

    def __init__(self, fine: Sequence[Any]) -> None:
        super().__init__()
        self.fine = {id(weight) for weight in fine}

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        close = rounded(x)
        return super().linear(close + rounded(x - close) if id(weight) in self.fine else close, weight, bias)


@pytest.mark.parametrize("fmt", ["int8", "q8_0", "q4_1"])
def test_layers_of_integer_weights_equal_the_reference_with_rounded_activations(fmt: str) -> None:
    decoder = native_decoder(CONFIGS["llama"], fmt)
    got, plain = torch.cat(traffic(Paged(decoder, n_seqs=2))), reference_of(decoder)
    unrounded = torch.cat(traffic(Paged(plain, n_seqs=2)))
    plain.ops = RoundingOps([weight for layer in plain.layers for weight in (layer.k, layer.v)])
    wanted = torch.cat(traffic(Paged(plain, n_seqs=2)))
    assert (got - wanted).std() < 0.2 * (unrounded - wanted).std()  # what is left: values on the edge of rounding
    assert (got - wanted).abs().median() < 1e-4
    plain.ops = RoundingOps([])
    coarse = torch.cat(traffic(Paged(plain, n_seqs=2)))
    assert (got - wanted).std() < 0.2 * (got - coarse).std()  # so they are finer indeed


def test_all_instruction_sets_and_thread_counts_give_the_same_bits() -> None:
    for name, fmt, kv_dtype in (
        ("llama", "q4_1", torch.int8),
        ("qwen3", "int8", torch.bfloat16),
        ("window", "q8_0", torch.float32),
        ("all biases", "bf16", torch.float16),
        ("odd sizes", "f32", torch.int8),
        ("wide heads", "f32", torch.int8),
    ):
        seen = {}
        for isa in ISAS:
            for threads in (1, 2, 3, 4):
                paged = Paged(native_decoder(CONFIGS[name], fmt, threads, isa), n_seqs=2, kv_dtype=kv_dtype)
                seen[isa, threads] = torch.cat(traffic(paged))
        first = seen[ISAS[0], 1]
        assert first.isfinite().all()
        for key, logits in seen.items():
            assert torch.equal(logits, first), (name, fmt, key)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_a_product_do_not_depend_on_the_batch(fmt: str, isa: str) -> None:
    weight, x, ops = some_weight(fmt, 50, 96), torch.randn(64, 96), NativeOps(2, isa)
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    for rows in range(1, 65):
        assert torch.equal(ops.linear(x[64 - rows :], weight), alone[64 - rows :]), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fmt", ["int8", "q8_0", "q4_0", "q4_1"])
def test_products_of_every_number_of_rows_and_groups_have_the_bits_of_portable_ones(fmt: str, isa: str) -> None:
    """Around the edges of tiles, of bands of tiles and of strips of groups; outputs that fill no block."""
    torch.manual_seed(0)
    shapes = [(rows, 3) for rows in (*range(1, 35), 48, 49, 128, 129, 137, 300)]
    shapes += [(rows, groups) for rows in (8, 9, 10, 16, 17, 31, 129) for groups in (*range(1, 10), 12, 13, 25, 48)]
    ops, portable = NativeOps(2, isa), NativeOps(2, "portable")
    weights = {groups: some_weight(fmt, 37, 32 * groups, groups) for _, groups in shapes}
    for rows, groups in shapes:
        x, bias = torch.randn(rows, 32 * groups) * 3, torch.randn(37)
        got, wanted = (o.linear(x, weights[groups], bias) for o in (ops, portable))
        assert torch.equal(got, wanted), (rows, groups)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "lowest"), [("Q8_0", -128), ("Q4_0", -8)])
def test_the_largest_integer_sums_are_exact(kind: str, lowest: int, isa: str) -> None:
    """Codes and activations at the ends of their ranges: all that is added up has one sign."""
    codes = torch.full((16, 4, 32), -128, dtype=torch.int8) if kind == "Q8_0" else torch.zeros(16, 4, 16)
    raw = torch.cat([torch.ones(16, 4, 1).half().view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], -1)
    weight = pack_gguf(kind, raw.view(16, -1), 16, 128)
    for rows in (1, 12, 16, 33):
        for x in (127.0, -127.0):
            got = NativeOps(1, isa).linear(torch.full((rows, 128), x), weight)
            assert torch.equal(got, torch.full((rows, 16), 128 * x * lowest))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", torch.int8),
        ("window", None),
        ("window", torch.bfloat16),
        ("odd heads", torch.int8),
        ("odd heads", torch.float16),
        ("grouped", torch.float16),  # so many queries a key that their scores are taken in two goes
    ],
)
def test_rows_of_layers_do_not_depend_on_the_batch(name: str, isa: str, kv_dtype: torch.dtype | None) -> None:
    tokens = [i * 7 % 31 for i in range(100)]

    def prompt(chunks: Sequence[int]) -> torch.Tensor:
        paged, at, out = Paged(native_decoder(CONFIGS[name], "q4_1", isa=isa), n_seqs=2, kv_dtype=kv_dtype), 0, []
        for chunk in chunks:
            out += paged.run(Rows(0, tokens[at : at + chunk]))
            at += chunk
        return torch.cat(out)

    alone = prompt([1] * 100)
    for chunks in ([100], [64, 36], [17, 1, 2, 33, 47], [5] * 20):
        assert torch.equal(prompt(chunks), alone)
    many = Paged(native_decoder(CONFIGS[name], "q4_1", isa=isa), n_seqs=64, max_len=40, kv_dtype=kv_dtype)
    rng = random.Random(0)
    lengths = [rng.randint(1, 30) for _ in range(64)]
    many.run(*(Rows(i, tokens[:n]) for i, n in enumerate(lengths)))
    for i, logits in enumerate(many.run(*(Rows(i, tokens[n : n + 1 + i % 3]) for i, n in enumerate(lengths)))):
        assert torch.equal(logits, alone[lengths[i] : lengths[i] + 1 + i % 3])


@pytest.mark.parametrize("kv_dtype", [None, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_a_path_through_a_tree_has_the_bits_of_plain_decoding(name: str, kv_dtype: torch.dtype | None) -> None:
    tokens = [i * 7 % 31 for i in range(40)]
    paged = Paged(native_decoder(CONFIGS[name], "q4_1"), n_seqs=2, kv_dtype=kv_dtype)
    paged.run(Rows(0, tokens), Rows(1, tokens))
    (tree,) = paged.run(Rows(0, [1], TREE))
    path = [0, 2, 5]  # nodes 0 -> 2 -> 5
    plain = [paged.run(Rows(1, [t]))[0] for t in (1, *(TREE.tokens[node] for node in path))]
    assert torch.equal(tree[[0, *(1 + node for node in path)]], torch.cat(plain))


def test_two_sets_of_threads_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    weight, x = some_weight("q4_1", 64, 64), torch.randn(5, 64)
    expected, each = NativeOps(1).linear(x, weight), [NativeOps(2), NativeOps(3)]
    with ThreadPoolExecutor(4) as callers:
        results = callers.map(lambda i: each[i % 2].linear(x, weight), range(200))
        assert all(torch.equal(got, expected) for got in results)


@pytest.mark.parametrize(("key", "value"), [("f32", "q8_0"), ("q8_0", "f32"), ("bf16", "q4_1"), ("int8", "bf16")])
def test_keys_and_values_may_be_stored_in_different_formats(key: str, value: str) -> None:
    """What rounding leaves over of an input is only multiplied where the input was rounded."""
    mixed = native_decoder(CONFIGS["llama"], "f32")
    mixed.layers = tuple(
        dataclasses.replace(layer, k=pack(dense.k.float(), key), v=pack(dense.v.float(), value))
        for layer, dense in zip(mixed.layers, reference_of(mixed).layers, strict=True)
    )
    stored = []
    for decoder in (mixed, reference_of(mixed)):
        paged = Paged(decoder)
        paged.run(Rows(0, [i * 7 % 31 for i in range(9)]))
        first = paged.tables[0][0] * paged.block_size
        stored.append([part[:, first : first + 4].double() for part in paged.kv[0].parts])
    for got, want in zip(*stored, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-3)
