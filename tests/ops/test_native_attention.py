"""Attention of the native operations over several stretches of positions, also by tiles where there are any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.core.draft import Draft
from outrider.models.config import ModelConfig
from outrider.ops import native
from tests.ops.paged import Paged, Rows
from tests.ops.test_native import TREE, native_decoder, reference_of
from tests.toy import toy_config

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

ISAS = native.available_isas()
TOKENS = [i * 7 % 31 for i in range(420)]
SHAPES = {
    "one head": toy_config(hidden=64, heads=1, kv_heads=1, head_dim=64, max_position=512),
    "three a key": toy_config(hidden=96, heads=6, kv_heads=2, head_dim=32, max_position=512),
    "more than a tile": toy_config(hidden=64, heads=19, kv_heads=1, head_dim=32, max_position=512),
    "wide": toy_config(hidden=64, heads=3, kv_heads=1, head_dim=160, max_position=512),
    "no tiles": toy_config(hidden=64, heads=4, kv_heads=2, head_dim=48, max_position=512),
    "windows": toy_config("mistral", hidden=64, heads=4, kv_heads=1, head_dim=64, sliding_window=(5, 140)),
}


def in_pieces(
    shape: ModelConfig, sizes: Sequence[int], isa: str, threads: int = 2, in_order: bool = False
) -> torch.Tensor:
    """Logits of a prompt in pieces of these sizes beside another one, then of a chain, a tree, and the tree grown."""
    paged = Paged(native_decoder(shape, "q8_0", threads, isa), 2, 480, 4, in_order=in_order, kv_dtype=torch.bfloat16)
    out: list[torch.Tensor] = []
    at = 0
    for size in sizes:
        out += paged.run(Rows(0, TOKENS[at : at + size]), Rows(1, [3]))[:1]
        at += size
    out += paged.run(Rows(1, [4, 5]), Rows(0, [1], Draft.chain((1, 2, 3, 4, 5, 6, 7))))[1:]
    out += paged.run(Rows(0, [1, 2], TREE))
    out += paged.run(Rows(0, (), TREE, done=3))
    return torch.cat(out)


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_has_the_same_bits_on_every_instruction_set(name: str) -> None:
    sizes = [290, 1, 2, 5, 30]
    first = in_pieces(SHAPES[name], sizes, ISAS[0])
    assert first.isfinite().all()
    for isa in ISAS[1:]:
        assert torch.equal(in_pieces(SHAPES[name], sizes, isa), first), isa
    for threads in (1, 3):
        assert torch.equal(in_pieces(SHAPES[name], sizes, ISAS[0], threads), first)
    assert torch.equal(in_pieces(SHAPES[name], sizes, ISAS[0], in_order=True), first)  # keys read where they lie


@pytest.mark.parametrize("name", SHAPES)
def test_rows_do_not_depend_on_who_shares_their_tiles(name: str) -> None:
    alone = in_pieces(SHAPES[name], [1] * 300, ISAS[0])
    for sizes in ([300], [5] * 60, [128, 127, 1, 3, 41], [17, 100, 183]):
        assert torch.equal(in_pieces(SHAPES[name], sizes, ISAS[0]), alone), sizes


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_loses_no_more_than_storing_it_does(name: str) -> None:
    """Queries and weights are rounded, too: together with keys and values that may cost twice what those cost."""
    rows = Rows(0, TOKENS[:300])
    decoder = native_decoder(SHAPES[name], "f32")
    reference = reference_of(decoder)
    (exact,), (stored,), (got,) = (
        Paged(d, max_len=320, kv_dtype=kv).run(rows)
        for d, kv in ((reference, torch.float32), (reference, torch.bfloat16), (decoder, torch.bfloat16))
    )
    lost = (stored - exact).square().mean().sqrt()
    assert 0 < (got - exact).square().mean().sqrt() < 2 * lost


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_reaches_no_row_that_does_not_see_it(isa: str, bad: float) -> None:
    prompt = [token for token in TOKENS if token != 30][:150]
    seen = []
    for value in (0.5, bad):
        decoder = native_decoder(SHAPES["three a key"], "f32", isa=isa)
        decoder.embedding[30] = value
        paged = Paged(decoder, max_len=200, kv_dtype=torch.bfloat16)
        paged.run(Rows(0, prompt))
        seen += paged.run(Rows(0, [3], Draft.chain((4, 5, 30, 6))))
    assert torch.equal(seen[0][:3], seen[1][:3])
    assert not seen[1][3:].isfinite().any()
