"""Many layers in one native call: the bits of one call a layer, wherever they are cut; what does not fit is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.models.decoder import Decoder
from outrider.ops import native
from outrider.ops.contract import LayerKV, LayerStack
from outrider.ops.native import NativeOps
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, toy_config

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

TOKENS = [(7 * i) % 32 for i in range(40)]


def decoder(threads: int = 2) -> Decoder:
    config = toy_config("mistral", layers=5, sliding_window=(5, None, None, 9, 5))
    return Decoder.from_source(MemorySource(config), NativeOps(threads), torch.float32, "cpu", "int8")


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_stack_gives_the_bits_of_its_layers_one_by_one(rows: int, threads: int) -> None:
    model = decoder(threads)
    one, many = Paged(model), Paged(model)
    for paged in (one, many):
        paged.forward([Rows(0, TOKENS)])
    batch = one.batch([Rows(0, TOKENS[:rows])])
    rope = model.ops.rope_table(model.inv_freq, 1.0, torch.from_numpy(batch.positions))
    x = model.ops.embed(model.embedding, torch.from_numpy(batch.ids))
    expected = x
    for weights, shape, kv in zip(model.layers, model.shapes, one.kv, strict=True):
        expected = model.ops.decoder_layer(expected, weights, shape, rope, kv, batch)
    before = x.clone()
    (stack,) = model.stacks(many.kv)
    assert torch.equal(model.ops.decoder_layers(x, stack, rope, batch), expected)
    assert torch.equal(x, before)
    for a, b in zip(one.kv, many.kv, strict=True):
        assert torch.equal(a.k[:, batch.slots], b.k[:, batch.slots])
        assert torch.equal(a.v[:, batch.slots], b.v[:, batch.slots])


def test_features_do_not_depend_on_where_the_layers_are_cut() -> None:
    model = decoder()
    plain = Paged(model).forward([Rows(0, TOKENS)])
    every = Paged(model).forward([Rows(0, TOKENS)], features=(0, 1, 2, 3, 4))
    some = Paged(model).forward([Rows(0, TOKENS)], features=(4, 1, 1))
    assert plain.features is None
    assert every.features is not None
    assert some.features is not None
    parts = every.features.split(32, dim=1)
    assert torch.equal(some.features, torch.cat([parts[4], parts[1], parts[1]], dim=1))
    assert torch.equal(plain.logits, every.logits)
    assert torch.equal(plain.logits, some.logits)


@pytest.mark.parametrize("layer", [-1, 5])
def test_features_of_a_layer_that_is_not_there_are_refused(layer: int) -> None:
    model = decoder()
    with pytest.raises(ValueError, match=r"feature_layers is .* allowed are 0 to 4"):
        Paged(model).forward([Rows(0, TOKENS)], features=(0, layer))


def test_stacks_that_do_not_fit_raise() -> None:
    model = decoder()
    paged = Paged(model)
    batch = paged.batch([Rows(0, TOKENS)])
    rope = model.ops.rope_table(model.inv_freq, 1.0, torch.from_numpy(batch.positions))
    x = model.ops.embed(model.embedding, torch.from_numpy(batch.ids))
    (good,) = model.stacks(paged.kv)
    last = paged.kv[4]
    other = Decoder.from_source(
        MemorySource(toy_config(layers=1, hidden=64, heads=8, kv_heads=2, head_dim=8)),
        model.ops,
        torch.float32,
        "cpu",
    )
    for changes in (
        {"kv": good.kv[:4]},
        {"layers": good.layers[:4]},
        {"layers": (), "shapes": (), "kv": ()},
        {"kv": (*good.kv[:4], LayerKV(last.k[:, :2].contiguous(), last.v[:, :2].contiguous()))},
        {"kv": (*good.kv[:4], LayerKV(last.k[:1], last.v[:1]))},
        {"layers": (*good.layers[:4], other.layers[0]), "shapes": (*good.shapes[:4], other.shapes[0])},
    ):
        with pytest.raises(ValueError, match=r"\w+ .*"):
            model.ops.decoder_layers(x, dataclasses.replace(good, **changes), rope, batch)
    assert isinstance(good, LayerStack)
    assert model.ops.decoder_layers(x, good, rope, batch).isfinite().all()
