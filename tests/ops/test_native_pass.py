"""A whole pass in one native call: the bits of its parts, and nothing out of range gets through."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from outrider.models.decoder import Decoder
from outrider.ops import native
from outrider.ops.native import NativeOps
from tests.ops.paged import Paged, Rows
from tests.toy import MemorySource, toy_config

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

TOKENS = [(i * 7 + 3) % 32 for i in range(20)]


def decoder(threads: int = 2, quantization: str | None = "int8", **changes: Any) -> Decoder:
    config = toy_config("mistral", layers=4, sliding_window=(5, None, None, 9), **changes)
    return Decoder.from_source(MemorySource(config), NativeOps(threads), torch.float32, "cpu", quantization)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("wanted", [[], [19], [4, 2, 19, 2], list(range(20))], ids=len)
def test_a_pass_gives_the_bits_of_its_parts(threads: int, quantization: str | None, wanted: list[int]) -> None:
    model = decoder(threads, quantization)
    ops, one, whole = model.ops, Paged(model), Paged(model)
    batch = one.batch([Rows(0, TOKENS)], logit_rows=wanted)
    x = ops.embed(model.embedding, torch.from_numpy(batch.ids))
    rope = ops.rope_table(model.inv_freq, model.rope_scale, torch.from_numpy(batch.positions))
    hidden = []
    for stack in model.stacks(one.kv, (0, 2)):
        x = ops.decoder_layers(x, stack, rope, batch)
        hidden.append(x)
    logits = ops.linear(ops.rms_norm(x[wanted], model.final_norm, model.config.norm_eps), model.head)
    out = model.forward(batch, whole.kv, (2, 0))
    assert np.array_equal(out.logits, logits.numpy())
    assert out.best is not None
    assert out.best.tolist() == logits.argmax(-1).tolist()
    assert out.features is not None
    assert torch.equal(out.features, torch.cat([hidden[1], hidden[0]], dim=1))
    for a, b in zip(one.kv, whole.kv, strict=True):
        assert torch.equal(a.k[:, batch.slots], b.k[:, batch.slots])
        assert torch.equal(a.v[:, batch.slots], b.v[:, batch.slots])


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_greatest_logit_is_the_first_of_equals(threads: int, isa: str) -> None:
    """Vocabularies with and without a part of a vector and of a stretch at their end, split among threads."""
    for vocab in (1, 15, 16, 300, 2053):
        config = toy_config(vocab=vocab, layers=1)
        source = MemorySource(config)
        model = Decoder.from_source(source, NativeOps(threads, isa), torch.float32, "cpu")
        head = torch.zeros(vocab, config.hidden_size)
        for heads in ((), (0,), (vocab - 1,), (vocab // 2, vocab - 1), (vocab // 3, vocab // 2)):
            head[:] = -1.0
            head[list(heads)] = 1.0
            paged = Paged(model)
            batch = paged.batch([Rows(0, [0, 0, 0])])
            out = model.ops.forward(dataclasses.replace(model.ends, head=head.clone()), model.stacks(paged.kv), batch)
            assert out.best is not None
            assert out.best.tolist() == out.logits.argmax(-1).tolist()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 17, 299])
def test_a_row_that_is_not_finite_has_no_greatest_logit(at: int, odd: float) -> None:
    model = Decoder.from_source(MemorySource(toy_config(vocab=300)), NativeOps(2), torch.float32, "cpu")
    head = torch.ones(300, model.config.hidden_size)
    head[at] = odd
    paged = Paged(model)
    batch = paged.batch([Rows(0, [0, 1])])
    out = model.ops.forward(dataclasses.replace(model.ends, head=head), model.stacks(paged.kv), batch)
    assert out.best is not None
    assert out.best.tolist() == [-1, -1]


def test_what_does_not_fit_a_pass_raises() -> None:
    model = decoder()
    paged = Paged(model)
    batch = paged.batch([Rows(0, TOKENS)])
    stacks = model.stacks(paged.kv)

    def wrong(what: str, ends: Any = model.ends, layers: Any = stacks, **changes: Any) -> None:
        with pytest.raises(ValueError, match=what):
            model.ops.forward(ends, layers, dataclasses.replace(batch, **changes))

    wrong("ids holds 32; allowed is 0 to 31", ids=batch.ids + (32 - batch.ids.max()))
    wrong("ids holds -1", ids=batch.ids - batch.ids.min() - 1)
    wrong("ids has shape", ids=batch.ids[:-1])
    wrong("ids has another element type", ids=batch.ids.astype(np.int32))
    wrong("logit_rows holds 20; allowed is 0 to 19", logit_rows=np.array([3, 20]))
    wrong("logit_rows holds -1", logit_rows=np.array([-1]))
    wrong("slot", slots=batch.slots + 10**6)
    wrong("a pass needs layers", layers=())
    wrong("the layers do not fit", layers=decoder(hidden=64, heads=8, kv_heads=2, head_dim=8).stacks(paged.kv))
    wrong("norm has shape", ends=dataclasses.replace(model.ends, final_norm=torch.ones(31)))
    wrong("the layers do not fit", ends=dataclasses.replace(model.ends, inv_freq=model.inv_freq[:-1]))
    wrong("differ in width", ends=dataclasses.replace(model.ends, head=torch.randn(32, 64)))
    assert np.isfinite(model.ops.forward(model.ends, stacks, batch).logits).all()
