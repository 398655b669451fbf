from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.ops.contract import Int8Weight
from outrider.ops.reference import ReferenceOps, quantize_int8
from tests.ops.paged import Paged, Rows
from tests.toy import full_logits, toy_config, toy_decoder

OPS = ReferenceOps()


def test_rms_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]).double(), torch.tensor([1.0, 10.0]).double()
    rms = (25 / 2 + 0.5) ** 0.5
    torch.testing.assert_close(OPS.rms_norm(x, weight, 0.5), torch.tensor([[3 / rms, 40 / rms]]).double())


def test_rms_norm_of_half_types_sums_in_float32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # its square, 90000, is more than fp16 can hold
    assert OPS.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 64]


def test_linear_with_bias() -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.25])
    assert OPS.linear(x, weight, bias).tolist() == [[11.5, 17.25]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_int8_linear_uses_one_scale_an_output(dtype: torch.dtype) -> None:
    weight = Int8Weight(torch.tensor([[127, -127], [1, 2]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
    bias = torch.tensor([1.0, 0.0], dtype=dtype)
    assert OPS.linear(torch.tensor([[3.0, 1.0]], dtype=dtype), weight, bias).tolist() == [[128.0, 10.0]]


def test_int8_linear_does_not_overflow_float16() -> None:
    x = torch.full((1, 128), 8.0, dtype=torch.float16)  # 128 * 8 * 127 is more than fp16 can hold
    weight = Int8Weight(torch.full((1, 128), 127, dtype=torch.int8), torch.tensor([1 / 127]))
    assert OPS.linear(x, weight).item() == 1024.0


def test_quantize_int8_is_within_half_a_step() -> None:
    weight = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 8)[:, None]
    weight[3] = 0
    packed = quantize_int8(weight)
    assert packed.q.dtype == torch.int8
    step = weight.abs().amax(1) / 127
    torch.testing.assert_close(packed.scale, step)
    error = (packed.q * packed.scale[:, None] - weight).abs()
    assert (error <= 0.5001 * step[:, None]).all()
    assert error.max() > 0  # rounding did happen


def test_rope_table() -> None:
    cos, sin = OPS.rope_table(torch.tensor([1.0, 0.1]).double(), 2.0, torch.tensor([0, 3]))
    angle = torch.tensor([[0.0, 0.0], [3.0, 0.3]]).double()
    torch.testing.assert_close(cos, 2 * angle.cos())
    torch.testing.assert_close(sin, 2 * angle.sin())


@pytest.mark.parametrize("in_order", [True, False])
def test_blocks_in_order_are_read_in_place_with_the_same_result(in_order: bool) -> None:
    decoder = toy_decoder()
    paged = Paged(decoder, in_order=in_order)
    paged.run(Rows(0, [1, 2, 3, 4, 5, 6, 7]))
    (got,) = paged.run(Rows(0, [8, 9]))
    torch.testing.assert_close(got, full_logits(decoder, range(1, 10))[-2:], rtol=0, atol=1e-10)


def test_kv_in_another_type_than_the_model() -> None:
    decoder = toy_decoder(dtype=torch.float32)
    exact = full_logits(decoder, range(12))
    (rounded,) = Paged(decoder, kv_dtype=torch.bfloat16).run(Rows(0, range(12)))
    assert rounded.dtype == torch.float32
    error = (rounded - exact).abs().max()
    assert 1e-5 < error < 0.5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.6), (torch.float16, 0.08)])
def test_half_types_stay_near_float64(dtype: torch.dtype, bound: float) -> None:
    tokens = list(range(20))
    (got,) = Paged(toy_decoder(dtype=dtype)).run(Rows(0, tokens))
    assert got.dtype == torch.float32, "logits come wide"
    error = (got.double() - full_logits(toy_decoder(), tokens)).abs().max()
    assert error < bound


def test_plan_is_made_once_a_pass_and_freed_with_its_batch() -> None:
    decoder = toy_decoder(toy_config(layers=3))
    paged = Paged(decoder)
    ops = decoder.ops
    assert isinstance(ops, ReferenceOps)
    batch = paged.batch([Rows(0, [1, 2, 3])])
    decoder.forward(batch, paged.kv)
    plan = ops._plans[batch]
    decoder.forward(batch, paged.kv)
    assert ops._plans[batch] is plan
    other = dataclasses.replace(batch)
    decoder.forward(other, paged.kv)
    assert ops._plans[other] is not plan
    del batch, other
    assert len(ops._plans) == 0
