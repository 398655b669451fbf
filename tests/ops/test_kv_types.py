"""Keys and values in fewer bits: what is stored, what attention makes of it, on the reference and native operations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from outrider.ops import native
from outrider.ops.contract import KV_GROUP
from outrider.ops.native import pack
from outrider.ops.reference import quantize_kv
from tests.ops.paged import Paged, Rows
from tests.ops.test_native import CONFIGS, TREE, dense, native_decoder, traffic
from tests.toy import full_logits, toy_config, toy_decoder

NATIVE = pytest.mark.skipif(not native.available(), reason="the extension is not built")


def vectors(dim: int, n: int = 40, seed: int = 0) -> torch.Tensor:
    """f32[n, 3, dim] of very different sizes, with a zero vector and one too small to count."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dim, generator=g) * torch.logspace(-8, 8, n)[:, None, None]
    x[3], x[4] = 0, 1e-35
    return x


@pytest.mark.parametrize("dim", [2, 10, 32, 34, 64, 80])
def test_codes_are_within_half_a_step_of_each_groups_own_scale(dim: int) -> None:
    x = vectors(dim)
    codes, scale = quantize_kv(x)
    assert (codes.dtype, codes.shape) == (torch.int8, x.shape)
    for group, part in enumerate(x.split(KV_GROUP, -1)):
        step = part.abs().amax(-1) / 127
        step[step < 1e-32] = 0
        assert torch.equal(scale[..., group], step)
        mine = codes[..., group * KV_GROUP : (group + 1) * KV_GROUP]
        error = (mine * step[..., None] - part).abs()
        assert (error <= 0.5001 * step[..., None] + 1e-34).all()
        assert (mine.int().abs().amax(-1) == torch.where(step == 0, 0, 127)).all(), "the whole range is used"
    assert dim == 2 or (codes * 1.0).std() > 30


def test_a_vectors_codes_depend_on_nothing_but_itself() -> None:
    x = vectors(80)
    codes, scale = quantize_kv(x)
    for i in range(len(x)):
        own_codes, own_scale = quantize_kv(x[i : i + 1, 1:2])
        assert torch.equal(own_codes[0, 0], codes[i, 1])
        assert torch.equal(own_scale[0, 0], scale[i, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_harms_no_other_group(bad: float) -> None:
    x = vectors(64)
    clean = quantize_kv(x)[1]
    x[20, 1, 40] = bad
    scale = quantize_kv(x)[1]
    assert not scale[20, 1, 1].isfinite()
    scale[20, 1, 1] = clean[20, 1, 1]
    assert torch.equal(scale, clean)


@pytest.mark.parametrize(("kv_dtype", "low", "high"), [(torch.bfloat16, 1e-3, 0.3), (torch.int8, 1e-3, 0.3)])
@pytest.mark.parametrize("head_dim", [8, 40])
def test_logits_are_near_those_of_full_precision(kv_dtype: torch.dtype, low: float, high: float, head_dim: int) -> None:
    decoder, tokens = toy_decoder(toy_config(head_dim=head_dim)), [i * 7 % 31 for i in range(40)]
    exact = full_logits(decoder, tokens)
    (got,) = Paged(decoder, kv_dtype=kv_dtype).run(Rows(0, tokens))
    assert got.dtype == torch.float64
    assert low < (got - exact).abs().max() < high * exact.std()


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_a_slot_holds_the_same_whoever_wrote_it(kv_dtype: torch.dtype) -> None:
    """A prompt in one pass, in chunks, row by row, beside others, and as a path of a tree: on the reference in fp64."""
    decoder, tokens = toy_decoder(), [i * 7 % 31 for i in range(20)]

    def stored(paged: Paged, seq: int, n: int, layer: int = 1) -> list[torch.Tensor]:
        size, table = paged.block_size, paged.tables[seq]
        slots = torch.tensor([table[s // size] * size + s % size for s in range(n)])
        return [part[:, slots] for part in paged.kv[layer].parts]

    whole = Paged(decoder, kv_dtype=kv_dtype)
    whole.run(Rows(0, [*tokens, TREE.tokens[0], TREE.tokens[2], TREE.tokens[5]]))
    want = stored(whole, 0, 23)
    for chunks in ([1] * 20, [7, 13], [3, 1, 16]):
        paged, at = Paged(decoder, n_seqs=2, kv_dtype=kv_dtype), 0
        for chunk in chunks:
            paged.run(Rows(1, tokens[:3]), Rows(0, tokens[at : at + chunk], TREE))
            at += chunk
        assert all(torch.equal(mine, theirs[:, :20]) for mine, theirs in zip(stored(paged, 0, 20), want, strict=True))
        drafted = [stored(paged, 0, 26)[i][:, 20:] for i in range(len(want))]
        for depth, node in enumerate((0, 2, 5)):
            assert all(torch.equal(m[:, node], t[:, 20 + depth]) for m, t in zip(drafted, want, strict=True))


@NATIVE
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("name", ["llama", "wide heads", "odd heads", "odd sizes", "qwen3"])
def test_native_rounds_as_the_reference_does_to_the_last_bit(name: str, isa: str) -> None:
    decoder = native_decoder(CONFIGS[name], "f32", isa=isa)
    full, short = (Paged(decoder, kv_dtype=kind) for kind in (torch.float32, torch.int8))
    for paged in (full, short):
        paged.run(Rows(0, [i * 7 % 31 for i in range(50)]))
    written = full.batch([Rows(0, [0])]).block_tables[0]
    slots = torch.cat([torch.arange(4) + 4 * int(block) for block in written])[:50]
    first, other = full.kv[0], short.kv[0]  # later layers have seen rounded keys
    for exact, codes, scale in ((first.k, other.k, other.k_scale), (first.v, other.v, other.v_scale)):
        assert scale is not None
        want_codes, want_scale = quantize_kv(exact[:, slots])
        assert torch.equal(codes[:, slots], want_codes)
        assert torch.equal(scale[:, slots], want_scale)


def test_the_reference_keeps_halves_in_range() -> None:
    decoder = toy_decoder()
    first = dataclasses.replace(decoder.layers[0], v=decoder.layers[0].v * 1e6)
    decoder.layers = (first, *decoder.layers[1:])
    paged = Paged(decoder, kv_dtype=torch.float16)
    (logits,) = paged.run(Rows(0, range(12)))
    assert (paged.kv[0].v.abs() == torch.finfo(torch.float16).max).any()
    assert logits.isfinite().all()


@NATIVE
@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("name", ["llama", "wide heads", "odd heads", "odd sizes"])
def test_halves_are_rounded_and_kept_in_range_by_all_alike(name: str, isa: str) -> None:
    """Values below a half's smallest, between its whole steps, and beyond its greatest one."""
    decoder = native_decoder(CONFIGS[name], "f32", isa=isa)
    layer = decoder.layers[0]
    rows = len(dense(layer.v))
    spread = 10.0 ** torch.linspace(-9, 6, rows)[:, None]
    first = dataclasses.replace(layer, v=pack(dense(layer.v) * spread, "f32"))
    decoder.layers = (first, *decoder.layers[1:])
    full, short = (Paged(decoder, kv_dtype=kind) for kind in (torch.float32, torch.float16))
    for paged in (full, short):
        paged.run(Rows(0, [i * 7 % 31 for i in range(50)]))
    written = full.batch([Rows(0, [0])]).block_tables[0]
    slots = torch.cat([torch.arange(4) + 4 * int(block) for block in written])[:50]
    exact, halves = full.kv[0].v[:, slots], short.kv[0].v[:, slots]
    assert exact.abs().max() > 65504
    assert (exact.abs() < 2.0**-24).any()
    assert torch.equal(halves, exact.clamp(-65504, 65504).half())
    assert torch.equal(short.kv[0].k[:, slots], full.kv[0].k[:, slots].half())


@NATIVE
def test_native_attention_reads_what_the_codes_stand_for() -> None:
    """Values changed behind the kernel's back: an fp32 pool that holds the decoded codes gives the same bits."""
    for name in ("llama", "wide heads", "odd sizes", "window"):
        decoder = native_decoder(dataclasses.replace(CONFIGS[name], n_layers=1), "f32")
        short, wide = (Paged(decoder, n_seqs=2, kv_dtype=kind) for kind in (torch.int8, torch.float32))
        traffic(short), traffic(wide)
        kv, target = short.kv[0], wide.kv[0]
        for codes, scale, to in ((kv.k, kv.k_scale, target.k), (kv.v, kv.v_scale, target.v)):
            assert scale is not None
            to.copy_(codes * scale.repeat_interleave(KV_GROUP, -1)[..., : codes.shape[-1]])
        # The row's own slot is written again by the pass: its key is seen rounded in one pool only. Leave it out.
        for paged in (short, wide):
            paged.lengths[0] -= 1
        a, b = (paged.batch([Rows(0, [5])]) for paged in (short, wide))
        hidden = (
            dataclasses.replace(a, slots=a.slots * 0 + spare(short)),
            dataclasses.replace(b, slots=b.slots * 0 + spare(wide)),
        )
        got, want = (
            decoder.forward(batch, paged.kv).logits for batch, paged in zip(hidden, (short, wide), strict=True)
        )
        assert np.isfinite(got).all()
        assert np.array_equal(got, want)


def spare(paged: Paged) -> int:
    """A slot that no sequence uses."""
    return paged.tables[1][-1] * paged.block_size
